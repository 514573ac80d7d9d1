"""The optimizers' reference steps against the contract's formulas, written out in plain Python.

The CPU backend and the fp64 reference share ``Optimizer.step_rows``: a mistake there would agree with itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import optimizers

import tbe
from tbe_core import Optimizer
from tbe_core.optimizers import REGISTRY, Hyper
from tbe_core.optimizers.adam import Moments

Row = list[float]
State = dict[str, Row]
"""A state's values: one of a row, or one an element."""


def norm(row: Row) -> float:
    return math.sqrt(sum(x * x for x in row))


def sgd(optimizer: tbe.SGD, w: Row, g: Row, state: State, step: int) -> Row:
    return [x - optimizer.lr * y for x, y in zip(w, g, strict=True)]


def adagrad(optimizer: tbe.Adagrad, w: Row, g: Row, state: State, step: int) -> Row:
    """m += g^2; w -= lr * g / (sqrt(m) + eps)."""
    state["sum"] = m = [x + y * y for x, y in zip(state["sum"], g, strict=True)]
    return [x - optimizer.lr * y / (math.sqrt(z) + optimizer.eps) for x, y, z in zip(w, g, m, strict=True)]


def rowwise_adagrad(optimizer: tbe.RowwiseAdagrad, w: Row, g: Row, state: State, step: int) -> Row:
    """m += mean(h^2); u = lr / (sqrt(m) + eps); w = c*w - u*g, then no longer than max_norm."""
    lr, decay, mode = optimizer.lr, optimizer.weight_decay, optimizer.weight_decay_mode
    h = [y + decay * x for x, y in zip(w, g, strict=True)] if mode == "l2" else g
    state["sum"] = [state["sum"][0] + sum(y * y for y in h) / len(h)]
    u = lr / (math.sqrt(state["sum"][0]) + optimizer.eps)
    c = {"none": 1.0, "l2": 1.0 - u * decay, "decoupled": 1.0 - lr * decay}[mode]
    w = [c * x - u * y for x, y in zip(w, g, strict=True)]
    if optimizer.max_norm > 0 and norm(w) > optimizer.max_norm:
        w = [x * optimizer.max_norm / norm(w) for x in w]
    return w


