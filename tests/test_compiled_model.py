"""The DLRM of ``tbe train`` under ``torch.compile``: one graph, the losses of eager, every step taken once."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import tbe
from tbe.train.clicks import DENSE_FEATURES, SPARSE_FEATURES
from tbe.train.model import DLRM

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
STEPS = 8


def dlrm(optimizer: tbe.Optimizer) -> DLRM:
    torch.manual_seed(4)
    tables = [tbe.Table(f"C{i}", 5 + i, 8) for i in range(SPARSE_FEATURES)]
    return DLRM(tbe.TableBatchedEmbeddingBags(tables, optimizer=optimizer, device="cpu"), 8, [16], [16])


def batch(size: int, seed: int) -> tuple[Batch, torch.Tensor]:
    """Bags of up to three ids, most rows met several times, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (SPARSE_FEATURES * size,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(-1, 5, (int(offsets[-1]),), generator=generator)
    dense = torch.rand(size, DENSE_FEATURES, generator=generator)
    return (dense, ids, offsets), torch.rand(size, generator=generator).round()


def train(model: DLRM, run: Any, sizes: list[int], autocast: bool = False) -> list[float]:
    dense, losses = torch.optim.Adagrad(model.dense_parameters(), lr=0.05), []
    for step, size in enumerate(sizes):
        call, labels = batch(size, step)
        with torch.autocast("cpu", enabled=autocast):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(run(*call), labels)
        dense.zero_grad()
        loss.backward()
        dense.step()
        losses.append(loss.item())
    return losses


def unlike(left: torch.nn.Module, right: torch.nn.Module) -> list[str]:
    theirs = right.state_dict()
    return [name for name, value in left.state_dict().items() if not torch.equal(value, theirs[name])]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "optimizer", [tbe.RowwiseAdagrad(lr=0.1), tbe.Adam(lr=0.1)], ids=["rowwise_adagrad", "adam"]
)
def test_one_graph_trains_to_eager_s_bits(optimizer: tbe.Optimizer, autocast: bool) -> None:
    """Batches of changing size; Adam's count of steps shows that each was taken once."""
    eager, sizes = dlrm(optimizer), [8, 8, 16, 3, 8, 5, 16, 8]
    model = copy.deepcopy(eager)
    start = eager.emb.weights.clone()
    expected = train(eager, eager, sizes, autocast)
    got = train(model, torch.compile(model, fullgraph=True, backend="aot_eager"), sizes, autocast)
    assert got == expected and not unlike(model, eager)
    assert not counters["graph_break"] and not torch.equal(start, model.emb.weights)
    if model.emb.counter is not None:
        assert int(model.emb.counter[0]) == len(sizes) == STEPS


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler: no g++ here")
def test_inductor_trains_to_eager_s_losses() -> None:
    eager = dlrm(tbe.RowwiseAdagrad(lr=0.1))
    model = copy.deepcopy(eager)
    expected = train(eager, eager, [8] * STEPS)
    got = train(model, torch.compile(model, fullgraph=True), [8] * STEPS)
    assert not counters["graph_break"]
    # Inductor fuses the dense layers, whose gradients then differ in the last bits.
    assert got == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(
        model.emb.split_embedding_weights(), eager.emb.split_embedding_weights(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_scaler_steps_tables_beside_a_compiled_dense_part() -> None:
    """The way for GradScaler: embeddings outside of what is compiled. An overflow in between steps nothing."""
    found = []
    for compiles in (False, True):
        model = dlrm(tbe.Adam(lr=0.1))
        over = torch.nn.Linear(model.emb.spec.output_width, 1)
        run = torch.compile(over, fullgraph=True, backend="aot_eager") if compiles else over
        dense = torch.optim.SGD(over.parameters(), lr=0.1)
        tables = tbe.FusedOptimizer(model.emb, defer=True, watch=over.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step, factor in enumerate((1.0, torch.inf, 1.0)):
            (_, ids, offsets), labels = batch(8, step)
            before = model.emb.weights.clone()
            with torch.autocast("cpu"):
                logits = run(model.emb(ids, offsets)).squeeze(1).float()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels) * factor
            dense.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(dense)
            scaler.step(tables)
            scaler.update()
            assert torch.equal(before, model.emb.weights) == (factor == torch.inf)
        assert model.emb.counter is not None and int(model.emb.counter[0]) == 2
        assert scaler.get_scale() == 2.0**9
        found.append(model.emb)
    assert not unlike(*found)
