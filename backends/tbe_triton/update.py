"""The launches of the update: sorted lookups to stepped rows. Imports Triton."""

from __future__ import annotations

import torch

from tbe_core import Lookup, Training

from .carry import Carry, has_factors
from .kernels.update import tbe_combine_kernel, tbe_group_bounds_kernel, tbe_update_kernel
from .launch import variant_of
from .launcher import Part, run
from .shapes import alignment, step_constant, step_tensors
from .streams import NARROW, side_for_narrow
from .tables import DeviceTables

COMBINE_ELEMENTS = 8192
"""Elements of partials that a combine holds at once."""


class Workspace:
    """Partials of long runs, their owners and the groups' bounds, in one buffer."""

    def __init__(self, slots: int, partials: int, groups: int, device: torch.device) -> None:
        at_partials = (slots * 4 + groups + 1) * 8
        at_partials += -at_partials % 16
        buffer = torch.empty(at_partials + partials * 4, dtype=torch.uint8, device=device)
        self.owners = Part(buffer, 0, slots * 4, torch.int64)
        self.bounds = Part(buffer, slots * 32, groups + 1, torch.int64)
        self.partials = Part(buffer, at_partials, partials, torch.float32)


def update(lookup: Lookup, tables: DeviceTables, grad: torch.Tensor, training: Training, carry: Carry) -> None:
    """Sum each run's gradient and step its row: the update, then the combine when long runs are split."""
    plan, n, groups = lookup.plan, lookup.indices.numel(), len(lookup.spec.layout.groups)
    cut, routes = tables.cut(n)
    slots = -(-n // cut.least_stretch) + groups
    space = Workspace(slots, n * cut.partials + groups * 2 * cut.widest, groups, grad.device)
    of_grad = (grad.dtype, grad.data_ptr() % 16 == 0)
    variant = (*variant_of(lookup, tables), *of_grad, carry.values.dtype, cut.number)
    rows, step = step_tensors(lookup, training), step_constant(lookup.spec)
    if groups > 1:
        run(
            tbe_group_bounds_kernel,
            (groups + 1,),
            cut.groups,
            carry.keys,
            space.bounds,
            n,
            groups,
            num_warps=1,
            variant=variant,
        )
    side = side_for_narrow([s.block for s in tables.update_shapes], n, plan.config, grad.device)
    for shape, route in zip(tables.update_shapes, routes, strict=True):
        # One stretch a program; of several groups each has its share of programs, which take turns.
        programs = route.programs if groups == 1 else -(-route.programs // shape.groups)
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
            cut.groups,
            space.bounds if groups > 1 else cut.groups,
            n,
            tables.unit,
            programs,
            shape.first_group,
            D=shape.dim,
            BLOCK_D=shape.block,
            WIDEST=cut.widest,
            PARTIALS=cut.partials,
            LEAST_STRETCH=cut.least_stretch,
            STRETCH=route.stretch,
            UNROLL=shape.unroll,
            GROUPED=groups > 1,
            WEIGHTED=has_factors(lookup.spec, lookup.per_sample_weights is not None),
            FUSED=cut.fused,
            ALIGN=shape.align,
            GRAD_ALIGN=alignment(tables.unit),
            num_warps=shape.warps,
            stream=side.stream.cuda_stream if side and shape.block <= NARROW else None,
            variant=(*variant, shape.block),
            STEP=step,
        )
    if side:
        side.join()
    if cut.fused:
        return
    programs = min(slots, plan.caps.processors * 8)
    run(
        tbe_combine_kernel,
        (programs,),
        *rows,
        carry.keys,
        carry.counters,
        space.owners,
        space.partials,
        cut.groups,
        programs,
        BLOCK_D=cut.widest,
        PIECES=max(COMBINE_ELEMENTS // cut.widest, 1),
        num_warps=8,
        variant=variant,
        STEP=step,
    )
