"""A run's tables as text cells, shared by the terminal report and the page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tbe.bench.queries import COMPARED, RunView

MISSING = "-"


@dataclass(frozen=True)
class Section:
    """A titled table of formatted cells; columns from ``numeric`` on are right-aligned numbers."""

    title: str
    note: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: int


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
    found = [summary(view), *speedups(view), times(view), floors(view), inputs(view), checks(view)]
    found += [voided(view), notes(view)]
    return [section for section in found if section.rows]


def summary(view: RunView) -> Section:
    """Geometric means and worst cases of the speed-ups."""
    rows = [
        (
            *(row["ours"], row["peer"], row["metric"], str(row["workloads"])),
            *(_times(row["geomean"]), _times(row["worst"]), row["worst_workload"]),
        )
        for row in view.summary()
    ]
    head = ("ours", "peer", "pass", "workloads", "geometric mean", "worst", "worst on")
    return Section("Speed-up summary", "Peer's time over ours, same run.", head, tuple(rows), 3)


def speedups(view: RunView) -> list[Section]:
    """A table for each of ours and each peer: both times and their ratio, by workload."""
    pairs: dict[tuple[str, str], dict[str, dict[str, tuple[str, ...]]]] = {}
    for row in view.comparisons():
        by_workload = pairs.setdefault((row["ours"], row["peer"]), {})
        cells = (micro(row["our_value"]), micro(row["peer_value"]), _times(row["speedup"]))
        by_workload.setdefault(row["workload"], {})[row["metric"]] = cells
    head = ("workload", *(f"{m} {part}" for m in COMPARED for part in ("ours", "peer", "ratio")))
    out = []
    for (ours, peer), by_workload in pairs.items():
        rows = [
            (name, *_flat(cells.get(metric, (MISSING,) * 3) for metric in COMPARED))
            for name, cells in by_workload.items()
        ]
        note = "Microseconds; device time for forward and backward, wall time for step. Ratio: peer over ours."
        out.append(Section(f"{ours} against {peer}", note, head, tuple(rows), 1))
    return out


def times(view: RunView) -> Section:
    """Every implementation's times and memory."""
    rows = [
        (
            *(row["workload"], row["implementation"]),
            *(micro(row[name]) for name in ("forward", "backward", "step", "graph")),
            *(_milli(row["first_step_cold"]), _milli(row["first_step_warm"]), _mebibytes(row["peak_memory"])),
        )
        for row in view.times()
    ]
    measured = ("forward us", "backward us", "step us", "graph us", "first, cold ms", "first, warm ms")
    head = ("workload", "implementation", *measured, "peak MiB")
    note = (
        "Step and graph are wall time, forward and backward device time (on a CPU all are wall time). First "
        "step: cold is the implementation's first in the process. Peak: a step's memory, output included."
    )
    return Section("Times", note, head, tuple(rows), 2)


def floors(view: RunView) -> Section:
    """Forward and backward against the gather floor."""
    rows = [
        (
            *(row["workload"], row["metric"], row["implementation"]),
            *(micro(row["seconds"]), micro(row["floor_seconds"]), f"{row['ratio']:.2f}"),
        )
        for row in view.floors()
    ]
    head = ("workload", "pass", "implementation", "us", "floor us", "time over floor")
    note = (
        "Floor: every lookup's bytes from DRAM at copy speed. Repeated rows hit caches, so hot workloads can "
        "go below 1."
    )
    return Section("Time against the gather floor", note, head, tuple(rows), 3)


def inputs(view: RunView) -> Section:
    """What the workloads hold."""
    rows = [
        (
            *(row["workload"], row["summary"], f"{row['lookups']:,}", f"{row['touched_rows']:,}"),
            *(f"{row['longest_run']:,}", _megabytes(row["forward_floor_bytes"])),
            _megabytes(row["backward_floor_bytes"]),
        )
        for row in view.workloads()
    ]
    head = ("workload", "shape", "lookups", "rows touched", "longest run", "forward MB", "backward MB")
    return Section("Workloads", "Of one input set; MB is what the floor counts.", head, tuple(rows), 2)


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
    return Section("Correctness gate", note, head, tuple(rows), 2)


def voided(view: RunView) -> Section:
    """What has no figures, and why."""
    rows = [(row["workload"], row["implementation"], row["status"], row["reason"]) for row in view.voided()]
    head = ("workload", "implementation", "status", "reason")
    return Section("Without figures", "A wrong result has no times.", head, tuple(rows), 4)


def reasons(view: RunView) -> Section:
    """What has no figures, each reason once."""
    rows = [(r["implementation"], r["status"], r["reason"], r["workloads"]) for r in view.reasons()]
    head = ("implementation", "status", "reason", "workloads")
    return Section("Without figures", "A wrong result has no times.", head, tuple(rows), 4)


def notes(view: RunView) -> Section:
    """Qualified or missing metrics."""
    rows = [(row["workload"], row["implementation"], row["metric"], row["note"]) for row in view.notes()]
    return Section("Notes", "", ("workload", "implementation", "metric", "note"), tuple(rows), 4)


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


def _mebibytes(size: float | None) -> str:
    return MISSING if size is None else f"{size / 2**20:,.1f}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f}"


def _flat(groups: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(cell for group in groups for cell in group)
