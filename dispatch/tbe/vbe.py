"""Variable batch per feature: other numbers of bags for every feature and rank, and a flat output.

A composition around the operator: offsets are padded with empty bags until every feature has as many, and the
pieces of the ``[B, sum of dims]`` output are gathered into the flat order. Sizes are ints on the host; what is
as large as the batch is computed on the device from tables of ``[T]`` and ``[R*T]`` numbers: nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

from tbe_core import Spec
from tbe_core.dtypes import INDEX_DTYPES
from tbe_core.validate import check_offset_values, check_tensor

NAME = "batch_size_per_feature_per_rank"
Sizes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class VariableBatch:
    """The numbers of one ``[T][R]`` list of batch sizes for one spec, on one device."""

    spec: Spec
    bags: tuple[int, ...]
    """Per feature: bags of all ranks."""
    batch: int
    """B of the padded lookup: the most bags of a feature."""
    unit: int
    """Elements of a piece: divides every dim, so that a piece is moved whole."""
    pieces: int
    """Pieces of the flat output."""
    features: torch.Tensor
    """``[2, T]``: bags, and the first among all bags."""
    segments: torch.Tensor
    """``[4, R*T]``, one segment a rank and feature: pieces; its first piece in the flat output; pieces of a bag;
    its first piece in the padded output less that in the flat one."""

    def pad(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """``[T*B+1]`` from ``[sum of bags + 1]``: every feature's bags, then empty ones.

        Raises:
            ValueError: offsets have a wrong length, or wrong values where these are checked at the call.
        """
        check_tensor("indices", indices, INDEX_DTYPES, self.features.device)
        ends = check_tensor("offsets", offsets, INDEX_DTYPES, self.features.device)
        check_length(ends, sum(self.bags))
        mode = self.spec.bounds_check
        if mode == "error" or (mode != "none" and offsets.device.type == "cpu"):
            # Here and not on the padded ones, whose positions the caller does not know.
            check_offset_values(self.spec, offsets, indices.numel(), self.bags)
        bags, first = self.features[:, :, None]
        bag = torch.arange(self.batch, device=offsets.device)
        return torch.cat([offsets[(first + torch.minimum(bag, bags)).flatten()], offsets[-1:]])

    def order(self) -> torch.Tensor:
        """``[pieces]``: for each piece of the flat output, its place in the padded one."""
        counts, starts, of_bag, shifts = self.segments
        segment = torch.repeat_interleave(counts, output_size=self.pieces)
        piece = torch.arange(self.pieces, device=counts.device)
        bag = (piece - starts[segment]) // of_bag[segment]
        rest = self.spec.output_width // self.unit - of_bag
        order: torch.Tensor = piece + shifts[segment] + bag * rest[segment]
        return order

    def flatten(self, padded: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """``[B, sum of dims]`` to flat: rank, feature, bag, element."""
        return padded.reshape(-1, self.unit)[order].flatten()

    def unflatten(self, flat: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """The gradient's way back; zero for the bags of padding. No place is written twice."""
        padded = flat.new_zeros(self.batch * self.spec.output_width // self.unit, self.unit)
        padded.index_copy_(0, order, flat.reshape(-1, self.unit))
        return padded.view(self.batch, self.spec.output_width)


class Flatten(torch.autograd.Function):
    """``VariableBatch.flatten`` under autograd."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, batch: VariableBatch) -> torch.Tensor:
        order = batch.order()
        ctx.batch = batch
        ctx.save_for_backward(order)
        return batch.flatten(padded, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        batch: VariableBatch = ctx.batch
        return batch.unflatten(grad, *ctx.saved_tensors), None


def check_length(offsets: torch.Tensor, bags: int) -> None:
    """One offset a bag and one more; raises ``ValueError``."""
    if offsets.shape[0] != bags + 1:
        raise ValueError(f"offsets has length {offsets.shape[0]}: expected {bags + 1}, the sum of {NAME} and 1")


def check_sizes(spec: Spec, sizes: object) -> Sizes:
    """``[T][R]`` ints >= 0, all rows as long; raises ``ValueError`` naming what is wrong."""
    features = spec.layout.features
    if spec.pooling == "none":
        raise ValueError(f"{NAME} with pooling='none': expected None, there are no bags")
    if isinstance(sizes, torch.Tensor) or not isinstance(sizes, Sequence):
        raise ValueError(f"{NAME}={type(sizes).__name__}: expected a list of lists of int, on the host")
    if len(sizes) != features:
        raise ValueError(f"{NAME} has {len(sizes)} rows: expected {features}, one for every feature")
    for t, row in enumerate(sizes):
        if isinstance(row, torch.Tensor) or not isinstance(row, Sequence):
            raise ValueError(f"{NAME}[{t}]={row!r}: expected a list of int, one for every rank")
        if len(row) != len(sizes[0]) or not row:
            expected = max(len(sizes[0]), 1)
            raise ValueError(f"{NAME}[{t}] has length {len(row)}: expected {expected}, one for every rank")
        for r, size in enumerate(row):
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise ValueError(f"{NAME}[{t}][{r}]={size!r}: expected an int >= 0")
    return tuple(map(tuple, sizes))


# Kept: a step that repeats its sizes copies nothing to the device, which a CUDA graph's capture forbids.
@lru_cache(maxsize=64)
def variable_batch(spec: Spec, device: torch.device, sizes: Sizes) -> VariableBatch:
    """The numbers of checked ``sizes``."""
    layout, ranks = spec.layout, range(len(sizes[0]))
    bags = tuple(map(sum, sizes))
    unit = math.gcd(*layout.feature_dims)
    of_bag = [d // unit for d in layout.feature_dims] * len(ranks)
    counts = [row[r] * (d // unit) for r in ranks for row, d in zip(sizes, layout.feature_dims, strict=True)]
    before = [list(accumulate(row, initial=0)) for row in sizes]
    starts = list(accumulate(counts, initial=0))
    places = [
        (firsts[r] * spec.output_width + column) // unit
        for r in ranks
        for firsts, column in zip(before, layout.feature_columns, strict=True)
    ]
    shifts = [place - start for place, start in zip(places, starts, strict=False)]
    firsts = list(accumulate(bags, initial=0))
    return VariableBatch(
        spec,
        bags,
        max(bags),
        unit,
        starts[-1],
        torch.tensor([bags, firsts[:-1]]).to(device, non_blocking=True),
        torch.tensor([counts, starts[:-1], of_bag, shifts]).to(device, non_blocking=True),
    )
