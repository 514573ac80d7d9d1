"""The launches of the update: sorted lookups to stepped rows. Imports Triton."""

from __future__ import annotations

import torch

from tbe_core import Lookup, Route, Tier, Training

from .carry import Carry, has_factors
from .kernels.update import tbe_combine_kernel, tbe_group_bounds_kernel, tbe_update_kernel
from .launch import variant_of
from .launcher import Part, run
from .shapes import DeviceTables, alignment, warps_for

COMBINE_PIECES = 16


class Workspace:
    """Partials of long runs, their owners and the groups' bounds, in one buffer."""

    def __init__(self, slots: int, width: int, groups: int, device: torch.device) -> None:
        at_partials = (slots * 4 + groups + 1) * 8
        at_partials += -at_partials % 16
        buffer = torch.empty(at_partials + slots * 2 * width * 4, dtype=torch.uint8, device=device)
        self.owners = Part(buffer, 0, slots * 4, torch.int64)
        self.bounds = Part(buffer, slots * 32, groups + 1, torch.int64)
        self.partials = Part(buffer, at_partials, slots * 2 * width, torch.float32)


def update(
    lookup: Lookup,
    tables: DeviceTables,
    grad: torch.Tensor,
    training: Training,
    carry: Carry,
    chosen: Route,
) -> None:
    """Sum each run's gradient and step its row: the update, then the combine when long runs are split."""
    plan, groups = lookup.plan, len(lookup.spec.layout.groups)
    n, grouped, fused = lookup.indices.numel(), groups > 1, chosen.long_runs is Tier.FUSED
    width = max(s.block for s in tables.update_shapes)
    space = Workspace(chosen.programs + groups, width, groups, lookup.weights.device)
    of_grad = (grad.dtype, grad.data_ptr() % 16 == 0)
    variant = (*variant_of(lookup, tables), *of_grad, carry.values.dtype, chosen.stretch, fused)
    if grouped:
        run(
            tbe_group_bounds_kernel,
            (groups + 1,),
            tables.groups,
            carry.keys,
            space.bounds,
            n,
            groups,
            num_warps=1,
            variant=variant,
        )
    rows = (lookup.weights, training.states[0] if training.states else training.hyper, training.hyper)
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
    for shape in tables.update_shapes:
        run(
            tbe_update_kernel,
            (programs, shape.groups),
            *rows,
            grad,
            carry.keys,
            carry.values,
            carry.counters,
            space.owners,
            space.partials,
            tables.groups,
            space.bounds if grouped else tables.groups,
            n,
            tables.unit,
            programs,
            shape.first_group,
            D=shape.dim,
            BLOCK_D=shape.block,
            UNROLL=shape.unroll,
            GROUPED=grouped,
            WEIGHTED=has_factors(lookup.spec, lookup.per_sample_weights is not None),
            FUSED=fused,
            ALIGN=shape.align,
            GRAD_ALIGN=alignment(tables.unit),
            num_warps=shape.warps,
            variant=(*variant, shape.block),
            **options,
        )
    if fused:
        return
    programs = min(programs, plan.caps.processors * 8)
    run(
        tbe_combine_kernel,
        (programs,),
        *rows,
        carry.keys,
        carry.counters,
        space.owners,
        space.partials,
        tables.groups,
        programs,
        BLOCK_D=width,
        PIECES=max(COMBINE_PIECES * 128 // max(width, 128), 1),
        num_warps=max(4, warps_for(width, plan.config, plan.caps.warp_size)),
        variant=variant,
        **options,
    )
