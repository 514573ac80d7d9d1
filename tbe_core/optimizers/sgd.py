"""Stochastic gradient descent: w -= lr * g."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import Hyper, Optimizer, RowState, register


@register("sgd")
@dataclass(frozen=True)
class SGD(Optimizer):
    """Exact SGD: one step ``w -= lr * g`` per touched row on the completed gradient sum."""

    def step_rows(self, w: torch.Tensor, g: torch.Tensor, state: RowState, hyper: Hyper) -> torch.Tensor:
        return w - hyper["lr"] * g
