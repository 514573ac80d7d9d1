"""Adagrad: one second-moment value an element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Hyper, Optimizer, RowState, StateSpec, register


@register("adagrad")
@dataclass(frozen=True)
class Adagrad(Optimizer):
    """``m += g^2; w -= lr * g / (sqrt(m) + eps)``, element by element, as ``torch.optim.Adagrad``."""

    eps: float = 1e-10

    STATE: ClassVar[tuple[StateSpec, ...]] = (StateSpec("sum", "element"),)
    HYPER: ClassVar[tuple[str, ...]] = ("lr", "eps")

    def step_rows(self, w: torch.Tensor, g: torch.Tensor, state: RowState, hyper: Hyper) -> torch.Tensor:
        state["sum"] += g * g
        return w - hyper["lr"] * g / (state["sum"].sqrt() + hyper["eps"])
