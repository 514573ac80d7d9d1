"""The named cases of ``tbe_core.cases``; past_int32 is in test_cases_size.py."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from judge import Call, consult, same_bits
from problems import Trial, from_runs, offsets_of, run_and_compare, step, step_and_compare

import tbe
from tbe import registry
from tbe_core import Table
from tbe_core.dtypes import INDEX_DTYPES

Place = tuple[str, str]
ADAGRAD = tbe.RowwiseAdagrad(lr=0.5)


@pytest.mark.values
@pytest.mark.case("narrow_rows")
@pytest.mark.parametrize("dim", (1, 2, 3, 7))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_narrow_rows(place: Place, dim: int, dtype: torch.dtype) -> None:
    for pooling in ("sum", "none"):
        trial = from_runs([1, 20, 3, 2], 5, dim, optimizer=ADAGRAD, weights_dtype=dtype)
        run_and_compare(replace(trial, pooling=pooling), *place)


@pytest.mark.values
@pytest.mark.case("wide_rows")
@pytest.mark.parametrize("dim", (1100, 2048, 4000))
def test_wide_rows(place: Place, dim: int) -> None:
    try:
        from_runs([1], 1, dim, optimizer=ADAGRAD).module(*place)
    except tbe.BackendError as refusal:
        assert f"dim {dim}" in str(refusal)
        return
    for pooling in ("mean", "none"):
        trial = from_runs([1, 9, 3], 3, dim, optimizer=ADAGRAD, weights_dtype=torch.float16)
        trial = replace(trial, pooling=pooling)
        if pooling == "mean":
            trial = replace(trial, per_sample_weights=torch.rand(len(trial.indices)))
        run_and_compare(trial, *place)


@pytest.mark.values
@pytest.mark.case("wide_rows")
def test_rows_too_wide_are_refused_with_a_reason_or_right(place: Place) -> None:
    trial = from_runs([2, 1], 2, 8200, optimizer=ADAGRAD)
    try:
        run_and_compare(trial, *place)
    except tbe.BackendError as refusal:
        assert "dim 8200" in str(refusal)


@pytest.mark.values
@pytest.mark.case("nothing_to_look_up")
@pytest.mark.parametrize("pooling", ("sum", "mean", "none"))
@pytest.mark.parametrize("batch", (0, 1, 4))
@pytest.mark.parametrize("weighted", (False, True))
def test_nothing_to_look_up(place: Place, pooling: str, batch: int, weighted: bool) -> None:
    """No lookups at all; with bags of none, the output is zero, and no row changes."""
    if weighted and pooling == "none":
        weighted = False
    tables = (Table("a", 5, 6), Table("b", 3, 6))
    empty = torch.empty(0, dtype=torch.int64)
    weights = torch.empty(0) if weighted else None
    trial = Trial(tables, (0, 1, 0), empty, offsets_of([0] * 3 * batch), weights, pooling, ADAGRAD)
    emb = trial.module(*place)
    before = emb.weights.detach().clone()
    step_and_compare(emb, trial.call())
    outcome = step(emb, trial.call())
    assert outcome.out.shape == ((0, 6) if pooling == "none" else (batch, 18))
    assert (outcome.out == 0).all()
    assert same_bits(emb.weights, before)


@pytest.mark.values
@pytest.mark.case("nothing_to_look_up")
@pytest.mark.parametrize("pooling", ("sum", "mean"))
def test_an_empty_batch_between_full_ones(place: Place, pooling: str) -> None:
    trial = replace(from_runs([3, 2, 9], 4, 10, optimizer=ADAGRAD), pooling=pooling)
    emb = trial.module(*place)
    empty = Call(trial.indices[:0], offsets_of([]), None, torch.zeros(0, 10))
    for call in (
        trial.call(),
        empty,
        trial.call(),
        replace(empty, offsets=offsets_of([0] * 4), grad=trial.call().grad),
    ):
        step_and_compare(emb, call)
    assert not emb.weights.isnan().any()


@pytest.mark.values
@pytest.mark.case("id_equals_rows")
@pytest.mark.parametrize("mode", ("error", "warn", "ignore"))
@pytest.mark.parametrize("pooling", ("sum", "mean", "none"))
def test_id_equals_rows(place: Place, mode: str, pooling: str) -> None:
    """Two tables of one dim lie side by side: row ``rows`` of the first would be row 0 of the second."""
    tables = (Table("a", 5, 4), Table("b", 5, 4))
    ids = torch.tensor([5, 1, 0, 5, 5, 2, -1])
    trial = Trial(
        tables, (0, 1), ids, offsets_of([2, 1, 1, 3]), None, pooling, ADAGRAD, bounds_check=mode
    )  # fmt: skip
    if mode != "error":
        run_and_compare(trial, *place)
        return
    emb = trial.module(*place)
    before = emb.weights.detach().clone()
    with pytest.raises(ValueError, match=r"indices\[0\]=5 \(feature 0, table 'a', bag 0\).*\[0, 5\).*3 bad of 7"):
        step(emb, trial.call())
    assert same_bits(emb.weights, before)


@pytest.mark.values
@pytest.mark.case("shared_table")
@pytest.mark.parametrize("rows", ((3, 50), (50, 3)), ids=str)
@pytest.mark.parametrize("dims", ((8, 8), (4, 12)), ids=str)
def test_shared_table(place: Place, rows: tuple[int, int], dims: tuple[int, int]) -> None:
    """Ids that one table holds and the other does not, and rows that both features of table 1 look up."""
    tables = (Table("a", rows[0], dims[0]), Table("b", rows[1], dims[1]))
    ids = torch.tensor([2, 40, 2, 1, 40, 49, 3, 0, 2, 40, 1, 1])
    lengths = [3, 1, 4, 0, 2, 2]
    trial = Trial(tables, (1, 0, 1), ids, offsets_of(lengths), None, "sum", ADAGRAD, fresh_state=True)
    run_and_compare(trial, *place)
    emb, call = replace(trial, bounds_check="ignore").module(*place), trial.call()
    step(emb, call)
    # Row 2 of table 1 is looked up by features 0 and 2: its moment is that of the sum, not a sum of moments.
    bag_grads = call.grad[:, : dims[1]], call.grad[:, -dims[1] :]
    total = bag_grads[0][0] * 2 + bag_grads[1][0]
    moment = emb.split_optimizer_states()[1]["sum"][2].cpu()
    torch.testing.assert_close(moment, total.square().mean(), rtol=1e-5, atol=0.0)


@pytest.mark.values
@pytest.mark.case("mixed_index_dtypes")
@pytest.mark.parametrize("ids", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("ends", INDEX_DTYPES, ids=str)
def test_mixed_index_dtypes(place: Place, ids: torch.dtype, ends: torch.dtype) -> None:
    trial = from_runs([4, 1, 9, 30], 6, 9, optimizer=ADAGRAD)
    indices, offsets = trial.indices.clone(), trial.offsets
    indices[3], indices[8] = -1, 4
    run_and_compare(replace(trial, indices=indices.to(ids), offsets=offsets.to(ends)), *place)


@pytest.mark.values
@pytest.mark.case("weights_without_gradient")
def test_weights_without_gradient(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend is asked for the gradient only when somebody wants it."""
    backend = registry.load(place[0])
    asked: list[int] = []
    original = backend.per_sample_weight_grad

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(backend, "per_sample_weight_grad", counted)
    for pooling in ("sum", "mean"):
        trial = from_runs([4, 1, 9], 3, 11, optimizer=ADAGRAD, pooling=pooling)
        trial = replace(trial, per_sample_weights=torch.randn(14))
        asked.clear()
        step_and_compare(trial.module(*place), trial.call(), need_grad=False)
        assert not asked
        # Judged against the row before its update, which lr=0.5 changes by its own size.
        step_and_compare(trial.module(*place), trial.call(), need_grad=True)
        assert len(asked) == 1


