"""LARS: momentum SGD at a rate that follows each row's length.

Source: You, Gitman and Ginsburg, arXiv:1708.03888, with a row as the layer, as in FBGEMM_GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Hyper, Optimizer, RowState, StateSpec, register


@register("lars")
@dataclass(frozen=True)
class LARS(Optimizer):
    """``a = lr * eta * norm(w) / (norm(g) + weight_decay * norm(w));
    m = momentum * m + a * (g + weight_decay * w); w -= m``.

    ``a = lr`` where ``norm(w)`` or the divisor is 0, so that a row of zeros learns.
    """

    eta: float = 0.001
    momentum: float = 0.9
    weight_decay: float = 0.0

    STATE: ClassVar[tuple[StateSpec, ...]] = (StateSpec("momentum_buffer", "element"),)
    HYPER: ClassVar[tuple[str, ...]] = ("lr", "eta", "momentum", "weight_decay")

    def step_rows(self, w: torch.Tensor, g: torch.Tensor, state: RowState, hyper: Hyper) -> torch.Tensor:
        lr, decay, m = hyper["lr"], hyper["weight_decay"], state["momentum_buffer"]
        length = w.norm(dim=1, keepdim=True)
        divisor = g.norm(dim=1, keepdim=True) + decay * length
        rate = torch.where((length > 0) & (divisor > 0), lr * hyper["eta"] * length / divisor, lr)
        m.mul_(hyper["momentum"]).add_(rate * (g + decay * w))
        return w - m
