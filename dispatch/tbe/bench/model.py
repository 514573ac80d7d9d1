"""What memory alone lets a pass take: bytes of a workload over a device's bandwidths, without running anything.

Two bounds, of which the slower counts. *Memory*: rows, gradients and states that the last cache does not hold,
and what is streamed. *Cache*: every row and gradient that a lookup reads, through the last cache. The cache is
taken to hold the most frequent rows of one table at a time, as tables are walked one after the other; a row that
it holds is fetched once. Latency, launches, the sort and arithmetic take no time here: docs/amd.md compares with
an H200.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tbe.bench.workloads import DISTINCT, ZIPF, Workload
from tbe_core import Capabilities
from tbe_core.compiled import CompiledKernel
from tbe_core.dtypes import short_name
from tbe_core.processors import PROCESSORS

FORWARD, UPDATE = "forward", "update"
STATE_SECTOR = 32
"""Bytes that a scattered state scalar moves: the smallest piece of a cache line that NVIDIA fetches."""
KEY_BYTES = 8
"""A sorted lookup's key and value; weighted ones have four more."""


@dataclass(frozen=True)
class Memory:
    """Bandwidths of one device, bytes a second, and the bytes that its last cache holds."""

    bandwidth: float
    cache_bytes: int
    cache_bandwidth: float
    source: str


MIB = 1 << 20
MEMORY: dict[str, Memory] = {
    "H200": Memory(4.29e12, 60 * MIB, 5120 * 1.98e9, "copy speed measured; L2 of 5120 bytes a clock at 1.98 GHz"),
    "MI250X": Memory(1.6e12, 8 * MIB, 4096 * 1.7e9, "data sheet, one die: HBM2e; L2 of 4096 bytes a clock"),
    "MI300X": Memory(5.3e12, 256 * MIB, 17.2e12, "data sheet: HBM3; Infinity Cache"),
    "MI350X": Memory(8.0e12, 256 * MIB, 17.2e12, "data sheet: HBM3E; Infinity Cache as fast as MI300X's"),
}
"""By name of ``tbe_core.devices.DEVICES``. The H200's memory is its measured copy speed, the others' a peak that
no kernel reaches: their times are bounds from below."""


@dataclass(frozen=True)
class Prediction:
    """One pass of one workload on one device, as memory bounds it."""

    workload: str
    device: str
    work: str
    memory_bytes: float
    cache_bytes: float
    memory_seconds: float
    cache_seconds: float
    kernel: str | None = None
    """The compiled kernel that ``hidden_seconds`` is of."""
    hidden_seconds: float | None = None
    """The memory latency that its loads in flight hide: below a microsecond the bound may be out of reach."""

    @property
    def seconds(self) -> float:
        return max(self.memory_seconds, self.cache_seconds)

    @property
    def bound(self) -> str:
        return "memory" if self.memory_seconds >= self.cache_seconds else "cache"


def predict(
    workload: Workload, device: str, caps: Capabilities, kernels: Iterable[CompiledKernel] = ()
) -> tuple[Prediction, ...]:
    """The forward and the update of ``workload``.

    Args:
        device: a name in ``MEMORY``, and ``caps`` its facts.
        kernels: what ``tbe compile`` made of them; those of other targets are passed over.

    Raises:
        KeyError: nobody has written down the device's memory.
    """
    memory, by_target = MEMORY[device], defaultdict[str, list[CompiledKernel]](list)
    for compiled in kernels:
        by_target[compiled.target].append(compiled)
    here = by_target[caps.arch]
    found = []
    for work, (fetched, through) in traffic(workload, memory).items():
        kernel = next((k for k in here if _serves(k, workload, work)), None)
        hidden = None if kernel is None else bytes_in_flight(kernel) * caps.processors / memory.bandwidth
        seconds = fetched / memory.bandwidth, through / memory.cache_bandwidth
        name = None if kernel is None else kernel.kernel
        found.append(Prediction(workload.name, device, work, fetched, through, *seconds, name, hidden))
    return tuple(found)