@pytest.mark.values
@pytest.mark.case("duplicates_in_a_bag")
@pytest.mark.parametrize("count", (33, 4097))
def test_duplicates_in_a_bag(place: Place, count: int) -> None:
    """Weights of any sign and size, so that one that is lost, doubled or given to another bag shows."""
    generator = torch.Generator().manual_seed(count)
    ids = torch.cat([torch.full((count,), 2), torch.tensor([0, 2, 1, 2])])
    weights = torch.randn(len(ids), generator=generator)
    trial = Trial(
        (Table("t", 4, 8),), (0,), ids, offsets_of([1, count - 1, 0, 2, 2]), weights, "sum", ADAGRAD
    )  # fmt: skip
    run_and_compare(trial, *place)


@pytest.mark.case("hot_row")
@pytest.mark.parametrize("positive", (False, True), ids=("any_sign", "one_sign"))
def test_hot_row(place: Place, positive: bool) -> None:
    """125,000 lookups of one row among others; the judge sums in fp64 by index_add."""
    others = 2_000_000 if place[1] == "cuda" else 100_000
    generator = torch.Generator().manual_seed(0)
    hot, rows, dim, batch = 125_000, 5000, 16, 4096
    ids = torch.cat([torch.full((hot,), 17), torch.randint(0, rows, (others,), generator=generator)])
    ids = ids[torch.randperm(len(ids), generator=generator)]
    offsets = torch.linspace(0, len(ids), batch + 1).long()
    trial = Trial((Table("t", rows, dim),), (0,), ids, offsets, fresh_state=True)
    call, first = trial.call(positive), None
    bags = torch.repeat_interleave(torch.arange(batch), offsets.diff())
    exact, size = (
        torch.zeros(rows, dim, dtype=torch.float64).index_add_(0, ids, g.double()[bags])
        for g in (call.grad, call.grad.abs())
    )
    for _ in range(3):
        emb = trial.module(*place)
        before = emb.split_embedding_weights()[0].cpu().double()
        step(emb, call)
        after = emb.split_embedding_weights()[0].cpu()
        limit = 1e-5 * (before.abs() + 0.5 * size)
        assert ((after.double() - (before - 0.5 * exact)).abs() <= limit).all()
        first = after if first is None else first
        assert same_bits(first, after)


