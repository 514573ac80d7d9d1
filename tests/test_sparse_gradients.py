"""``NoOptimizer``: sparse gradients against the fp64 reference, and torch's optimizers on them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import INTERPRETED
from hypothesis import given
from judge import Call, allowed, consult, judge, same_bits, sums
from problems import Trial, from_runs, offsets_of, trials
from test_values import TIERS, boundary_runs

import tbe
from tbe import policy, registry
from tbe.sparse_gradients import parameters
from tbe_core import Absent, DeviceConfig, Lookup, Table, tolerances
from tbe_core.reference import Reference

Place = tuple[str, str]
NONE = tbe.NoOptimizer()
MIXED = (Table("ad", 9, 16), Table("plan", 12, 5), Table("geo", 7, 16), Table("unused", 3, 8))


def plain(trial: Trial) -> Trial:
    return replace(trial, optimizer=NONE, stochastic_rounding=False)


def judge_gradients(spec: Any, call: Call, found: list[torch.Tensor | None]) -> None:
    """Distinct ascending rows, exactly those that are looked up, with the reference's sums; None for the rest."""
    empty = [torch.zeros(t.rows, t.dim) for t in spec.layout.tables]
    reference = Reference.of(replace(spec, optimizer=tbe.SGD()), empty, [{} for _ in empty])
    touched = reference.backward_update(call.grad, call.indices, call.offsets, call.per_sample_weights, [1.0])
    expected, size = [-table for table in reference.tables], sums(spec, call, absolute=True)
    for t, grad in enumerate(found):
        if t not in spec.trained:
            assert grad is None
            continue
        assert grad is not None and grad.is_sparse and grad.dtype == spec.weights_dtype
        assert tuple(grad.shape) == (spec.layout.tables[t].rows, spec.layout.tables[t].dim)
        rows = grad._indices().cpu()
        assert rows.tolist() == [touched[t]]
        tolerance = tolerances.row_gradients(torch.float32)
        judge(f"gradient of table {t}", grad._values(), expected[t][rows[0]], size[t][rows[0]], tolerance)


def backward(emb: tbe.TableBatchedEmbeddingBags, call: Call, **options: Any) -> torch.Tensor | None:
    """One forward and backward; returns the weights' gradient."""
    device, weights = emb.weights.device, call.per_sample_weights
    weights = None if weights is None else weights.to(device, copy=True).requires_grad_()
    out = emb(call.indices.to(device), call.offsets.to(device), weights)
    if out.requires_grad:
        out.backward(call.grad.to(device), **options)
    return None if weights is None else weights.grad


@pytest.mark.values
@pytest.mark.filterwarnings("ignore::tbe.BadLookupWarning")
@given(trial=trials())
def test_any_problem(place: Place, trial: Trial) -> None:
    trial = plain(trial)
    emb, call = trial.module(*place), trial.call()
    before, states = emb.weights.clone(), [{} for _ in trial.tables]  # type: ignore[var-annotated]
    fused = replace(emb.spec, optimizer=tbe.SGD())
    verdict = consult(fused, emb.split_embedding_weights(), states, [1.0], call)
    weight_grad = backward(emb, call)
    assert same_bits(emb.weights, before)
    if weight_grad is not None:
        verdict.judge_weight_grad(weight_grad)
    if call.grad.numel():
        judge_gradients(emb.spec, call, [p.grad for p in parameters(emb)])


@pytest.mark.values
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_runs_on_every_side_of_a_boundary(place: Place, tier: str, dtype: torch.dtype) -> None:
    for dim in (5, 64):
        trial = from_runs(boundary_runs(), bags=9, dim=dim, optimizer=NONE, weights_dtype=dtype)
        judge_gradients(*by_contract(trial, place, TIERS[tier]))