def direction(optimizer: Moments, w: Row, g: Row, state: State, step: int) -> Row:
    """m^ / (sqrt(v^) + eps) + weight_decay * w."""
    b1, b2 = optimizer.beta1, optimizer.beta2
    state["exp_avg"] = m = [b1 * x + (1 - b1) * y for x, y in zip(state["exp_avg"], g, strict=True)]
    square = [y * y for y in g]
    if len(state["exp_avg_sq"]) == 1:
        square = [sum(square) / len(square)]
    state["exp_avg_sq"] = v = [b2 * x + (1 - b2) * y for x, y in zip(state["exp_avg_sq"], square, strict=True)]
    roots = [math.sqrt(x / (1 - b2**step)) + optimizer.eps for x in v] * (len(w) // len(v))
    return [
        x / (1 - b1**step) / root + optimizer.weight_decay * y
        for x, root, y in zip(m, roots, w, strict=True)
    ]  # fmt: skip


def adam(optimizer: tbe.Adam, w: Row, g: Row, state: State, step: int) -> Row:
    r = direction(optimizer, w, g, state, step)
    return [x - optimizer.lr * y for x, y in zip(w, r, strict=True)]


def lamb(optimizer: tbe.LAMB, w: Row, g: Row, state: State, step: int) -> Row:
    """w -= lr * norm(w) / norm(r) * r, the ratio 1 where a norm is 0."""
    r = direction(optimizer, w, g, state, step)
    ratio = norm(w) / norm(r) if norm(w) > 0 and norm(r) > 0 else 1.0
    return [x - optimizer.lr * ratio * y for x, y in zip(w, r, strict=True)]


def lars(optimizer: tbe.LARS, w: Row, g: Row, state: State, step: int) -> Row:
    """a = lr * eta * norm(w) / (norm(g) + wd * norm(w)); m = mom * m + a * (g + wd * w); w -= m."""
    decay, below = optimizer.weight_decay, norm(g) + optimizer.weight_decay * norm(w)
    a = optimizer.lr * optimizer.eta * norm(w) / below if norm(w) > 0 and below > 0 else optimizer.lr
    state["momentum_buffer"] = m = [
        optimizer.momentum * z + a * (y + decay * x)
        for x, y, z in zip(w, g, state["momentum_buffer"], strict=True)
    ]  # fmt: skip
    return [x - z for x, z in zip(w, m, strict=True)]


FORMULAS: dict[str, Callable[..., Row]] = {
    "sgd": sgd,
    "adagrad": adagrad,
    "rowwise_adagrad": rowwise_adagrad,
    "adam": adam,
    "partial_rowwise_adam": adam,
    "lamb": lamb,
    "partial_rowwise_lamb": lamb,
    "lars": lars,
}


def test_every_optimizer_has_its_formula_here() -> None:
    assert FORMULAS.keys() == REGISTRY.keys()


VALUES = [st.floats(-4, 4, width=32)] * 6
SQUARES = [st.floats(0, 9, width=32)] * 3


@given(
    optimizer=optimizers(),
    rows=st.lists(st.tuples(*VALUES, *SQUARES, *SQUARES), min_size=1),
    step=st.sampled_from((1, 2, 50, 10**5)),
)
def test_steps_are_the_contract_s_formulas(
    optimizer: Optimizer, rows: list[tuple[float, ...]], step: int
) -> None:
    """Rows of three elements, all stepped at once, beside each stepped by its formula."""
    data = torch.tensor(rows, dtype=torch.float64)
    w, g = data[:, :3], data[:, 3:6]
    # A moment of 0 with a gradient of 0 divides 0 by eps: every lookup has some gradient.
    g = torch.where(g.abs() < 1e-3, 1e-3, g)
    state = {
        spec.name: data[:, 6 + 3 * i : 9 + 3 * i if spec.kind == "element" else 7 + 3 * i].clone()
        for i, spec in enumerate(optimizer.STATE)
    }
    before = {name: value.tolist() for name, value in state.items()}
    for spec in optimizer.STATE:
        if spec.kind == "row":
            state[spec.name] = state[spec.name].squeeze(1)
    values = tuple(torch.tensor(v, dtype=torch.float64) for v in optimizer.hyper_values())
    stepped = optimizer.step_rows(w.clone(), g, state, Hyper(values, optimizer.HYPER, torch.tensor(step)))
    for i in range(len(rows)):
        expected = {name: value[i] for name, value in before.items()}
        row = FORMULAS[optimizer.NAME](optimizer, w[i].tolist(), g[i].tolist(), expected, step)
        assert stepped[i].tolist() == pytest.approx(row, rel=1e-10, abs=1e-10)
        for name, found in state.items():
            assert found[i].reshape(-1).tolist() == pytest.approx(expected[name], rel=1e-12, abs=1e-300)


TORCH = {
    "sgd": (tbe.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (tbe.Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "adam": (tbe.Adam(lr=0.1), lambda p: torch.optim.Adam(p, lr=0.1)),
    "adamw": (tbe.Adam(lr=0.1, weight_decay=0.2), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2)),
}


@pytest.mark.values
@pytest.mark.parametrize("name", TORCH)
def test_agrees_with_torch_s_own_optimizer(place: tuple[str, str], name: str) -> None:
    """Every row is looked up in every step, so that a dense torch optimizer sees the same problem."""
    ours, theirs = TORCH[name]
    emb = tbe.TableBatchedEmbeddingBags([tbe.Table("t", 6, 5)], optimizer=ours, backend=place[0], device=place[1])
    weight = torch.nn.Parameter(emb.split_embedding_weights()[0].cpu().clone())
    optimizer, generator = theirs([weight]), torch.Generator().manual_seed(3)
    for _ in range(6):
        ids = torch.cat([torch.randperm(6, generator=generator), torch.randint(0, 6, (9,), generator=generator)])
        offsets = torch.tensor([0, 4, 4, 11, 15])
        grad = torch.randn(4, 5, generator=generator)
        emb(ids.to(place[1]), offsets.to(place[1])).backward(grad.to(place[1]))
        optimizer.zero_grad()
        torch.nn.functional.embedding_bag(ids, weight, offsets[:-1], mode="sum").backward(grad)
        optimizer.step()
        torch.testing.assert_close(emb.split_embedding_weights()[0].cpu(), weight.detach(), rtol=1e-4, atol=1e-5)
