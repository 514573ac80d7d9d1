"""Row-wise Adagrad: one second-moment scalar a row.

Source: the "exact row-wise AdaGrad" of FBGEMM_GPU; formulas restated in docs/contract.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Hyper, Optimizer, RowState, StateSpec, register

WEIGHT_DECAY_MODES = ("none", "l2", "decoupled")


@register("rowwise_adagrad")
@dataclass(frozen=True)
class RowwiseAdagrad(Optimizer):
    """``m += mean_D(h^2); u = lr / (sqrt(m) + eps); w = c * w - u * g``.

    ``weight_decay_mode``: ``"none"``: h = g, c = 1. ``"l2"``: h = g + weight_decay * w (for m only) and
    c = 1 - u * weight_decay. ``"decoupled"``: h = g and c = 1 - lr * weight_decay. Afterwards, with
    ``max_norm > 0``, a row whose norm exceeds it is scaled back to it.
    """

    eps: float = 1e-8
    weight_decay: float = 0.0
    weight_decay_mode: str = "none"
    max_norm: float = 0.0

    STATE: ClassVar[tuple[StateSpec, ...]] = (StateSpec("sum", "row"),)
    HYPER: ClassVar[tuple[str, ...]] = ("lr", "eps", "weight_decay", "max_norm")
    FLAGS: ClassVar[tuple[str, ...]] = ("weight_decay_mode", "limits_norm")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_decay_mode not in WEIGHT_DECAY_MODES:
            raise ValueError(
                f"weight_decay_mode={self.weight_decay_mode!r}: expected one of {', '.join(WEIGHT_DECAY_MODES)}"
            )
        if self.weight_decay > 0 and self.weight_decay_mode == "none":
            raise ValueError(
                f"weight_decay={self.weight_decay!r} has no effect with weight_decay_mode='none': "
                "expected 'l2' or 'decoupled', or weight_decay=0"
            )

    @property
    def limits_norm(self) -> bool:
        return self.max_norm > 0

    def step_rows(self, w: torch.Tensor, g: torch.Tensor, state: RowState, hyper: Hyper) -> torch.Tensor:
        lr, decay = hyper["lr"], hyper["weight_decay"]
        h = g + decay * w if self.weight_decay_mode == "l2" else g
        state["sum"] += (h * h).mean(dim=1)
        u = (lr / (state["sum"].sqrt() + hyper["eps"]))[:, None]
        if self.weight_decay_mode == "l2":
            w = (1 - u * decay) * w
        elif self.weight_decay_mode == "decoupled":
            w = (1 - lr * decay) * w
        w = w - u * g
        if self.limits_norm:
            norm = w.norm(dim=1, keepdim=True)
            limit = hyper["max_norm"]
            w = torch.where(norm > limit, w * (limit / norm), w)
        return w