@pytest.mark.values
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("weighted", (False, True))
def test_long_runs_of_mixed_dims(place: Place, tier: str, weighted: bool) -> None:
    """Groups of several tables and dims, one of them without a lookup; features share a table; one is frozen."""
    generator = torch.Generator().manual_seed(5)
    lengths = [40, 3, 90, 0, 5, 5, 60, 1]
    ids = torch.randint(0, 3, (sum(lengths),), generator=generator)
    weights = torch.randn(len(ids), generator=generator) if weighted else None
    trial = Trial(MIXED, (0, 1, 0, 2), ids, offsets_of(lengths), weights, "mean", NONE, frozen=(2,))
    judge_gradients(*by_contract(trial, place, TIERS[tier]))


def by_contract(trial: Trial, place: Place, config: DeviceConfig) -> tuple[Any, Call, list[torch.Tensor | None]]:
    emb, call = trial.module(*place), trial.call()
    given = [None if t is None else t.to(place[1]) for t in (call.indices, call.offsets, call.per_sample_weights)]
    indices, offsets, weights = given
    assert indices is not None and offsets is not None
    problem = emb.spec.problem(indices.dtype, offsets.dtype, weights is not None)
    plan = policy.plan_for(problem, emb.weights.device, policy.request(emb.requested_backend))
    backend = registry.load(plan.backend)
    assert not isinstance(backend, Absent)
    lookup = Lookup(emb.spec, replace(plan, config=config), emb.weights, indices, offsets, weights)
    _, carry = backend.forward(lookup, True)
    found = backend.row_gradients(lookup, call.grad.to(place[1]), carry)
    grads: list[torch.Tensor | None] = [None] * len(trial.tables)
    for t, (rows, values) in found.items():
        size = (trial.tables[t].rows, trial.tables[t].dim)
        grads[t] = torch.sparse_coo_tensor(rows[None], values, size, check_invariants=True)
    return emb.spec, call, grads


@pytest.mark.values
@pytest.mark.parametrize("scale", (0.0, 1e-8, 1e4))
def test_gradients_of_any_size(place: Place, scale: float) -> None:
    trial = from_runs([3, 1, 20, 2, 5], bags=4, dim=12, optimizer=NONE)
    emb, call = trial.module(*place), trial.call()
    call = replace(call, grad=call.grad * scale)
    backward(emb, call)
    judge_gradients(emb.spec, call, [p.grad for p in parameters(emb)])


@pytest.mark.values
def test_an_infinite_gradient_stays_in_its_bag(place: Place) -> None:
    ids = torch.tensor([0, 1, 1, 2, 3, 4, 4, 5, 0])
    trial = Trial((Table("few", 7, 20),), (0,), ids, offsets_of([3, 2, 4, 0]), None, "sum", NONE)
    emb, call = trial.module(*place), trial.call()
    call.grad[1, 5] = float("inf")
    backward(emb, call)
    grad = parameters(emb)[0].grad
    assert grad is not None
    dense = grad.to_dense()
    assert (dense.isinf().nonzero() == torch.tensor([[2, 5], [3, 5]], device=dense.device)).all()
    assert not dense.isnan().any()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "sparse_adam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
}


@pytest.mark.values
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_s_optimizers_train_as_on_torch_s_own_bags(place: Place, name: str) -> None:
    """Mixed dims, a shared table, several steps, against ``nn.functional.embedding_bag(sparse=True)``."""
    features = (1, 0, 2, 0)
    trial = Trial(MIXED, features, torch.tensor([0]), offsets_of([1]), None, "sum", NONE)
    emb = trial.module(*place)
    theirs = [torch.nn.Parameter(w.cpu().clone()) for w in emb.split_embedding_weights()]
    mine, others = OPTIMIZERS[name](list(emb.parameters())), OPTIMIZERS[name](theirs)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3 if INTERPRETED else 6):
        lengths = torch.randint(0, 6, (4, 5), generator=generator)
        ids = [torch.randint(0, MIXED[t].rows, (int(n.sum()),), generator=generator)
               for t, n in zip(features, lengths, strict=True)]  # fmt: skip
        mine.zero_grad()
        others.zero_grad()
        out = emb(torch.cat(ids).to(place[1]), offsets_of(lengths.flatten().tolist()).to(place[1]))
        pooled = [
            torch.nn.functional.embedding_bag(i, theirs[t], offsets_of(n.tolist())[:-1], mode="sum", sparse=True)
            for i, t, n in zip(ids, features, lengths, strict=True)
        ]
        expected = torch.cat(pooled, dim=1)
        torch.testing.assert_close(out.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-4)
        grad = torch.randn(expected.shape, generator=generator)
        out.backward(grad.to(place[1]))
        expected.backward(grad)
        mine.step()
        others.step()
    for table, other in zip(emb.split_embedding_weights(), theirs, strict=True):
        torch.testing.assert_close(table.cpu(), other.detach(), rtol=1e-4, atol=1e-4)
    assert same_bits(emb.split_embedding_weights()[3], theirs[3])


