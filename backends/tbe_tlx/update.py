"""The launches of the update with TLX. Imports Triton; a provider must have been loaded."""

from __future__ import annotations

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tbe_core import Lookup, Route, Tier, Training
from tbe_core.assist import assist
from tbe_triton.carry import Carry
from tbe_triton.launcher import AS_THEY_ARE, run
from tbe_triton.shapes import UpdateShape
from tbe_triton.tables import DeviceTables
from tbe_triton.update import Update

from .kernels.update import tbe_combine_tlx_kernel, tbe_update_tlx_kernel

AS_THEY_ARE.add(TensorDescriptor)

LEAST_BLOCK = 4
"""Columns: the tensor memory accelerator moves 16 bytes or more."""


class TlxUpdate(Update):
    """The portable launches with the kernels of this backend."""

    def __init__(
        self, lookup: Lookup, tables: DeviceTables, grad: torch.Tensor, training: Training, carry: Carry
    ) -> None:
        super().__init__(lookup, tables, grad, training, carry)
        cut, plan = self.cut, lookup.plan
        long_runs = Tier.FUSED if cut.fused else Tier.SPLIT
        whole = Route(cut.least_stretch, sum(r.programs for r in self.routes), long_runs)
        used = assist(whole, plan.caps, plan.config, lookup.spec.deterministic)
        narrow = min(s.block for s in tables.update_shapes) < LEAST_BLOCK
        self.sums: torch.Tensor | None = None
        if used.reduces and not narrow:
            self.sums = torch.zeros(self.slots, cut.widest, dtype=torch.float32, device=grad.device)

    def walk(self, shape: UpdateShape, route: Route, stream: int | None) -> None:
        plan = self.lookup.plan
        used = assist(route, plan.caps, plan.config, self.lookup.spec.deterministic, shape.warps)
        self.run_walk(
            tbe_update_tlx_kernel,
            shape,
            route,
            stream,
            self.share(shape, used.programs),
            (self._descriptor(shape),),
            WORK=used.work.value,
            REDUCES=self.sums is not None,
        )

    def _descriptor(self, shape: UpdateShape) -> Any:
        """The rows of sums as blocks of a shape's width; without them any argument serves."""
        if self.sums is None:
            return self.space.partials
        return TensorDescriptor(self.sums, list(self.sums.shape), list(self.sums.stride()), [1, shape.block])

    def combine(self) -> None:
        if self.sums is None:
            super().combine()
            return
        programs = min(self.slots, self.lookup.plan.caps.processors * 8)
        run(
            tbe_combine_tlx_kernel,
            (programs,),
            *self.rows,
            self.carry.keys,
            self.carry.counters,
            self.space.owners,
            self.sums,
            self.cut.groups,
            programs,
            BLOCK_D=self.cut.widest,
            num_warps=min(max(self.cut.widest // 256, 1), 8),
            variant=self.variant,
            STEP=self.step,
        )