@pytest.mark.case("errors_name_the_argument")
def test_errors_name_the_argument(place: Place) -> None:
    trial = from_runs([4, 1, 9], 3, 11)
    emb = trial.module(*place)
    before = emb.weights.detach().clone()
    ids, ends = trial.indices.to(place[1]), trial.offsets.to(place[1])
    elsewhere = "cpu" if place[1] == "cuda" else "meta"
    cases = (
        ((ids, ends, torch.rand(13, device=place[1])), "per_sample_weights has length 13: expected 14"),
        ((ids.float(), ends, None), "indices has dtype torch.float32: expected one of int32, int64"),
        ((ids, ends.to(elsewhere), None), f"offsets is on {elsewhere}: expected {place[1]}"),
    )
    for inputs, message in cases:
        with pytest.raises(ValueError, match=message):
            emb(*inputs)
    assert same_bits(emb.weights, before)


class Model(torch.nn.Module):
    """Embeddings and a linear layer over them."""

    def __init__(self, emb: tbe.TableBatchedEmbeddingBags) -> None:
        super().__init__()
        self.emb = emb
        torch.manual_seed(3)
        self.top = torch.nn.Linear(emb.spec.output_width, 2, device=emb.weights.device)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.top(self.emb(indices, offsets, weights)).sigmoid()


