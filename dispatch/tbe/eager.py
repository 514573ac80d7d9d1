"""The operator without the dispatcher: what an eager call runs.

``torch.ops.tbe`` gives torch.compile, export and fake tensors what they need, but its autograd in Python costs
the host more than every launch together. An eager call takes this way instead; both end in the same backend.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from tbe_core import Backend, Lookup, Training

SECOND_BACKWARD = (
    "a second backward through one lookup: its rows have been stepped already; call the module again"
)


class Keeper(Protocol):
    """Takes a backward's update instead of its backend, to run it later."""

    def add(self, call: Call, grad: torch.Tensor, carry: torch.Tensor) -> None: ...


class Call:
    """One lookup, its backend, what the update needs, and who keeps the update for later, if anyone."""

    __slots__ = ("backend", "keeper", "lookup", "training")

    def __init__(
        self, backend: Backend, lookup: Lookup, training: Training, keeper: Keeper | None = None
    ) -> None:
        self.backend, self.lookup, self.training, self.keeper = backend, lookup, training, keeper


class TrainingLookup(torch.autograd.Function):
    """Forward with the step of every touched row as its backward.

    ``hook`` is a zero-size parameter that requires grad, so that autograd calls the backward; it gets no
    gradient itself.
    """

    @staticmethod
    def forward(
        ctx: Any, hook: torch.Tensor, per_sample_weights: torch.Tensor | None, call: Call
    ) -> torch.Tensor:
        out, ctx.carry = call.backend.forward(call.lookup, True)
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
        per_sample_weights, weight_grad = ctx.saved_tensors[2], None
        if per_sample_weights is not None and ctx.needs_input_grad[1]:
            weight_grad = call.backend.per_sample_weight_grad(call.lookup, grad).to(per_sample_weights.dtype)
        if call.keeper is None:
            call.training.advance()
            call.backend.backward_update(call.lookup, grad, call.training, ctx.carry)
        else:
            call.keeper.add(call, grad, ctx.carry)
        ctx.call = ctx.carry = None
        return None, weight_grad, None
