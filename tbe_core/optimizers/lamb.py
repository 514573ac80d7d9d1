"""LAMB: Adam's direction, scaled for each row to the row's own length.

Source: You et al., arXiv:1904.00962, with a row as the layer, as in FBGEMM_GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .adam import Moments
from .base import Hyper, RowState, StateSpec, register


@register("lamb")
@dataclass(frozen=True)
class LAMB(Moments):
    """``r = m^ / (sqrt(v^) + eps) + weight_decay * w; w -= lr * (norm(w) / norm(r)) * r``.

    The ratio is 1 where either norm is 0, so that a row of zeros learns.
    """

    def step_rows(self, w: torch.Tensor, g: torch.Tensor, state: RowState, hyper: Hyper) -> torch.Tensor:
        r = self.direction(w, g, state, hyper)
        length, of_r = w.norm(dim=1, keepdim=True), r.norm(dim=1, keepdim=True)
        ratio = torch.where((length > 0) & (of_r > 0), length / of_r, 1.0)
        return w - hyper["lr"] * ratio * r


@register("partial_rowwise_lamb")
@dataclass(frozen=True)
class PartialRowwiseLAMB(LAMB):
    """LAMB whose second moment is one scalar a row, of ``mean_D(g^2)``."""

    STATE: ClassVar[tuple[StateSpec, ...]] = (StateSpec("exp_avg", "element"), StateSpec("exp_avg_sq", "row"))