@pytest.mark.case("compiled_model")
def test_compiled_model(place: Place) -> None:
    """Three steps with growing batches equal the eager model's bit for bit in tables, state and output."""
    torch.compiler.reset()
    trial = from_runs([4, 1, 9], 3, 12, optimizer=ADAGRAD)
    eager, traced = Model(trial.module(*place)), Model(trial.module(*place))
    compiled = torch.compile(traced, backend="aot_eager", fullgraph=True)
    for number in range(3):
        part = from_runs([4 + number, 1, 9 * number + 2], 3 + number, 12, seed=number)
        inputs = [t.to(place[1]) for t in (part.indices, part.offsets, torch.rand(len(part.indices)))]
        before = traced.emb.weights.detach().clone()
        outs = [model(*inputs) for model in (eager, compiled)]
        assert same_bits(outs[0], outs[1])
        for out in outs:
            out.square().sum().backward()
        assert not same_bits(traced.emb.weights, before)
        assert same_bits(eager.emb.weights, traced.emb.weights)
        for a, b in zip(eager.emb.states, traced.emb.states, strict=True):
            assert same_bits(a, b)


BLOCK_TRITON = "import sys; sys.modules['triton'] = None\n"
NO_TRITON = "assert not [m for m in sys.modules if m.partition('.')[0] == 'triton' and sys.modules[m]]\n"


def _run_without_triton(script: str, *arguments: str) -> None:
    """A fresh Python that cannot import Triton and sees no GPU."""
    hidden = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "TBE_"))}
    done = subprocess.run(
        [sys.executable, "-c", BLOCK_TRITON + script + NO_TRITON, *arguments],
        env={**hidden, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


LOAD_AND_STEP = """
import torch, tbe
saved, ids, ends, grad, expected = torch.load(sys.argv[1])
emb = tbe.TableBatchedEmbeddingBags(
    [tbe.Table("a", 9, 16), tbe.Table("b", 4, 5)], [1, 0, 1], "mean",
    optimizer=tbe.RowwiseAdagrad(lr=0.5), weights_dtype=torch.float16,
)
emb.load_state_dict(saved)
assert emb.plan.backend == "cpu"
out = emb(ids, ends)
torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
out.backward(grad)
torch.save(emb.state_dict(), sys.argv[1])
"""


@pytest.mark.values
@pytest.mark.case("loads_without_gpu")
def test_loads_without_gpu(place: Place, tmp_path: Path) -> None:
    """A state_dict trained here is stepped by a Python without GPU and Triton, as the reference says."""
    ids = torch.tensor([3, 1, 0, 8, 8, 2, 1, 3, 3])
    trial = Trial(
        (Table("a", 9, 16), Table("b", 4, 5)), (1, 0, 1), ids, offsets_of([2, 1, 3, 0, 2, 1]), None, "mean",
        ADAGRAD, torch.float16,
    )  # fmt: skip
    emb, call = trial.module(*place), trial.call()
    step(emb, call)
    with torch.no_grad():
        expected = emb(ids.to(place[1]), trial.offsets.to(place[1])).cpu()
    verdict = consult(
        emb.spec, emb.split_embedding_weights(), emb.split_optimizer_states(), emb.hyper.tolist(), call
    )
    path = tmp_path / "saved.pt"
    saved = {name: value.cpu() for name, value in emb.state_dict().items()}
    torch.save((saved, ids, trial.offsets, call.grad, expected), path)
    _run_without_triton(LOAD_AND_STEP, str(path))
    stepped = torch.load(path)
    emb.load_state_dict(stepped)
    verdict.judge_tables(emb.split_embedding_weights())
    verdict.judge_states(emb.split_optimizer_states())


IMPORT_AND_STEP = """
import torch, tbe
emb = tbe.TableBatchedEmbeddingBags([tbe.Table("a", 3, 2)], optimizer=tbe.SGD(lr=1.0))
with torch.no_grad():
    emb.weights.fill_(1.0)
out = emb(torch.tensor([0, 2, 2]), torch.tensor([0, 1, 3]))
assert out.tolist() == [[1.0, 1.0], [2.0, 2.0]]
out.backward(torch.ones(2, 2))
assert emb.split_embedding_weights()[0].tolist() == [[0.0, 0.0], [1.0, 1.0], [-1.0, -1.0]]
reasons = {status.name: status.unavailable for status in tbe.backends("cpu")}
assert reasons["cpu"] is None and reasons["triton"]
"""


@pytest.mark.case("runs_without_triton")
def test_runs_without_triton() -> None:
    _run_without_triton(IMPORT_AND_STEP)
