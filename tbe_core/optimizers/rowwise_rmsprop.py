"""Row-wise RMSprop: one running mean of squares a row.

Source: Tieleman and Hinton, lecture 6.5 (2012), as ``torch.optim.RMSprop`` without momentum, with the mean over a
row in place of each element, as row-wise Adagrad has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Hyper, Optimizer, RowState, StateSpec, register


@register("rowwise_rmsprop")
@dataclass(frozen=True)
class RowwiseRMSprop(Optimizer):
    """``v = alpha * v + (1 - alpha) * mean_D(g^2); w -= lr * g / (sqrt(v) + eps)``.

    Rows without a lookup keep their v: it does not decay.
    """

    alpha: float = 0.99
    eps: float = 1e-8

    STATE: ClassVar[tuple[StateSpec, ...]] = (StateSpec("square_avg", "row"),)
    HYPER: ClassVar[tuple[str, ...]] = ("lr", "alpha", "eps")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha >= 1:
            raise ValueError(f"alpha={self.alpha!r}: expected a number in [0, 1)")

    def step_rows(self, w: torch.Tensor, g: torch.Tensor, state: RowState, hyper: Hyper) -> torch.Tensor:
        alpha, v = hyper["alpha"], state["square_avg"]
        v.mul_(alpha).add_((1 - alpha) * (g * g).mean(dim=1))
        return w - hyper["lr"] * g / (v.sqrt() + hyper["eps"])[:, None]