@pytest.mark.values
def test_backwards_add_up_and_a_kept_graph_serves_twice(place: Place) -> None:
    trial = from_runs([3, 1, 40, 2], bags=4, dim=12, optimizer=NONE)
    emb, call = trial.module(*place), trial.call()
    out = emb(call.indices.to(place[1]), call.offsets.to(place[1]))
    grad = call.grad.to(place[1])
    weight = parameters(emb)[0]
    (first,) = torch.autograd.grad(out, weight, grad, retain_graph=True)
    assert first.is_coalesced()
    out.backward(grad, retain_graph=True)
    out.backward(grad)
    assert weight.grad is not None
    assert torch.equal(weight.grad.to_dense(), 2 * first.to_dense())


@pytest.mark.values
@pytest.mark.parametrize("batch", (0, 2))
def test_no_lookup_is_an_empty_gradient(place: Place, batch: int) -> None:
    emb = Trial(MIXED, (0, 1), torch.tensor([0]), offsets_of([1]), None, "sum", NONE).module(*place)
    out = emb(torch.empty(0, dtype=torch.int64, device=place[1]), torch.zeros(2 * batch + 1).long().to(place[1]))
    out.backward(torch.ones_like(out))
    for parameter in parameters(emb)[:2]:
        assert parameter.grad is not None and parameter.grad._nnz() == 0
        assert parameter.grad.shape == parameter.shape
    assert parameters(emb)[2].grad is None


def small(**options: Any) -> tbe.TableBatchedEmbeddingBags:
    torch.manual_seed(3)
    return tbe.TableBatchedEmbeddingBags(MIXED, (0, 1), optimizer=NONE, device="cpu", **options)


IDS, ENDS = torch.tensor([1, 1, 3, 0]), torch.tensor([0, 2, 2, 3, 4])


def test_parameters_are_named_as_in_a_checkpoint_and_share_its_storage() -> None:
    emb = small()
    names = {name for name, p in emb.named_parameters() if p.requires_grad}
    assert names == emb.state_dict().keys() == {f"{t.name}.weight" for t in MIXED}
    assert not any(p.requires_grad for n, p in emb.named_parameters() if n not in names)
    # What a torch optimizer keeps of them: nothing of the storage as a whole.
    assert sum(p.numel() for p in emb.parameters()) == sum(t.rows * t.dim for t in MIXED)
    for parameter, view in zip(parameters(emb), emb.split_embedding_weights(), strict=True):
        assert parameter.data_ptr() == view.data_ptr() and parameter.is_leaf
    other = small(init=tbe.init.normal(1.0))
    other.load_state_dict(emb.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(parameters(emb), parameters(other), strict=True))


@pytest.mark.parametrize("how", (copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e)), lambda e: e.to("cpu")))
def test_a_copy_has_its_own_views(how: Callable[..., Any]) -> None:
    emb = small()
    made = how(emb)
    views = made.split_embedding_weights()
    for parameter, view, old in zip(parameters(made), views, parameters(emb), strict=True):
        assert parameter.data_ptr() == view.data_ptr() and torch.equal(parameter, old)
        assert (made is emb) == (parameter.data_ptr() == old.data_ptr())
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    before = made(IDS, ENDS)
    before.sum().backward()
    optimizer.step()
    assert (made(IDS, ENDS) != before).any()


