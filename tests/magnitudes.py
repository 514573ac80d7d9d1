"""How large the terms of an optimizer's step are: what the judge measures a step's error against.

Each function takes a row's values before the step and ``size``, the sum of the absolute values of its
gradients, and gives the magnitude of the new row and of each state: the formula with every term's absolute value.
A norm or a quotient of norms has the error of the whole row, so its share is spread over the row's elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tbe_core import Optimizer, RowwiseAdagrad
from tbe_core.optimizers import RowState

TINY = 1e-300


@dataclass(frozen=True)
class Before:
    """One table: fp64 rows and states before the step and after it, by the reference."""

    optimizer: Optimizer
    w: torch.Tensor
    g: torch.Tensor
    size: torch.Tensor
    old: RowState
    new: RowState
    hyper: dict[str, float]
    step: int


Magnitudes = tuple[torch.Tensor, RowState]


def _norm(rows: torch.Tensor) -> torch.Tensor:
    return rows.norm(dim=1, keepdim=True)


def sgd(t: Before) -> Magnitudes:
    return t.w.abs() + t.hyper["lr"] * t.size, {}


def adagrad(t: Before) -> Magnitudes:
    step = t.hyper["lr"] * t.size / (t.new["sum"].sqrt() + t.hyper["eps"])
    return t.w.abs() + step, {"sum": t.old["sum"] + t.size**2}


def rowwise_adagrad(t: Before) -> Magnitudes:
    assert isinstance(t.optimizer, RowwiseAdagrad)
    lr, decay, limit = t.hyper["lr"], t.hyper["weight_decay"], t.hyper["max_norm"]
    mode = t.optimizer.weight_decay_mode
    terms = t.size + decay * t.w.abs() if mode == "l2" else t.size
    rate = (lr / (t.new["sum"].sqrt() + t.hyper["eps"]))[:, None]
    magnitude = t.w.abs() + rate * terms
    if t.optimizer.limits_norm:
        keep = {"none": 1.0, "l2": 1 - rate * decay, "decoupled": 1 - lr * decay}[mode]
        stepped = keep * t.w - rate * t.g
        norm = _norm(stepped)
        scale = torch.where(norm > limit, limit / norm, 1.0)
        spread = stepped.abs() * _norm(magnitude) / norm.clamp(min=TINY)
        touched = (t.size > 0).any(dim=1, keepdim=True)
        magnitude = torch.where(touched & (norm > limit), scale * (magnitude + spread), magnitude)
    return magnitude, {"sum": t.old["sum"] + (terms * terms).mean(dim=1)}


def _moments(t: Before) -> tuple[torch.Tensor, torch.Tensor, RowState]:
    """Magnitude of Adam's direction, the direction itself, and the moments' magnitudes."""
    beta1, beta2 = t.hyper["beta1"], t.hyper["beta2"]
    m = beta1 * t.old["exp_avg"].abs() + (1 - beta1) * t.size
    square = t.size**2 if t.old["exp_avg_sq"].dim() == 2 else (t.size**2).mean(dim=1)
    v = beta2 * t.old["exp_avg_sq"] + (1 - beta2) * square
    root = (t.new["exp_avg_sq"] / (1 - beta2**t.step)).sqrt() + t.hyper["eps"]
    root = root if root.dim() == 2 else root[:, None]
    correct, decay = 1 - beta1**t.step, t.hyper["weight_decay"]
    direction = t.new["exp_avg"] / correct / root + decay * t.w
    return m / correct / root + decay * t.w.abs(), direction, {"exp_avg": m, "exp_avg_sq": v}


def adam(t: Before) -> Magnitudes:
    size, _, states = _moments(t)
    return t.w.abs() + t.hyper["lr"] * size, states


def lamb(t: Before) -> Magnitudes:
    size, r, states = _moments(t)
    of_w, of_r = _norm(t.w), _norm(r)
    ratio = torch.where((of_w > 0) & (of_r > 0), of_w / of_r.clamp(min=TINY), 1.0)
    spread = r.abs() * _norm(size) / of_r.clamp(min=TINY)
    return t.w.abs() + t.hyper["lr"] * ratio * (size + spread), states


def lars(t: Before) -> Magnitudes:
    lr, decay = t.hyper["lr"], t.hyper["weight_decay"]
    of_w = _norm(t.w)
    divisor = _norm(t.g) + decay * of_w
    rate = torch.where((of_w > 0) & (divisor > 0), lr * t.hyper["eta"] * of_w / divisor.clamp(min=TINY), lr)
    spread = 1 + (_norm(t.size) + decay * of_w) / divisor.clamp(min=TINY)
    m = t.hyper["momentum"] * t.old["momentum_buffer"].abs() + rate * spread * (t.size + decay * t.w.abs())
    return t.w.abs() + m, {"momentum_buffer": m}


OF_STEP: dict[str, Callable[[Before], Magnitudes]] = {
    "sgd": sgd,
    "adagrad": adagrad,
    "rowwise_adagrad": rowwise_adagrad,
    "adam": adam,
    "partial_rowwise_adam": adam,
    "lamb": lamb,
    "partial_rowwise_lamb": lamb,
    "lars": lars,
}
