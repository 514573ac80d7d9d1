"""One function a kernel: tensors to arguments, shapes to constants. Imports Triton."""

from __future__ import annotations

import torch

from tbe_core import Lookup, Route, Tier, Training

from .carry import Carry, CarryLayout, has_factors
from .kernels.forward import tbe_forward_pool_kernel, tbe_forward_rows_kernel, tbe_weight_grad_kernel
from .kernels.jagged import tbe_check_kernel, tbe_linearise_kernel
from .kernels.update import tbe_combine_kernel, tbe_group_bounds_kernel, tbe_update_kernel
from .launcher import run
from .shapes import (
    INT32_MAX,
    DeviceTables,
    ForwardShape,
    alignment,
    next_power_of_two,
    warps_for,
)

LINEARISE_CHUNK = 512
ROWS_CHUNK = 16
COMBINE_PIECES = 16


def _top_step(bags: int) -> int:
    """The largest power of two <= max(bags, 1)."""
    return 1 << (max(bags, 1).bit_length() - 1)


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
        _top_step(bags),
        WIDE=size + LINEARISE_CHUNK > INT32_MAX,
        CHUNK=LINEARISE_CHUNK,
        num_warps=4,
    )


def linearise(lookup: Lookup, tables: DeviceTables, into: Carry, spare: Carry, stream: int | None) -> None:
    """Keys and values of every lookup into ``into``; clears the counters of both."""
    spec, n, bags = lookup.spec, lookup.indices.numel(), lookup.offsets.numel() - 1
    weighted = lookup.per_sample_weights is not None
    counters = into.counters.numel()
    size = max(n, counters)
    run(
        tbe_linearise_kernel,
        (-(-size // LINEARISE_CHUNK),),
        into.keys,
        into.values,
        into.counters,
        spare.counters,
        lookup.indices,
        lookup.offsets,
        lookup.per_sample_weights if weighted else lookup.indices,
        tables.linearise,
        n,
        bags,
        max(lookup.batch, 1),
        _top_step(bags),
        tables.row_units,
        spec.layout.total_rows,
        counters,
        WEIGHTED=weighted,
        MEAN=spec.pooling == "mean",
        POOLED=spec.pooling != "none",
        WIDE=size + LINEARISE_CHUNK > INT32_MAX,
        CHUNK=LINEARISE_CHUNK,
        num_warps=4,
        stream=stream,
    )


def forward_pool(lookup: Lookup, shape: ForwardShape, features: torch.Tensor, out: torch.Tensor) -> None:
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
        WIDE=shape.wide,
        WIDE_LOOKUPS=n > INT32_MAX - 4096,
        num_warps=1,
    )


def forward_rows(lookup: Lookup, tables: DeviceTables, out: torch.Tensor) -> None:
    """Pooling none: copy the row of every key."""
    layout, n = lookup.spec.layout, lookup.indices.numel()
    group = next(g for g in layout.groups if g.dim == layout.dims[0])
    places = CarryLayout.of(lookup.spec, lookup.plan.config, n, lookup.batch, weighted=False).allocate(out.device)
    linearise(lookup, tables, places, places, None)
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
        WIDE=n + ROWS_CHUNK > INT32_MAX,
        num_warps=4,
    )


def weight_grad(
    lookup: Lookup, shape: ForwardShape, features: torch.Tensor, grad: torch.Tensor, out: torch.Tensor
) -> None:
    """Per-sample-weight gradients of the features of one block width."""
    block = shape.block * shape.column_blocks
    block = next_power_of_two(block)
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
        WIDE=shape.wide,
        num_warps=min(max(block // 512, 1), 16),
    )


def update(
    lookup: Lookup,
    tables: DeviceTables,
    grad: torch.Tensor,
    training: Training,
    carry: Carry,
    chosen: Route,
) -> None:
    """Sum each run's gradient and step its row: the update, then the combine when long runs are split."""
    plan, layout = lookup.plan, lookup.spec.layout
    n, device = lookup.indices.numel(), lookup.weights.device
    keys, values, counters, shapes = carry.keys, carry.values, carry.counters, tables.update_shapes
    grouped = len(layout.groups) > 1
    width = max(s.block for s in shapes)
    slots = chosen.programs + len(layout.groups)
    partials = torch.empty(slots * 2 * width, dtype=torch.float32, device=device)
    owners = torch.empty(slots * 4, dtype=torch.int64, device=device)
    bounds = tables.groups
    if grouped:
        bounds = torch.empty(len(layout.groups) + 1, dtype=torch.int64, device=device)
        run(
            tbe_group_bounds_kernel,
            (len(layout.groups) + 1,),
            bounds,
            keys,
            tables.groups,
            n,
            len(layout.groups),
            num_warps=1,
        )
    state = training.states[0] if training.states else training.hyper
    options = {
        "WIDTH": width,
        "STRETCH": chosen.stretch,
        "OPTIMIZER": lookup.spec.optimizer.NAME,
        "DECAY_MODE": str(lookup.spec.optimizer.flags.get("weight_decay_mode", "none")),
        "LIMITS_NORM": bool(lookup.spec.optimizer.flags.get("limits_norm", False)),
    }
    programs = chosen.programs
    if grouped:
        programs = min(programs, plan.caps.processors * plan.config.programs_per_processor)
    for shape in shapes:
        run(
            tbe_update_kernel,
            (programs, shape.groups),
            lookup.weights,
            state,
            training.hyper,
            grad,
            keys,
            values,
            counters,
            owners,
            partials,
            tables.groups,
            bounds,
            n,
            tables.unit,
            programs,
            shape.first_group,
            D=shape.dim,
            BLOCK_D=shape.block,
            UNROLL=shape.unroll,
            GROUPED=grouped,
            WEIGHTED=has_factors(lookup.spec, lookup.per_sample_weights is not None),
            FUSED=chosen.long_runs is Tier.FUSED,
            ALIGN=shape.align,
            GRAD_ALIGN=alignment(tables.unit),
            num_warps=shape.warps,
            **options,
        )
    if chosen.long_runs is Tier.SPLIT:
        programs = min(programs, plan.caps.processors * 8)
        run(
            tbe_combine_kernel,
            (programs,),
            lookup.weights,
            state,
            training.hyper,
            keys,
            counters,
            owners,
            partials,
            tables.groups,
            programs,
            BLOCK_D=width,
            PIECES=max(COMBINE_PIECES * 128 // max(width, 128), 1),
            num_warps=max(4, warps_for(width, plan.config, plan.caps.warp_size)),
            **options,
        )
