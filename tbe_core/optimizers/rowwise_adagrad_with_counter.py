"""Row-wise Adagrad that counts how often each row is trained, and decays or scales its step by that.

Source: FBGEMM_GPU's row-wise Adagrad with ``WeightDecayMode.COUNTER`` and ``COWCLIP``; formulas restated in
docs/contract.md. CowClip: Zheng et al., arXiv:2204.06240.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Hyper, Optimizer, RowState, StateSpec, register

REGULARIZATIONS = ("counter", "cowclip")
COUNTER_DECAY_MODES = ("none", "l2", "decoupled", "adagradw")
LEARNING_RATE_MODES = ("equal", "tail_id_lr_increase", "tail_id_lr_decrease", "counter_sgd")
MOST_INCREASE, MOST_DECREASE = 10.0, 0.1
"""Limits of the factor that a tail row's rate is scaled by."""


@register("rowwise_adagrad_with_counter")
@dataclass(frozen=True)
class RowwiseAdagradWithCounter(Optimizer):
    """Row-wise Adagrad, ``w = C * w - a * g``, with C and a from a count c of the steps that the row has taken.

    The state ``count_and_step`` has c and the number of the row's last step, in fp32, so exact up to step 2^24.

    Args:
        regularization: ``"counter"`` or ``"cowclip"``.
        weight_decay_mode: ``"none"``, ``"l2"``, ``"decoupled"``; with ``"counter"`` also ``"adagradw"``. There
            ``"l2"`` and ``"decoupled"`` decay by ``weight_decay * counter_halflife / c``.
        counter_halflife: steps in which a count that is not added to halves; 0: c is always 1; below 0: it never
            decays. With ``"adagradw"``, -1 scales a by the root of c and -2 lr by c, up to ``adjustment_ub``.
        adjustment_iter: the steps before decay and learning rate modes take effect.
        adjustment_ub: exponent, bound or factor of the learning rate modes.
        learning_rate_mode: for rows with c above ``tail_id_threshold``: one of ``LEARNING_RATE_MODES``.
        tail_id_threshold_is_ratio: of ``max_counter``.
        weight_norm_coefficient, lower_bound: of CowClip: the gradient is clipped to
            c * max(coefficient * norm(w), bound).
        max_counter: the largest c of all rows plus 1, for the tail modes. Nobody looks for it by itself: write it
            now and then by ``set_hyper``, which takes a tensor without waiting for a GPU.
    """

    eps: float = 1e-8
    weight_decay: float = 0.0
    weight_decay_mode: str = "none"
    regularization: str = "counter"
    counter_halflife: float = -1
    adjustment_iter: float = -1
    adjustment_ub: float = 1.0
    learning_rate_mode: str = "equal"
    tail_id_threshold: float = 0.0
    tail_id_threshold_is_ratio: bool = False
    weight_norm_coefficient: float = 0.0
    lower_bound: float = 0.0
    max_counter: float = 1.0

    STATE: ClassVar[tuple[StateSpec, ...]] = (StateSpec("sum", "row"), StateSpec("count_and_step", "pair"))
    HYPER: ClassVar[tuple[str, ...]] = (
        "lr", "eps", "weight_decay", "counter_halflife", "adjustment_iter", "adjustment_ub", "tail_id_threshold",
        "weight_norm_coefficient", "lower_bound", "max_counter",
    )  # fmt: skip
    SIGNED: ClassVar[tuple[str, ...]] = ("counter_halflife", "adjustment_iter")
    FLAGS: ClassVar[tuple[str, ...]] = (
        "weight_decay_mode", "regularization", "learning_rate_mode", "tail_id_threshold_is_ratio"
    )  # fmt: skip
    COUNTS_STEPS: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (
            ("weight_decay_mode", COUNTER_DECAY_MODES),
            ("regularization", REGULARIZATIONS),
            ("learning_rate_mode", LEARNING_RATE_MODES),
            ("tail_id_threshold_is_ratio", (False, True)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(map(str, known))}")
        if self.max_counter < 1:
            raise ValueError(f"max_counter={self.max_counter!r}: expected a number >= 1")
        self._check_decay()

    def _check_decay(self) -> None:
        mode, halflife = self.weight_decay_mode, self.counter_halflife
        if self.regularization == "cowclip" and mode == "adagradw":
            raise ValueError("weight_decay_mode='adagradw' with regularization='cowclip': expected 'counter'")
        if self.weight_decay > 0 and mode == "none":
            raise ValueError(
                f"weight_decay={self.weight_decay!r} has no effect with weight_decay_mode='none': "
                "expected another mode, or weight_decay=0"
            )
        divides = self.regularization == "counter" and mode in ("l2", "decoupled")
        if self.weight_decay > 0 and divides and halflife <= 0:
            raise ValueError(
                f"counter_halflife={halflife!r} with weight_decay_mode={mode!r}: expected a number > 0, "
                "the decay is proportional to it"
            )

    def step_rows(self, w: torch.Tensor, g: torch.Tensor, state: RowState, hyper: Hyper) -> torch.Tensor:
        now = hyper.step.to(w.dtype)
        count, last = state["count_and_step"].unbind(dim=1)
        since = torch.where(last == 0, 1.0, now - last)
        count = self._counted(count, since, hyper)
        h = g + hyper["weight_decay"] * w if self.weight_decay_mode == "l2" else g
        state["sum"] += (h * h).mean(dim=1)
        rate = hyper["lr"] / (state["sum"].sqrt() + hyper["eps"])
        if self.regularization == "cowclip":
            scaled, keep = self._cowclip(w, h, count, rate, hyper)
        else:
            scaled, keep = self._regularized(count, since, now, rate, state["sum"], hyper)
        state["count_and_step"].copy_(torch.stack([count, now.expand_as(count)], dim=1))
        return keep[:, None] * w - scaled[:, None] * g

    def _counted(self, count: torch.Tensor, since: torch.Tensor, hyper: Hyper) -> torch.Tensor:
        halflife = hyper["counter_halflife"]
        decayed = 1 + torch.exp2(-since / halflife.clamp(min=1e-30)) * count
        return torch.where(halflife > 0, decayed, torch.where(halflife == 0, torch.ones_like(count), count + 1))

    def _cowclip(
        self, w: torch.Tensor, h: torch.Tensor, count: torch.Tensor, rate: torch.Tensor, hyper: Hyper
    ) -> tuple[torch.Tensor, torch.Tensor]:
        most = count * torch.maximum(hyper["weight_norm_coefficient"] * w.norm(dim=1), hyper["lower_bound"])
        length = h.norm(dim=1)
        # A gradient of 0 is within every limit, that of a row of zeros too.
        scaled = torch.where(length > most, most / length, 1.0) * rate
        decay = {"none": 0 * rate, "l2": scaled, "decoupled": hyper["lr"].expand_as(rate)}[self.weight_decay_mode]
        return scaled, 1 - hyper["weight_decay"] * decay

    def _regularized(
        self,
        count: torch.Tensor,
        since: torch.Tensor,
        now: torch.Tensor,
        rate: torch.Tensor,
        moment: torch.Tensor,
        hyper: Hyper,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lr, bound, start = hyper["lr"], hyper["adjustment_ub"], hyper["adjustment_iter"]
        decay, halflife, largest = hyper["weight_decay"], hyper["counter_halflife"], hyper["max_counter"]
        enabled = (start <= 0) | (now > start)
        threshold = hyper["tail_id_threshold"]
        if self.tail_id_threshold_is_ratio:
            threshold = (threshold * largest).floor()
        scaled = rate
        if self.learning_rate_mode == "tail_id_lr_increase":
            scaled = rate * (largest / (count + 1)).pow(bound).clamp(1.0, MOST_INCREASE)
        elif self.learning_rate_mode == "tail_id_lr_decrease":
            scaled = rate * ((count + 1) / largest).pow(bound).clamp(MOST_DECREASE, 1.0)
        elif self.learning_rate_mode == "counter_sgd":
            scaled = lr / ((bound * count).sqrt() + hyper["eps"])
        scaled = torch.where(enabled & (count > threshold), scaled, rate)
        if self.weight_decay_mode == "adagradw":
            root = rate * count.sqrt()
            linear = torch.minimum(lr * count, bound) / (moment.sqrt() + hyper["eps"])
            adjusted = torch.where(halflife == -1, root, torch.where(halflife == -2, linear, scaled))
            keep = (1 - decay * lr).clamp(min=0)
            lazy = keep.pow(torch.minimum(since, now - start) - 1)
            scaled = torch.where(enabled, adjusted * lazy, scaled)
            return scaled, torch.where(enabled, keep * lazy, 1.0)
        decay = {"none": 0 * rate, "l2": rate, "decoupled": lr.expand_as(rate)}[self.weight_decay_mode] * decay
        return scaled, 1 - torch.where(enabled, halflife / count * decay, 0.0)
