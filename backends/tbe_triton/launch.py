"""One function a kernel: tensors to arguments, shapes to constants. Imports Triton. update.py has the rest."""

from __future__ import annotations

from typing import Any

import torch

from tbe_core import Lookup

from .carry import Carry, CarryLayout
from .kernels.forward import tbe_forward_pool_kernel, tbe_forward_rows_kernel, tbe_weight_grad_kernel
from .kernels.jagged import tbe_check_kernel, tbe_linearise_kernel
from .kernels.rank_sort import tbe_rank_sort_kernel
from .launcher import INT32_MAX, run
from .shapes import ForwardShape, next_power_of_two
from .streams import NARROW, side_for_narrow
from .tables import DeviceTables

LINEARISE_CHUNK = 512
ROWS_CHUNK = 16
RANK_BLOCK, RANK_TILE = 16, 512
WIDE_FROM = INT32_MAX - 4096
"""From this many lookups positions are computed in 64 bits: no block may step past int32."""


def _aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0


def variant_of(lookup: Lookup, tables: DeviceTables) -> tuple[Any, ...]:
    """Everything about a call that a compiled kernel depends on: made once, used by every launch of it."""
    indices, offsets, weights = lookup.indices, lookup.offsets, lookup.per_sample_weights
    n = indices.numel()
    return (
        tables.number,
        indices.dtype,
        offsets.dtype,
        _aligned(lookup.weights),
        _aligned(indices),
        _aligned(offsets),
        None if weights is None else (weights.dtype, _aligned(weights)),
        (n > WIDE_FROM) + (n > INT32_MAX),
    )