def bytes_in_flight(kernel: CompiledKernel) -> int:
    """Of 16-byte loads, on one processor that is full: a warp issues all of them before it uses the first."""
    lanes = PROCESSORS[kernel.target].lanes
    return (kernel.resident or 0) * kernel.instructions.get("global_load_16", 0) * 16 * lanes


def _serves(kernel: CompiledKernel, workload: Workload, work: str) -> bool:
    """Whether it is the kernel of long bags or of split runs for tables of the workload's one width."""
    if len(set(workload.dims)) > 1:
        return False
    dtypes = f"{short_name(workload.weights_dtype)}->{short_name(workload.output_dtype)}"
    start = {FORWARD: "tbe_forward_pool_kernel", UPDATE: "tbe_update_kernel"}[work]
    start += f"[D={workload.dims[0]} {dtypes} "
    words = kernel.kernel.removeprefix(start).rstrip("]").split()
    wanted = {FORWARD: ["sum", "long", "bags"], UPDATE: ["rowwise_adagrad", "split"]}[work]
    return kernel.kernel.startswith(start) and words[: len(wanted)] == wanted


def traffic(workload: Workload, memory: Memory) -> dict[str, tuple[float, float]]:
    """Pass to bytes from memory, and bytes through the cache."""
    forward = update = through_forward = through_update = 0.0
    ids = workload.index_dtype.itemsize + (4 if workload.weighted else 0)
    for rows, dim, length in zip(workload.rows, workload.dims, workload.lengths, strict=True):
        row, grad = dim * workload.weights_dtype.itemsize, dim * workload.output_dtype.itemsize
        n = float(workload.batch * length)
        fetched, distinct = fetches(workload, rows, n, memory.cache_bytes // row)
        output = workload.batch * grad
        forward += fetched * row + n * ids + workload.batch * workload.index_dtype.itemsize + output
        through_forward += n * row + output
        # A bag's gradient is read once for each of its lookups, in the order of rows: at random.
        bags = uniform(float(workload.batch), n, memory.cache_bytes // grad)[0]
        update += bags * grad + distinct * 2 * (row + STATE_SECTOR) + n * (KEY_BYTES + 4 * workload.weighted)
        through_update += n * grad + distinct * 2 * row
    return {FORWARD: (forward, through_forward), UPDATE: (update, through_update)}


def fetches(workload: Workload, rows: int, n: float, cached: int) -> tuple[float, float]:
    """Expected row fetches from memory by ``n`` lookups when ``cached`` rows fit, and expected distinct rows."""
    if workload.ids == DISTINCT:
        return n, n
    if workload.ids != ZIPF:
        return uniform(float(rows), n, cached)
    fetched = distinct = first = 0.0
    for count, mass in zipf_bins(rows, workload.zipf_exponent):
        touched = _touched(count, n, mass)
        held = min(max(cached - first, 0.0), count) / count
        fetched += held * touched + (1 - held) * n * mass
        distinct, first = distinct + touched, first + count
    return fetched, distinct


def uniform(rows: float, n: float, cached: int) -> tuple[float, float]:
    """``fetches`` where every row is as likely."""
    held, touched = min(cached / rows, 1.0), _touched(rows, n)
    return held * touched + (1 - held) * n, touched


def _touched(rows: float, n: float, share: float = 1.0) -> float:
    """Expected distinct rows among ``rows`` that are alike and take ``share`` of ``n`` lookups."""
    each = share / rows
    return rows * -math.expm1(n * math.log1p(-each)) if each < 1 else min(n, 1.0)


def zipf_bins(rows: int, exponent: float) -> Iterator[tuple[float, float]]:
    """(rows, share of the lookups), the most frequent first: single rows, then rows that are nearly alike.

    The law is that of ``inputs.zipf_ranks``.
    """
    power, first = 1.0 - exponent, 0

    def below(rank: int) -> float:
        return math.expm1(power * math.log1p(rank)) / math.expm1(power * math.log1p(rows))

    while first < rows:
        end = min(max(first + 1, int(first * 1.01)), rows)
        yield float(end - first), below(end) - below(first)
        first = end
