"""The optimizers' reference steps against the contract's formulas, written out in plain Python.

The CPU backend and the fp64 reference share ``Optimizer.step_rows``: a mistake there would agree with itself.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import optimizers

import tbe
from tbe_core import Optimizer
from tbe_core.optimizers import REGISTRY, Hyper

Row = list[float]


def sgd(optimizer: tbe.SGD, w: Row, g: Row, m: float) -> tuple[Row, float]:
    return [x - optimizer.lr * y for x, y in zip(w, g, strict=True)], m


def rowwise_adagrad(optimizer: tbe.RowwiseAdagrad, w: Row, g: Row, m: float) -> tuple[Row, float]:
    """m += mean(h^2); u = lr / (sqrt(m) + eps); w = c*w - u*g, then no longer than max_norm."""
    lr, decay, mode = optimizer.lr, optimizer.weight_decay, optimizer.weight_decay_mode
    h = [y + decay * x for x, y in zip(w, g, strict=True)] if mode == "l2" else g
    m += sum(y * y for y in h) / len(h)
    u = lr / (math.sqrt(m) + optimizer.eps)
    c = {"none": 1.0, "l2": 1.0 - u * decay, "decoupled": 1.0 - lr * decay}[mode]
    w = [c * x - u * y for x, y in zip(w, g, strict=True)]
    norm = math.sqrt(sum(x * x for x in w))
    if optimizer.max_norm > 0 and norm > optimizer.max_norm:
        w = [x * optimizer.max_norm / norm for x in w]
    return w, m


FORMULAS = {"sgd": sgd, "rowwise_adagrad": rowwise_adagrad}


def test_every_optimizer_has_its_formula_here() -> None:
    assert FORMULAS.keys() == REGISTRY.keys()


VALUES = [st.floats(-4, 4, width=32)] * 6


@given(
    optimizer=optimizers(),
    rows=st.lists(st.tuples(st.floats(0, 9, width=32), *VALUES), min_size=1),
)
def test_steps_are_the_contract_s_formulas(optimizer: Optimizer, rows: list[tuple[float, ...]]) -> None:
    """Rows of three elements, all stepped at once, beside each stepped by its formula."""
    data = torch.tensor(rows, dtype=torch.float64)
    w, g = data[:, 1:4], data[:, 4:]
    # A moment of 0 with a gradient of 0 divides 0 by eps: every lookup has some gradient.
    g = torch.where(g.abs() < 1e-3, 1e-3, g)
    state = {spec.name: data[:, 0].clone() for spec in optimizer.STATE}
    hyper = Hyper(tuple(torch.tensor(v, dtype=torch.float64) for v in optimizer.hyper_values()), optimizer.HYPER)
    stepped = optimizer.step_rows(w.clone(), g, state, hyper)
    for i, (m, *_) in enumerate(rows):
        expected, moment = FORMULAS[optimizer.NAME](optimizer, w[i].tolist(), g[i].tolist(), m)
        assert stepped[i].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
        for found in state.values():
            assert float(found[i]) == pytest.approx(moment, rel=1e-12)
