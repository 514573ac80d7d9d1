"""The launches of the update: sorted lookups to stepped rows. Imports Triton."""

from __future__ import annotations

from typing import Any

import torch

from tbe_core import Lookup, Route, Training

from .carry import Carry, has_factors
from .kernels.update import tbe_combine_kernel, tbe_group_bounds_kernel, tbe_update_kernel
from .launch import variant_of
from .launcher import Part, run
from .shapes import UpdateShape, alignment, step_constant, step_tensors
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


class Update:
    """One call's update: each run's gradient summed and its row stepped, by the update and, when long runs are
    split, the combine. A backend with other kernels overrides ``walk`` and ``combine``."""

    def __init__(
        self, lookup: Lookup, tables: DeviceTables, grad: torch.Tensor, training: Training, carry: Carry
    ) -> None:
        self.lookup, self.tables, self.grad, self.carry = lookup, tables, grad, carry
        self.lookups, self.groups = lookup.indices.numel(), len(lookup.spec.layout.groups)
        self.cut, self.routes = tables.cut(self.lookups)
        self.slots = -(-self.lookups // self.cut.least_stretch) + self.groups
        partials = self.lookups * self.cut.partials + self.groups * 2 * self.cut.widest
        self.space = Workspace(self.slots, partials, self.groups, grad.device)
        of_grad = (grad.dtype, grad.data_ptr() % 16 == 0)
        self.variant = (*variant_of(lookup, tables), *of_grad, carry.values.dtype, self.cut.number)
        self.rows, self.step = step_tensors(lookup, training), step_constant(lookup.spec)

    def launch(self) -> None:
        """Everything, on the current stream."""
        shapes, config = self.tables.update_shapes, self.lookup.plan.config
        if self.groups > 1:
            self._bounds()
        side = side_for_narrow([s.block for s in shapes], self.lookups, config, self.grad.device)
        for shape, route in zip(shapes, self.routes, strict=True):
            self.walk(shape, route, side.stream.cuda_stream if side and shape.block <= NARROW else None)
        if side:
            side.join()
        if not self.cut.fused:
            self.combine()

    def _bounds(self) -> None:
        run(
            tbe_group_bounds_kernel,
            (self.groups + 1,),
            self.cut.groups,
            self.carry.keys,
            self.space.bounds,
            self.lookups,
            self.groups,
            num_warps=1,
            variant=self.variant,
        )

    def share(self, shape: UpdateShape, programs: int) -> int:
        """One stretch a program; of several groups each has its share of programs, which take turns."""
        return programs if self.groups == 1 else -(-programs // shape.groups)

    def walk(self, shape: UpdateShape, route: Route, stream: int | None) -> None:
        """The groups of one block width."""
        self.run_walk(tbe_update_kernel, shape, route, stream, self.share(shape, route.programs))

    def run_walk(
        self,
        kernel: Any,
        shape: UpdateShape,
        route: Route,
        stream: int | None,
        programs: int,
        more: tuple[Any, ...] = (),
        **constants: Any,
    ) -> None:
        """Launch ``kernel``: the arguments of ``tbe_update_kernel``, ``more`` after the partials."""
        cut, space, tables, weighted = self.cut, self.space, self.tables, self.lookup.per_sample_weights
        run(
            kernel,
            (programs, shape.groups),
            *self.rows,
            self.grad,
            self.carry.keys,
            self.carry.values,
            self.carry.counters,
            space.owners,
            space.partials,
            *more,
            cut.groups,
            space.bounds if self.groups > 1 else cut.groups,
            self.lookups,
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
            GROUPED=self.groups > 1,
            WEIGHTED=has_factors(self.lookup.spec, weighted is not None),
            FUSED=cut.fused,
            ALIGN=shape.align,
            GRAD_ALIGN=alignment(tables.unit),
            **constants,
            num_warps=shape.warps,
            stream=stream,
            variant=(*self.variant, shape.block, *constants.values()),
            STEP=self.step,
        )

    def combine(self) -> None:
        """The long runs, from the partials that the update has left."""
        cut, programs = self.cut, min(self.slots, self.lookup.plan.caps.processors * 8)
        run(
            tbe_combine_kernel,
            (programs,),
            *self.rows,
            self.carry.keys,
            self.carry.counters,
            self.space.owners,
            self.space.partials,
            cut.groups,
            programs,
            BLOCK_D=cut.widest,
            PIECES=max(COMBINE_ELEMENTS // cut.widest, 1),
            num_warps=8,
            variant=self.variant,
            STEP=self.step,
        )
