"""The operator without the dispatcher: what an eager call runs.

``torch.ops.tbe`` gives torch.compile, export and fake tensors what they need, but its autograd in Python costs
the host more than every launch together. An eager call takes this way instead; both end in the same backend.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from tbe_core import Backend, Lookup, Spec, Training

from .accumulate import ENDED, Accumulator

SECOND_BACKWARD = (
    "a second backward through one lookup: its rows have been stepped already; call the module again"
)


CLIPPED_LATER = (
    "per_sample_weights that require a gradient, with gradient_clipping and FusedOptimizer(defer=True): their "
    "gradient is unscaled at the step, too late to clip it; expected weights without gradient or no clipping"
)


def clipped(spec: Spec, grad: torch.Tensor) -> torch.Tensor:
    """The output's gradient, clamped where the module asks for it; NaN stays."""
    if spec.gradient_clipping is None:
        return grad
    # A limit beyond a narrow dtype is that dtype's largest number: only infinities exceed it.
    limit = min(spec.gradient_clipping, torch.finfo(grad.dtype).max)
    return grad.clamp(-limit, limit)


class Keeper(Protocol):
    """Takes a backward's update instead of its backend, to run it later; gets the gradient unclipped."""

    def add(self, call: Call, grad: torch.Tensor, carry: torch.Tensor) -> None: ...


class Call:
    """One lookup, its backend, what the update needs (None: no table is stepped), the module's place for
    micro-batches, and who keeps the update for later, if anyone."""

    __slots__ = ("accumulator", "backend", "block", "keeper", "lookup", "training")

    def __init__(
        self,
        backend: Backend,
        lookup: Lookup,
        training: Training | None,
        accumulator: Accumulator,
        keeper: Keeper | None = None,
    ) -> None:
        self.backend, self.lookup, self.training, self.keeper = backend, lookup, training, keeper
        self.accumulator, self.block = accumulator, accumulator.block

    def of(self, backend: Backend, lookup: Lookup) -> Call:
        """The same for another lookup of the module."""
        return Call(backend, lookup, self.training, self.accumulator, self.keeper)

    def clipped(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient that the backward works with. A keeper's is clipped when it is unscaled: at its step."""
        return clipped(self.lookup.spec, grad) if self.keeper is None else grad

    def update(self, grad: torch.Tensor, carry: torch.Tensor) -> None:
        """Step the rows now, or have it kept; ``grad`` is ``clipped``."""
        if self.training is None:
            return
        if self.keeper is None:
            self.training.advance()
            self.backend.backward_update(self.lookup, grad, self.training, carry)
        else:
            self.keeper.add(self, grad, carry)


class TrainingLookup(torch.autograd.Function):
    """Forward with the step of every touched row as its backward.

    ``hook`` is a zero-size parameter that requires grad, so that autograd calls the backward; it gets no
    gradient itself.
    """

    @staticmethod
    def forward(
        ctx: Any, hook: torch.Tensor, per_sample_weights: torch.Tensor | None, call: Call
    ) -> torch.Tensor:
        out, ctx.carry = call.backend.forward(call.lookup, call.training is not None and call.block is None)
        ctx.call = call
        # Saved, not merely kept: autograd then notices when they are changed before the backward.
        ctx.save_for_backward(call.lookup.indices, call.lookup.offsets, per_sample_weights)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None, None]:
        if torch.is_grad_enabled():  # create_graph=True: a step has no derivative
            with torch.no_grad():
                return TrainingLookup._step(ctx, grad)
        return TrainingLookup._step(ctx, grad)

    @staticmethod
    def _step(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None, None]:
        call: Call | None = ctx.call
        if call is None:
            raise RuntimeError(SECOND_BACKWARD)
        block = call.accumulator.block
        if call.block is not None and block is not call.block:
            raise RuntimeError(ENDED)
        grad = call.clipped(grad)
        per_sample_weights, weight_grad = ctx.saved_tensors[2], None
        if per_sample_weights is not None and ctx.needs_input_grad[1]:
            if call.keeper is not None and call.lookup.spec.gradient_clipping is not None:
                raise RuntimeError(CLIPPED_LATER)
            weight_grad = call.backend.per_sample_weight_grad(call.lookup, grad).to(per_sample_weights.dtype)
        if call.training is not None:
            if block is not None:
                block.keep(call, grad)
            else:
                call.update(grad, ctx.carry)
            ctx.call = ctx.carry = None
        return None, weight_grad, None
