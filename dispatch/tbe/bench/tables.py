"""A run's tables as text cells, shared by the terminal report and the page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tbe.bench.bars import Standing, judged, standings
from tbe.bench.queries import COMPARED, RunView
from tbe.bench.targets import DEVICE, PEER

MISSING = "-"
BARS, SUMMARY = "Bars", "Speed-up summary"


@dataclass(frozen=True)
class Section:
    """A titled table of formatted cells; columns in ``numeric`` are right-aligned numbers. ``groups`` are
    headings over the columns, each with how many it spans; none, or as many as there are columns in all."""

    title: str
    note: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: range
    groups: tuple[tuple[str, int], ...] = ()


def heading(view: RunView) -> list[str]:
    """Lines that say what ran where."""
    run = view.header()
    state = f"finished {run['finished']}" if run["complete"] else "cut short: what follows is what was done"
    packages = ", ".join(
        f"{row['name']} {row['version']}".strip() for row in view.implementations() if not row["ours"]
    )
    ours = ", ".join(f"{row['name']} {row['version']}".strip() for row in view.implementations() if row["ours"])
    software = f"Python {run['python']}, torch {run['torch']}"
    software += f", Triton {run['triton']}" if run["triton"] else ""
    software += f", CUDA {run['cuda']}" if run["cuda"] else ""
    scale = "" if run["scale"] == 1.0 else f", bags and rows scaled by {run['scale']:g}"
    return [
        f"Run {run['id']}, started {run['started']}, {state}",
        f"{run['device']} ({run['architecture']}, {run['processors']} processors, "
        f"{run['memory_gib']:.0f} GiB), {run['host']}, "
        f"copy speed {run['copy_terabytes_per_second']:.3f} TB/s counting reads and writes",
        f"{software}; ours: {ours or 'none'}; peers: {packages or 'none'}",
        f"median of {run['repeats']} samples, three input sets in rotation, seed {run['seed']}{scale}",
    ]


def sections(view: RunView) -> list[Section]:
    """Every table of a full report, without the empty ones."""
    found = [bars(view), summary(view), *speedups(view), times(view), floors(view), inputs(view)]
    found += [checks(view), voided(view), notes(view)]
    return [section for section in found if section.rows]


def bars(view: RunView) -> Section:
    """How the run stands against the bars; on another device only what it has, without verdicts."""
    device, on_device = str(view.header()["device"]), judged(view)
    rows = [
        (
            *(s.ours, s.target.figure, _in_unit(s.value, s.target.unit)),
            *(_bar(s), s.verdict, _basis(s)),
        )
        for s in standings(view)
        if on_device or s.value is not None
    ]
    note = f"Taken on {device}, {PEER} beside it in the same run; x: its time over ours."
    if not on_device:
        scale = view.header()["scale"]
        size = "" if scale == 1.0 else f" scaled by {scale:g}"
        note = f"Bars are of the {DEVICE} at full size. This run was taken on {device}{size}: nothing is judged."
    head = ("ours", "figure", "measured", "bar", "verdict", "from")
    return Section(BARS, note, head, tuple(rows), range(2, 4))


_UNITS = {"x": (2, "x"), "us": (1, " us"), "s": (2, " s"), "%": (1, " %"), "B": (1, " B/lookup")}


def _in_unit(value: float | None, unit: str) -> str:
    if value is None:
        return MISSING
    digits, suffix = _UNITS[unit]
    return f"{round(value, digits) + 0.0:,.{digits}f}{suffix}"  # + 0.0: no "-0.0"


def _bar(standing: Standing) -> str:
    target = standing.target
    return ("at most " if target.at_most else "at least ") + _in_unit(target.bar, target.unit)


def _basis(standing: Standing) -> str:
    """What a value stands on: the deciding workload, or how many; and what must be known about it."""
    parts = []
    if standing.wanted != 1 or not standing.target.workloads:  # else the figure itself names the workload
        parts += [standing.decides] if standing.decides else []
    if standing.wanted > 1 and standing.value is not None:
        of = "" if standing.found == standing.wanted else f" of {standing.wanted}"
        parts.append(f"{standing.found}{of} workloads")
    parts += [standing.target.note] if standing.target.note else []
    return "; ".join(parts)


def summary(view: RunView) -> Section:
    """Geometric means and worst cases of the speed-ups, by group of workloads."""
    rows = [
        (
            *(row["ours"], row["peer"], row["tag"], row["metric"], str(row["workloads"])),
            *(_times(row["geomean"]), _times(row["worst"]), row["worst_workload"]),
        )
        for row in view.summary()
    ]
    head = ("ours", "peer", "group", "pass", "workloads", "geometric mean", "worst", "worst on")
    return Section(SUMMARY, "Peer's time over ours, same run.", head, tuple(rows), range(4, 7))


def speedups(view: RunView) -> list[Section]:
    """A table for each of ours and each peer: both times and their ratio, by workload."""
    pairs: dict[tuple[str, str], dict[str, dict[str, tuple[str, ...]]]] = {}
    for row in view.comparisons():
        by_workload = pairs.setdefault((row["ours"], row["peer"]), {})
        cells = (micro(row["our_value"]), micro(row["peer_value"]), _times(row["speedup"]))
        by_workload.setdefault(row["workload"], {})[row["metric"]] = cells
    head = ("workload", *(("ours", "peer", "ratio") * len(COMPARED)))
    groups = (("", 1), *((metric, 3) for metric in COMPARED))
    note = (
        "Microseconds; device time for forward, backward and both together, wall time for a step. Ratio: peer "
        "over ours."
    )
    out = []
    for (ours, peer), by_workload in pairs.items():
        rows = [
            (name, *_flat(cells.get(metric, (MISSING,) * 3) for metric in COMPARED))
            for name, cells in by_workload.items()
        ]
        out.append(Section(f"{ours} against {peer}", note, head, tuple(rows), range(1, len(head)), groups))
    return out


def times(view: RunView) -> Section:
    """Every implementation's times and memory."""
    rows = [
        (
            *(row["workload"], row["implementation"]),
            *(micro(row[name]) for name in ("forward", "backward", "together", "step", "graph")),
            *(_milli(row["first_step_cold"]), _milli(row["first_step_warm"]), _bytes(row["bytes_a_lookup"])),
        )
        for row in view.times()
    ]
    device, wall, first = ("forward", "backward", "together"), ("step", "graph"), ("cold", "warm")
    head = ("workload", "implementation", *device, *wall, *first, "B/lookup")
    groups = (("", 2), ("device us", 3), ("wall us", 2), ("first step ms", 2), ("memory", 1))
    note = (
        "Forward is inference; together is forward and backward of a training step in one go. On a CPU all are "
        "wall time. First step: cold is the implementation's first in the process. Memory: a step's peak beyond "
        "the output."
    )
    return Section("Times", note, head, tuple(rows), range(2, len(head)), groups)


