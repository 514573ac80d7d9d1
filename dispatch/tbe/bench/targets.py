"""The bars that this library set itself, as data: figures of one NVIDIA H200 that a full-size run there is
judged by. ``bars`` takes each from a run; nothing else in the benchmark knows a number of them.

A bar speaks of the base workloads as they stand: fp16 tables, fp32 output, exact row-wise Adagrad, bounds
checks off, deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tbe.bench.measure import BACKWARD, FIRST_COLD, FIRST_WARM, FORWARD, GRAPH, MEMORY, STEP, TOGETHER
from tbe.bench.workloads import BASE, BOUNDS_WARN, WEIGHTED, catalogue

DEVICE = "NVIDIA H200"  # as torch names it; a run on anything else is not judged
PEER = "fbgemm"

# How a value is taken from a run (the queries are in ``bars``).
GEOMEAN, WORST, RECORDED, FLOOR = "geomean", "worst", "recorded", "floor"
LONGEST, MEMORY_BEYOND, CHECKING = "longest", "memory beyond", "checking"

UPDATE_KERNEL = "update_kernel"  # a pass that no run measures yet

# Operators that are not among the peers, since they cannot be installed beside them: device microseconds by
# workload, of one NVIDIA H200 with torch 2.11.0+cu130 and Triton 3.6.0 on 2026-11-30, medians of 11.
CUEMBED_FORWARD = {  # NVIDIA's cuEmbed, fp16 in and out, one flat table
    "fbgemm_default.fp16_output": 27,
    "small_batch.fp16_output": 4.8,
    "uniform_10m.fp16_output": 177,
    "distinct_10m.fp16_output": 179,
    "band_10k.fp16_output": 281,
    "zipf_1m.fp16_output": 278,
    "hot_100.fp16_output": 204,
    "wide_1024.fp16_output": 77,
    "mlperf_dlrm2.fp16_output": 83,
    "blog_batch.fp16_output": 2155,
}
TORCHREC_FORWARD = {  # TorchRec's Triton TBE
    "fbgemm_default": 147,
    "small_batch": 14.8,
    "uniform_10m": 244,
    "distinct_10m": 240,
    "band_10k": 518,
    "zipf_1m": 444,
    "hot_100": 427,
    "mixed_dims": 405,
    "wide_1024": 222,
    "mlperf_dlrm2": 144,
    "blog_batch": 3948,
}
TORCHREC_BACKWARD = {
    "fbgemm_default": 239,
    "small_batch": 98,
    "uniform_10m": 1332,
    "distinct_10m": 1270,
    "band_10k": 1552,
    "zipf_1m": 1536,
    "hot_100": 1454,
    "mixed_dims": 2172,
    "wide_1024": 5718,
    "mlperf_dlrm2": 921,
    "blog_batch": 15310,
}


@dataclass(frozen=True)
class Target:
    """One bar: ``metric`` of ``workloads`` (none: of whatever ran), taken as ``kind`` says, must be at least
    ``bar``, or at most when ``at_most``. ``unit`` is of both: ``x`` a ratio where more is better, ``us``, ``s``,
    ``%`` or ``B`` (bytes a lookup). ``recorded`` has the microseconds by workload that ``RECORDED`` divides by
    ours; ``note`` says what a reader must know of how it is taken."""

    figure: str
    kind: str
    metric: str
    workloads: tuple[str, ...]
    bar: float
    unit: str = "x"
    at_most: bool = False
    recorded: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


def _tagged(tag: str) -> tuple[str, ...]:
    return tuple(workload.name for workload in catalogue() if tag in workload.tags)


def _recorded(figure: str, metric: str, bar: float, recorded: Mapping[str, float]) -> Target:
    note = "recorded on the same kind of device, not in this run"
    return Target(figure, RECORDED, metric, tuple(recorded), bar, recorded=recorded, note=note)


def targets() -> tuple[Target, ...]:
    """Every bar, in the order of a report."""
    base, weighted, one = _tagged(BASE), _tagged(WEIGHTED), ("uniform_10m",)
    return (
        Target("backward, geometric mean", GEOMEAN, BACKWARD, base, 2.6),
        Target("backward, worst", WORST, BACKWARD, base, 1.5),
        Target("backward weighted, geometric mean", GEOMEAN, BACKWARD, weighted, 2.8),
        Target("forward + backward together, geometric mean", GEOMEAN, TOGETHER, base, 2.3),
        Target("forward + backward together, worst", WORST, TOGETHER, base, 1.5),
        Target("forward, geometric mean", GEOMEAN, FORWARD, base, 1.5),
        Target("forward, worst", WORST, FORWARD, base, 1.2),
        _recorded("forward to fp16 against cuEmbed, worst", FORWARD, 0.95, CUEMBED_FORWARD),
        Target("uniform_10m: forward floor / forward", FLOOR, FORWARD, one, 0.93),
        Target(
            *("uniform_10m: update kernel's floor / update kernel", FLOOR, UPDATE_KERNEL, one, 0.93),
            note="the kernel alone, without the sort before it, takes a profiler",
        ),
        Target("small_batch: step, eager", WORST, STEP, ("small_batch",), 2.8),
        Target("small_batch: step in a CUDA graph", LONGEST, GRAPH, ("small_batch",), 80, "us", at_most=True),
        Target(
            *("peak memory beyond FBGEMM's, most", MEMORY_BEYOND, MEMORY, base, 0.0, "B"),
            at_most=True,
            note="outputs not counted on either side",
        ),
        Target(
            *("first step of a process", LONGEST, FIRST_COLD, (), 5.0, "s"),
            at_most=True,
            note="start with empty compile caches",
        ),
        Target(
            *("first step of a later workload", LONGEST, FIRST_WARM, (), 0.5, "s"),
            at_most=True,
            note="start with full compile caches",
        ),
        _recorded("forward against TorchRec's Triton TBE, worst", FORWARD, 1.0, TORCHREC_FORWARD),
        _recorded("backward against TorchRec's Triton TBE, worst", BACKWARD, 1.0, TORCHREC_BACKWARD),
        Target(
            *(f"uniform_10m: what bounds check {BOUNDS_WARN.partition('_')[2]} adds to a step", CHECKING, STEP),
            *((f"uniform_10m.{BOUNDS_WARN}",), 5.0, "%"),
            at_most=True,
        ),
    )
