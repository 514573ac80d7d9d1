"""Adam with decoupled weight decay, with its second moment an element or a row.

Sources: Kingma and Ba, arXiv:1412.6980; Loshchilov and Hutter, arXiv:1711.05101 (the decay); the row-wise second
moment is that of FBGEMM_GPU's "partial row-wise Adam".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Hyper, Optimizer, RowState, StateSpec, register


@dataclass(frozen=True)
class Moments(Optimizer):
    """What Adam and LAMB share: two moments, their bias corrections and a decayed direction."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    STATE: ClassVar[tuple[StateSpec, ...]] = (StateSpec("exp_avg", "element"), StateSpec("exp_avg_sq", "element"))
    HYPER: ClassVar[tuple[str, ...]] = ("lr", "beta1", "beta2", "eps", "weight_decay")
    COUNTS_STEPS: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if value >= 1:
                raise ValueError(f"{name}={value!r}: expected a number in [0, 1)")

    def direction(self, w: torch.Tensor, g: torch.Tensor, state: RowState, hyper: Hyper) -> torch.Tensor:
        """``[R, D]``: ``m^ / (sqrt(v^) + eps) + weight_decay * w``; moments are updated in place."""
        m, v = state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = hyper["beta1"], hyper["beta2"]
        m.mul_(beta1).add_((1 - beta1) * g)
        square = g * g
        v.mul_(beta2).add_((1 - beta2) * (square if v.dim() == 2 else square.mean(dim=1)))
        # In fp64: 1 - beta2^1 of fp32 numbers would keep few digits.
        step = hyper.step.double()
        correct1 = (1 - beta1.double() ** step).to(w.dtype)
        correct2 = (1 - beta2.double() ** step).to(w.dtype)
        root = (v / correct2).sqrt() + hyper["eps"]
        return m / correct1 / (root if v.dim() == 2 else root[:, None]) + hyper["weight_decay"] * w


@register("adam")
@dataclass(frozen=True)
class Adam(Moments):
    """``m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; w -= lr * (m^ / (sqrt(v^) + eps) + weight_decay * w)``.

    ``m^ = m / (1 - b1^t)``, ``v^`` likewise, with t the steps of the operator, this one included. The decay is
    decoupled: this is ``torch.optim.AdamW``, and ``torch.optim.Adam`` where ``weight_decay`` is 0. Rows without
    a lookup do not move, and their moments do not decay.
    """

    def step_rows(self, w: torch.Tensor, g: torch.Tensor, state: RowState, hyper: Hyper) -> torch.Tensor:
        return w - hyper["lr"] * self.direction(w, g, state, hyper)


@register("partial_rowwise_adam")
@dataclass(frozen=True)
class PartialRowwiseAdam(Adam):
    """Adam whose second moment is one scalar a row, of ``mean_D(g^2)``."""

    STATE: ClassVar[tuple[StateSpec, ...]] = (StateSpec("exp_avg", "element"), StateSpec("exp_avg_sq", "row"))