def floors(view: RunView) -> Section:
    """Forward and backward against the gather floor."""
    by_result: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {}
    for row in view.floors():
        cells = (
            *(_megabytes(row["floor_bytes"]), micro(row["floor_seconds"]), micro(row["seconds"])),
            f"{row['ratio']:.2f}",
        )
        by_result.setdefault((row["workload"], row["implementation"]), {})[row["metric"]] = cells
    passes = ("forward", "backward")
    rows = [
        (*names, *_flat(cells.get(metric, (MISSING,) * 4) for metric in passes))
        for names, cells in by_result.items()
    ]
    head = ("workload", "implementation", *(("floor MB", "floor us", "us", "floor / us") * len(passes)))
    note = (
        "Floor: every lookup's bytes from DRAM at copy speed. Repeated rows hit caches, so hot workloads can "
        "go above 1."
    )
    groups = (("", 2), *((metric, 4) for metric in passes))
    return Section("Time against the gather floor", note, head, tuple(rows), range(2, len(head)), groups)


def inputs(view: RunView) -> Section:
    """What the workloads hold."""
    rows = [
        (
            *(row["workload"], row["summary"], f"{row['lookups']:,}", f"{row['touched_rows']:,}"),
            f"{row['longest_run']:,}",
        )
        for row in view.workloads()
    ]
    head = ("workload", "shape", "lookups", "rows touched", "longest run")
    return Section("Workloads", "Of one input set.", head, tuple(rows), range(2, len(head)))


def checks(view: RunView) -> Section:
    """How exact the results that passed the gate were."""
    rows = [
        (
            *(row["workload"], row["implementation"]),
            *(f"{row[name]:.2g}" for name in ("forward_error", "weight_error", "state_error")),
        )
        for row in view.gate()
    ]
    head = ("workload", "implementation", "forward", "weights", "state")
    note = (
        "Worst error over the sampled bags and rows after one step, against fp64: forward relative to the "
        "summed magnitudes, weights in units of what the table's rounding allows, state relative."
    )
    return Section("Correctness gate", note, head, tuple(rows), range(2, len(head)))


def voided(view: RunView) -> Section:
    """What has no figures, and why."""
    rows = [(row["workload"], row["implementation"], row["status"], row["reason"]) for row in view.voided()]
    head = ("workload", "implementation", "status", "reason")
    return Section("Without figures", "A wrong result has no times.", head, tuple(rows), range(0))


def reasons(view: RunView) -> Section:
    """What has no figures, each reason once."""
    rows = [(r["implementation"], r["status"], r["reason"], r["workloads"]) for r in view.reasons()]
    head = ("implementation", "status", "reason", "workloads")
    return Section("Without figures", "A wrong result has no times.", head, tuple(rows), range(0))


def notes(view: RunView) -> Section:
    """Qualified or missing metrics."""
    rows = [(row["workload"], row["implementation"], row["metric"], row["note"]) for row in view.notes()]
    return Section("Notes", "", ("workload", "implementation", "metric", "note"), tuple(rows), range(0))


def micro(seconds: float | None) -> str:
    """Seconds as microseconds with three significant digits or more."""
    if seconds is None:
        return MISSING
    value = seconds * 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def _milli(seconds: float | None) -> str:
    return MISSING if seconds is None else f"{seconds * 1e3:,.1f}"


def _bytes(size: float | None) -> str:
    return MISSING if size is None else f"{size:,.1f}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f}"


def _flat(groups: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(cell for group in groups for cell in group)