def check(lookup: Lookup, tables: DeviceTables, bad: torch.Tensor) -> None:
    """Add to ``bad`` the ids outside their tables and the offsets out of order or range."""
    n, bags = lookup.indices.numel(), lookup.offsets.numel() - 1
    size = max(n, bags + 1)
    run(
        tbe_check_kernel,
        (-(-size // LINEARISE_CHUNK),),
        bad,
        lookup.indices,
        lookup.offsets,
        tables.linearise,
        n,
        bags,
        max(lookup.batch, 1),
        WIDE=size > WIDE_FROM,
        CHUNK=LINEARISE_CHUNK,
        num_warps=4,
        variant=(*variant_of(lookup, tables), size > WIDE_FROM),
    )


def linearise(
    lookup: Lookup,
    tables: DeviceTables,
    features: torch.Tensor,
    into: Carry,
    spare: Carry,
    variant: tuple[Any, ...],
    stream: int | None = None,
) -> None:
    """Keys and values of every lookup of ``features`` into ``into``; clears the counters of both."""
    spec, n, bags = lookup.spec, lookup.indices.numel(), lookup.offsets.numel() - 1
    weighted = lookup.per_sample_weights is not None
    counters = into.counters.count
    size = max(n, counters)
    run(
        tbe_linearise_kernel,
        (-(-size // LINEARISE_CHUNK),),
        lookup.indices,
        lookup.offsets,
        lookup.per_sample_weights if weighted else lookup.indices,
        into.keys,
        into.values,
        into.counters,
        spare.counters,
        features,
        n,
        bags,
        max(lookup.batch, 1),
        tables.row_units,
        spec.layout.total_rows,
        counters,
        WEIGHTED=weighted,
        MEAN=spec.pooling == "mean",
        POOLED=spec.pooling != "none",
        WIDE=n > WIDE_FROM,
        CHUNK=LINEARISE_CHUNK,
        num_warps=4,
        stream=stream,
        variant=(*variant, into.values.dtype),
    )


def rank_sort(carry: Carry, spare: Carry, variant: tuple[Any, ...]) -> None:
    """``carry``'s lookups by ascending key into ``spare``, equal keys in their order."""
    n = carry.keys.count
    run(
        tbe_rank_sort_kernel,
        (-(-n // RANK_BLOCK),),
        carry.keys,
        carry.values,
        spare.keys,
        spare.values,
        n,
        BLOCK=RANK_BLOCK,
        TILE=RANK_TILE,
        num_warps=4,
        variant=(*variant, carry.values.dtype),
    )


def forward(lookup: Lookup, tables: DeviceTables, out: torch.Tensor, variant: tuple[Any, ...]) -> None:
    """Pool every feature."""
    n, config = lookup.indices.numel(), lookup.plan.config
    shapes = tables.forward_for(n, lookup.batch)
    side = side_for_narrow([s.block for s in shapes], n, config, out.device)
    for shape, features in zip(shapes, tables.forward, strict=True):
        beside = side.stream.cuda_stream if side and shape.block <= NARROW else None
        forward_pool(lookup, shape, features, out, variant, beside)
    if side:
        side.join()


def forward_pool(
    lookup: Lookup,
    shape: ForwardShape,
    features: torch.Tensor,
    out: torch.Tensor,
    variant: tuple[Any, ...],
    stream: int | None = None,
) -> None:
    """Pool the features of one block width into their columns of ``out``."""
    batch, n = lookup.batch, lookup.indices.numel()
    blocks = -(-batch // shape.bags)
    weighted = lookup.per_sample_weights is not None
    run(
        tbe_forward_pool_kernel,
        (len(shape.features) * blocks * shape.column_blocks,),
        out,
        lookup.weights,
        lookup.indices,
        lookup.offsets,
        lookup.per_sample_weights if weighted else lookup.indices,
        features,
        batch,
        blocks,
        n,
        out.shape[1],
        D=shape.dim,
        BLOCK_D=shape.block,
        COLUMN_BLOCKS=shape.column_blocks,
        BAGS=shape.bags,
        UNROLL=shape.unroll,
        WEIGHTED=weighted,
        MEAN=lookup.spec.pooling == "mean",
        ALIGN=shape.align,
        COLUMN_ALIGN=shape.column_align,
        WIDE=shape.wide,
        WIDE_LOOKUPS=n > WIDE_FROM,
        STREAMS=lookup.plan.config.forward_streams,
        num_warps=1,
        stream=stream,
        variant=(*variant, shape.features[0], shape.bags, shape.unroll),
    )


def forward_rows(lookup: Lookup, tables: DeviceTables, out: torch.Tensor, variant: tuple[Any, ...]) -> None:
    """Pooling none: copy the row of every key."""
    layout, n = lookup.spec.layout, lookup.indices.numel()
    group = next(g for g in layout.groups if g.dim == layout.dims[0])
    places = CarryLayout.of(lookup.spec, lookup.plan.config, n, lookup.batch, weighted=False).allocate(out.device)
    linearise(lookup, tables, tables.linearise, places, places, variant)
    run(
        tbe_forward_rows_kernel,
        (-(-n // ROWS_CHUNK),),
        out,
        lookup.weights,
        places.keys,
        n,
        group.row_base,
        layout.total_rows,
        group.element_base,
        D=group.dim,
        BLOCK_D=next_power_of_two(group.dim),
        ROWS=ROWS_CHUNK,
        WIDE=n > WIDE_FROM,
        num_warps=4,
        variant=variant,
    )


def weight_grad(
    lookup: Lookup, shape: ForwardShape, features: torch.Tensor, grad: torch.Tensor, out: torch.Tensor
) -> None:
    """Per-sample-weight gradients of the features of one block width."""
    block = next_power_of_two(shape.block * shape.column_blocks)
    run(
        tbe_weight_grad_kernel,
        (len(shape.features) * lookup.batch,),
        out,
        lookup.weights,
        grad,
        lookup.indices,
        lookup.offsets,
        features,
        lookup.batch,
        lookup.indices.numel(),
        grad.shape[1],
        D=shape.dim,
        BLOCK_D=block,
        UNROLL=max(min(1024 // block, 16), 1),
        MEAN=lookup.spec.pooling == "mean",
        ALIGN=shape.align,
        COLUMN_ALIGN=shape.column_align,
        WIDE=shape.wide,
        num_warps=min(max(block // 512, 1), 16),
    )
