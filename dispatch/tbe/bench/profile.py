"""What a batch costs at least: run lengths, and the bytes behind the gather floor.

The gather floor is the time of the bytes below at the device's measured copy speed, *if every lookup went to
DRAM*. It is a yardstick, not a bound: rows looked up repeatedly are served by the caches, so hot workloads go
below it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tbe.bench.inputs import Inputs, feature_bounds
from tbe.bench.workloads import Workload

_STATE_BYTES = 4  # row-wise Adagrad: one fp32 scalar a row
_WEIGHT_BYTES = 4  # per-sample weights are fp32


@dataclass(frozen=True)
class RunBin:
    """Rows looked up between ``low`` and ``high`` times (both included), and how many lookups they take."""

    low: int
    high: int
    runs: int
    lookups: int


@dataclass(frozen=True)
class Profile:
    """Facts about one batch. ``touched`` counts distinct rows and ``hottest`` names the most looked-up
    row, per table (-1 without lookups); ``longest`` is that row's count over all tables; ``bins`` double
    in width."""

    lookups: tuple[int, ...]
    touched: tuple[int, ...]
    hottest: tuple[int, ...]
    longest: int
    bins: tuple[RunBin, ...]
    forward_bytes: int
    backward_bytes: int
    output_bytes: int


def profile(workload: Workload, inputs: Inputs) -> Profile:
    """Sort each table's lookups and count; N plus one table's sort in memory."""
    bounds = feature_bounds(workload, inputs.offsets)
    lookups, touched, hottest, all_counts = [], [], [], []
    for feature in range(workload.features):
        ids = inputs.indices[bounds[feature] : bounds[feature + 1]]
        rows, counts = torch.unique(ids, return_counts=True)
        lookups.append(ids.numel())
        touched.append(rows.numel())
        hottest.append(int(rows[counts.argmax()]) if rows.numel() else -1)
        all_counts.append(counts)
    counts = torch.cat(all_counts)
    forward, backward = floor_bytes(workload, inputs, lookups, touched)
    return Profile(
        lookups=tuple(lookups),
        touched=tuple(touched),
        hottest=tuple(hottest),
        longest=int(counts.max()) if counts.numel() else 0,
        bins=_bins(counts),
        forward_bytes=forward,
        backward_bytes=backward,
        output_bytes=inputs.grad.numel() * inputs.grad.element_size(),  # the output has its gradient's shape
    )


def floor_bytes(workload: Workload, inputs: Inputs, lookups: list[int], touched: list[int]) -> tuple[int, int]:
    """Bytes of the forward and of the backward floor, from per-table lookup and touched-row counts.

    forward: every lookup's row, the indices, the offsets, per-sample weights if any, and the output written.
    backward: every lookup's gradient row, the indices and per-sample weights, and for every touched row its
    weights and its optimizer state, each read and written.
    """
    row_bytes = [dim * workload.weights_dtype.itemsize for dim in workload.dims]
    grad_bytes = [dim * workload.output_dtype.itemsize for dim in workload.dims]
    per_lookup = workload.index_dtype.itemsize + (_WEIGHT_BYTES if workload.weighted else 0)
    streams = sum(lookups) * per_lookup
    forward = streams + inputs.offsets.numel() * inputs.offsets.element_size()
    forward += inputs.grad.numel() * inputs.grad.element_size()
    forward += sum(n * size for n, size in zip(lookups, row_bytes, strict=True))
    backward = streams + sum(n * size for n, size in zip(lookups, grad_bytes, strict=True))
    of_row = {"row": [1] * workload.features, "element": list(workload.dims)}
    for kind in workload.optimizer.STATE:
        row_bytes = [size + n * _STATE_BYTES for size, n in zip(row_bytes, of_row[kind.kind], strict=True)]
    backward += sum(n * 2 * size for n, size in zip(touched, row_bytes, strict=True))
    return forward, backward


def _bins(counts: Tensor) -> tuple[RunBin, ...]:
    """Bins [2^k, 2^(k+1) - 1] up to the longest run; the band 32..255 is bins k = 5, 6 and 7."""
    if not counts.numel():
        return ()
    exponent = torch.frexp(counts.double())[1].long() - 1  # exact floor(log2), unlike log2 itself
    runs = torch.bincount(exponent).tolist()
    lookups = [int(counts[exponent == k].sum()) for k in range(len(runs))]
    return tuple(RunBin(2**k, 2 ** (k + 1) - 1, int(runs[k]), lookups[k]) for k in range(len(runs)))
