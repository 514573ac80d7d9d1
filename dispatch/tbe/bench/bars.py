"""How a run stands against the bars of ``targets``: each value by one query on the run, and a verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tbe.bench.queries import RunView
from tbe.bench.targets import (
    CHECKING,
    DEVICE,
    FLOOR,
    GEOMEAN,
    LONGEST,
    MEMORY_BEYOND,
    PEER,
    RECORDED,
    WORST,
    Target,
    targets,
)
from tbe.bench.workloads import BOUNDS_WARN

REACHED, MISSED, PARTIAL = "reached", "not reached", "incomplete"
NOT_MEASURED, NOT_JUDGED = "not measured", "not judged"

_CHOSEN = "(:every OR workload IN (SELECT value FROM json_each(:workloads)))"

# Each gives ``value``, on how many workloads it stands (``found``), and the one that decides it (``decides``:
# SQLite takes a bare column from the row of the only MIN or MAX).
_QUERIES = {
    GEOMEAN: f"""
        SELECT geomean(speedup) AS value, COUNT(*) AS found, NULL AS decides FROM comparison
        WHERE run_id = :run AND ours = :ours AND peer = :peer AND metric = :metric AND {_CHOSEN}""",
    WORST: f"""
        SELECT MIN(speedup) AS value, COUNT(*) AS found, workload AS decides FROM comparison
        WHERE run_id = :run AND ours = :ours AND peer = :peer AND metric = :metric AND {_CHOSEN}""",
    RECORDED: """
        SELECT MIN(recorded.value * 1e-6 / median) AS value, COUNT(*) AS found, workload AS decides
        FROM figure JOIN json_each(:recorded) AS recorded ON recorded.key = workload
        WHERE run_id = :run AND implementation = :ours AND metric = :metric AND median > 0""",
    FLOOR: f"""
        SELECT MIN(ratio) AS value, COUNT(*) AS found, workload AS decides FROM against_floor
        WHERE run_id = :run AND implementation = :ours AND metric = :metric AND {_CHOSEN}""",
    LONGEST: f"""
        SELECT MAX(median) * :factor AS value, COUNT(median) AS found, workload AS decides FROM figure
        WHERE run_id = :run AND implementation = :ours AND metric = :metric AND {_CHOSEN}""",
    MEMORY_BEYOND: f"""
        SELECT MAX(bytes_a_lookup - theirs) AS value, COUNT(*) AS found, workload AS decides
        FROM beyond_output JOIN (
            SELECT workload_id AS their_workload, bytes_a_lookup AS theirs FROM beyond_output
            WHERE run_id = :run AND implementation = :peer
        ) ON their_workload = workload_id
        WHERE run_id = :run AND implementation = :ours AND {_CHOSEN}""",
    CHECKING: f"""
        SELECT MAX(100 * (median / plain - 1)) AS value, COUNT(*) AS found, workload AS decides
        FROM figure JOIN (
            SELECT workload || '.{BOUNDS_WARN}' AS checked, median AS plain FROM figure
            WHERE run_id = :run AND implementation = :ours AND metric = :metric AND median > 0
        ) ON checked = workload
        WHERE run_id = :run AND implementation = :ours AND metric = :metric AND {_CHOSEN}""",
}
_FACTORS = {"us": 1e6}


@dataclass(frozen=True)
class Standing:
    """One of ours against one bar. ``value`` is in the bar's unit, None when the run does not have it;
    ``found`` of ``wanted`` workloads stand behind it and ``decides`` names the deciding one, if one does."""

    ours: str
    target: Target
    value: float | None
    found: int
    wanted: int
    decides: str
    verdict: str


def standings(view: RunView) -> list[Standing]:
    """Every bar for every implementation of ours in the run, whatever the device; ``judged`` says whether
    verdicts are given."""
    names = [str(row["name"]) for row in view.implementations() if row["ours"]]
    device = judged(view)
    return [_standing(view, name, target, device) for name in names for target in targets()]


def judged(view: RunView) -> bool:
    """Whether the run is one that the bars speak of: on their device, at full size."""
    run = view.header()
    return bool(run["device"] == DEVICE and run["scale"] == 1.0)


def _standing(view: RunView, ours: str, target: Target, on_device: bool) -> Standing:
    values = {
        "ours": ours,
        "peer": PEER,
        "metric": target.metric,
        "every": not target.workloads,
        "workloads": json.dumps(target.workloads),
        "recorded": json.dumps(dict(target.recorded)),
        "factor": _FACTORS.get(target.unit, 1.0),
    }
    row = view.named(_QUERIES[target.kind], values)[0]
    value, found, wanted = row["value"], int(row["found"]), max(1, len(target.workloads))
    verdict = _verdict(target, value, found >= wanted) if on_device or value is None else NOT_JUDGED
    return Standing(ours, target, value, found, wanted, row["decides"] or "", verdict)


def _verdict(target: Target, value: float | None, complete: bool) -> str:
    """A worst case that misses has missed, however few workloads it is of; all else needs every one."""
    if value is None:
        return NOT_MEASURED
    reached = value <= target.bar if target.at_most else value >= target.bar
    if not reached and (complete or target.kind != GEOMEAN):
        return MISSED
    return REACHED if reached and complete else PARTIAL


def plain(found: Sequence[Standing]) -> list[dict[str, object]]:
    """As data for JSON."""
    return [
        {
            "ours": s.ours,
            "figure": s.target.figure,
            "value": s.value,
            "bar": s.target.bar,
            "unit": s.target.unit,
            "at_most": s.target.at_most,
            "workloads": s.found,
            "of_workloads": s.wanted,
            "decided_by": s.decides,
            "verdict": s.verdict,
        }
        for s in found
    ]