def test_a_move_carries_tables_and_gradients() -> None:
    emb = small()
    emb(IDS, ENDS).sum().backward()
    before, at = [p.detach().clone() for p in parameters(emb)], emb.weights.data_ptr()
    optimizer = torch.optim.SGD(emb.parameters(), lr=0.5)
    emb._apply(torch.clone)  # what .to() of another device does
    assert emb.weights.data_ptr() != at
    for parameter, view, was in zip(parameters(emb), emb.split_embedding_weights(), before, strict=True):
        assert parameter.data_ptr() == view.data_ptr() and torch.equal(parameter, was)
    optimizer.step()
    assert not torch.equal(emb.split_embedding_weights()[0], before[0])
    with pytest.raises(ValueError, match="cannot convert tables"):
        emb.half()
    assert [tuple(p.shape) for p in parameters(emb)] == [(t.rows, t.dim) for t in MIXED]


def test_pickles_hold_the_storage_once() -> None:
    many = [Table(f"t{i}", 1000, 16) for i in range(8)]
    emb = tbe.TableBatchedEmbeddingBags(many, optimizer=NONE, device="cpu")
    assert len(pickle.dumps(emb)) < 1.1 * 8 * 1000 * 16 * 4


def test_what_asks_for_no_gradient_gets_none() -> None:
    emb = small()
    emb.freeze("ad")
    emb(IDS, ENDS).sum().backward()
    assert [p.grad is not None for p in parameters(emb)] == [False, True, False, False]
    emb.unfreeze("ad")
    parameters(emb)[1].grad = None
    parameters(emb)[1].requires_grad_(False)
    emb(IDS, ENDS).sum().backward()
    assert [p.grad is not None for p in parameters(emb)] == [True, False, False, False]
    emb.requires_grad_(False)
    assert not emb(IDS, ENDS).requires_grad


def test_weights_gradients_want_the_rows_of_their_forward() -> None:
    emb, weights = small(), torch.ones(4, requires_grad=True)
    out = emb(IDS, ENDS, weights)
    emb(IDS, ENDS).sum().backward()
    torch.optim.SGD(emb.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_compiled_model_breaks_its_graph_there_and_trains() -> None:
    torch._dynamo.reset()
    emb, same = small(), small()
    compiled = torch.compile(emb, backend="aot_eager")
    for each in (compiled, same):
        each(IDS, ENDS).square().sum().backward()
    for mine, other in zip(parameters(emb), parameters(same), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        assert mine.grad is None or other.grad is None or torch.equal(mine.grad.to_dense(), other.grad.to_dense())
    with torch.no_grad():
        assert torch.equal(torch.compile(emb, backend="aot_eager", fullgraph=True)(IDS, ENDS), same(IDS, ENDS))
    torch._dynamo.reset()


def test_resized_tables_keep_their_rows_and_are_parameters() -> None:
    emb = small()
    parameters(emb)[1].requires_grad_(False)
    grown = tbe.resized(emb, {"ad": 20})
    assert [p.requires_grad for p in parameters(grown)] == [True, False, True, True]
    assert parameters(grown)[0].shape == (20, 16)
    assert torch.equal(parameters(grown)[0][:9], parameters(emb)[0])


def test_what_has_no_meaning_is_refused() -> None:
    emb = small()
    with pytest.raises(ValueError, match="NoOptimizer has no such hyper-parameter"):
        emb.set_learning_rate(0.1)
    with pytest.raises(ValueError, match=r"modules\[0\] has NoOptimizer: expected a fused optimizer"):
        tbe.FusedOptimizer(emb)
    with pytest.raises(RuntimeError, match=r"accumulate\(\) of a module with NoOptimizer"), emb.accumulate():
        pass
    with pytest.raises(ValueError, match="stochastic_rounding=True with NoOptimizer"):
        small(weights_dtype=torch.bfloat16, stochastic_rounding=True)
    with pytest.raises(TypeError, match="lr"):
        tbe.NoOptimizer(lr=0.1)  # type: ignore[call-arg]


def test_a_limit_of_the_judge_is_the_contract_s() -> None:
    one = torch.ones(1, dtype=torch.float64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        strict = allowed(one, one, tolerances.row_gradients(torch.float32), dtype)
        assert float(strict) <= tolerances.row_gradients(dtype) * (1 + 1e-6)
