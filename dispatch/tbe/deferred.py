"""Backwards that are kept until an optimizer's step, unscaled there, and skipped where a gradient is not finite.

Nothing here waits for a device: the scale and the finding stay tensors. A skipped step still runs its kernels, on
lookups that are all pruned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tbe_core.types import PRUNED_ID

from .eager import Call, clipped

UNIT = 2.0**-40
"""The probe's gradient while all is finite: ``GradScaler.unscale_`` multiplies it like any gradient, which tells
``step`` whether and by what. So small that it counts for nothing in a norm."""


class Deferred:
    """What a module's backwards left to do.

    ``probe`` is a one-element parameter of the optimizer whose gradient stands for those that are kept: ``UNIT``,
    or infinite when one of them is not finite. So a scaler finds it by its own means.
    """

    def __init__(self, device: torch.device) -> None:
        self.probe = nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))
        self.calls: list[tuple[Call, torch.Tensor, torch.Tensor]] = []

    def add(self, call: Call, grad: torch.Tensor, carry: torch.Tensor) -> None:
        """Keep one backward: its lookup, output gradient and what its forward prepared."""
        flag = torch.where(grad.isfinite().all(), UNIT, torch.inf).to(torch.float32).reshape(1)
        if self.probe.device != flag.device:  # the module was moved since
            self.probe.data = self.probe.data.to(flag.device)
        seen = self.probe.grad
        self.probe.grad = flag if seen is None else torch.maximum(seen, flag)
        self.calls.append((call, grad, carry))

    def clear(self) -> None:
        self.calls, self.probe.grad = [], None

    @torch.no_grad()
    def step(self, scale: torch.Tensor | None, found: torch.Tensor | None) -> None:
        """Step what is kept, in the order of the backwards.

        Args:
            scale: ``[]`` what gradients are still multiplied with, beyond what the probe's gradient tells.
            found: above zero where nothing may be updated; None without a scaler, when infinite gradients step
                their rows as they always do.
        """
        calls, told = self.calls, self.probe.grad
        self.clear()
        if told is None:
            return
        factor = torch.where(told.isfinite(), told / UNIT, 1.0)
        if scale is not None:
            factor = factor / scale
        skip = None if found is None else found.reshape(()) > 0
        for call, grad, carry in calls:
            lookup, training = call.lookup, call.training
            if training is None:  # a call that steps no table is not kept
                continue
            grad = clipped(lookup.spec, grad.float() * factor)
            training.advance()
            if skip is None:
                call.backend.backward_update(lookup, grad, training, carry)
                continue
            lookup = replace(lookup, indices=torch.where(skip, PRUNED_ID, lookup.indices))
            grad = torch.where(skip, 0.0, grad)
            # What the training forward prepared has the lookups sorted as they were.
            carry = call.backend.prepare(lookup)
            call.backend.backward_update(lookup, grad, training, carry)
            if training.counter is not None:  # a skipped step is none
                training.counter.select(0, 0).sub_(skip.to(torch.int64))

    def __reduce__(self) -> tuple[Any, ...]:
        # The probe itself, not its device: a copied param group holds the same copy.
        return _with_probe, (self.probe,)


def _with_probe(probe: nn.Parameter) -> Deferred:
    deferred = Deferred(probe.device)
    deferred.probe = probe
    return deferred
