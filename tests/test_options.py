"""Gradient clipping, frozen tables and masked weight gradients, by the fp64 reference and at the front door."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import INDICES, OFFSETS, TABLES, differing, inputs, make, step, tensors
from hypothesis import given
from hypothesis import strategies as st
from judge import consult, same_bits
from problems import Trial, offsets_of, run_and_compare, trials

import tbe
from tbe_core import DeviceConfig, Table
from tbe_core.optimizers import REGISTRY

pytestmark = pytest.mark.filterwarnings("ignore::tbe.BadLookupWarning")

Place = tuple[str, str]
WEIGHTS = (0.5, -1.0, 2.0, 0.25, 3.0)


# --- clipping -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [0.5, 100.0, float("inf"), float("-inf"), 6e4])
def test_a_clipped_gradient_steps_as_the_clamped_one(place: Place, value: float, dtype: torch.dtype) -> None:
    trial = Trial(
        (Table("a", 6, 5),), (0,), torch.tensor([0, 1, 1, 2]), offsets_of([2, 2]), torch.randn(4),
        optimizer=tbe.SGD(lr=0.5), output_dtype=dtype, gradient_clipping=0.75,
    )  # fmt: skip
    emb, plain = trial.module(*place), replace(trial, gradient_clipping=None).module(*place)
    grad = torch.full((2, 5), value, dtype=dtype)
    grad[1, 2] = -0.25
    found = []
    for module, given_grad in ((emb, grad), (plain, grad.clamp(-0.75, 0.75))):
        call = trial.call()
        assert call.per_sample_weights is not None
        weights = call.per_sample_weights.to(place[1]).requires_grad_()
        module(call.indices.to(place[1]), call.offsets.to(place[1]), weights).backward(given_grad.to(place[1]))
        assert weights.grad is not None
        found.append((weights.grad, module.weights))
    assert all(map(same_bits, *found))
    assert emb.weights.isfinite().all()


def test_a_limit_beyond_the_dtype_clips_infinities_only() -> None:
    emb = make(output_dtype=torch.float16, gradient_clipping=1e6, optimizer=tbe.SGD(lr=1.0))
    grad = torch.full((2, 12), 1.5, dtype=torch.float16)
    grad[0, 0] = float("inf")
    before = emb.split_embedding_weights()[0].clone()
    emb(**inputs()).backward(grad)
    after = emb.split_embedding_weights()[0]
    # Row 1 feeds bag 0 of feature 0, whose first column carries the infinity.
    assert float((before - after)[1, 0]) == pytest.approx(65504.0, rel=1e-5)
    assert float((before - after)[1, 1]) == pytest.approx(1.5, rel=1e-5)


@pytest.mark.parametrize("limit", [0, -1.0, float("inf"), float("nan"), "1", True])
def test_a_limit_that_is_no_limit_is_refused(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"^gradient_clipping=.*: expected a finite float > 0, or None"):
        make(gradient_clipping=limit)


def test_clipping_weights_gradients_of_deferred_steps_is_refused() -> None:
    emb = make(gradient_clipping=0.5)
    before, optimizer = tensors(emb), tbe.FusedOptimizer(emb, defer=True)
    with pytest.raises(RuntimeError, match="their gradient is unscaled at the step, too late to clip it"):
        step(emb, per_sample_weights=torch.tensor(WEIGHTS, requires_grad=True))
    optimizer.step()
    assert not differing(before, tensors(emb))
    step(emb, per_sample_weights=torch.tensor(WEIGHTS))
    optimizer.step()
    assert differing(before, tensors(emb))


# --- frozen tables ------------------------------------------------------------------------------------------


@given(trial=trials(), data=st.data())
def test_frozen_tables_keep_their_bits_and_others_do_not_notice(
    place: Place, trial: Trial, data: st.DataObject
) -> None:
    """Besides the reference's verdict on every table: outputs and weight gradients have the same bits as where
    nothing is frozen, and so have the rows and state of frozen tables as before the step."""
    frozen = tuple(t for t in range(len(trial.tables)) if data.draw(st.booleans()))
    some, none = replace(trial, frozen=frozen), replace(trial, frozen=())
    run_and_compare(some, *place)
    call = trial.call()
    found = []
    for each in (some, none):
        emb = each.module(*place)
        weights = call.per_sample_weights
        if weights is not None:
            weights = weights.to(place[1], copy=True).requires_grad_()
        out = emb(call.indices.to(place[1]), call.offsets.to(place[1]), weights)
        if out.requires_grad:
            out.backward(call.grad.to(place[1]))
        found.append((emb, out.detach(), None if weights is None else weights.grad))
    (left, out, grad), (_, other_out, other_grad) = found
    assert same_bits(out, other_out)
    assert (grad is None) == (other_grad is None)
    assert grad is None or other_grad is None or same_bits(grad, other_grad)
    fresh = none.module(*place)
    for t in range(len(trial.tables)):
        if t in frozen:
            assert same_bits(left.split_embedding_weights()[t], fresh.split_embedding_weights()[t])
            for name, state in left.split_optimizer_states()[t].items():
                assert same_bits(state, fresh.split_optimizer_states()[t][name])


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_optimizer_leaves_frozen_tables(place: Place, name: str) -> None:
    """The other table takes the step that it takes where nothing is frozen."""
    options = {"backend": place[0], "device": place[1], "optimizer": REGISTRY[name]()}
    emb, plain, fresh = (make(**options) for _ in range(3))
    emb.freeze("geo")
    ids, ends = torch.tensor(INDICES, device=place[1]), torch.tensor(OFFSETS, device=place[1])
    for seed in (1, 2):
        grad = torch.randn(2, 12, generator=torch.Generator().manual_seed(seed)).to(place[1])
        for module in (emb, plain):
            module(ids, ends).backward(grad)
    for number, expected in enumerate((plain, fresh)):
        assert torch.equal(emb.split_embedding_weights()[number], expected.split_embedding_weights()[number])
        states = expected.split_optimizer_states()[number]
        for key, state in emb.split_optimizer_states()[number].items():
            assert torch.equal(state, states[key])
    assert not torch.equal(plain.split_embedding_weights()[1], fresh.split_embedding_weights()[1])


def test_frozen_tables_beside_dense_and_sorted_ones(place: Place) -> None:
    """Small and large tables, of each one frozen, where the small ones take the dense tier."""
    tables = (
        Table("small", 5, 8),
        Table("large", 50, 8),
        Table("small frozen", 6, 8),
        Table("large frozen", 60, 8),
    )
    generator = torch.Generator().manual_seed(5)
    ids = torch.cat([torch.randint(0, t.rows, (9,), generator=generator) for t in tables])
    trial = Trial(tables, (0, 1, 2, 3), ids, offsets_of([4, 3, 2] * 4), frozen=(2, 3))
    config = DeviceConfig(dense_rows=10, dense_length=0, dense_batch=1)
    run_and_compare(trial, *place, config=config)


def test_all_frozen_counts_no_step() -> None:
    emb = make(optimizer=tbe.Adam(lr=0.1))
    emb.freeze("ad", "geo")
    weights = torch.tensor(WEIGHTS, requires_grad=True)
    step(emb, per_sample_weights=weights)
    assert emb.counter is not None and int(emb.counter[0]) == 0
    emb.unfreeze("ad")
    step(emb)
    assert int(emb.counter[0]) == 1


def test_freezing_by_name_and_back() -> None:
    emb, plain = make(), make()
    emb.freeze("geo")
    emb.freeze("geo")
    assert emb.frozen == ("geo",) and emb.spec.frozen == (1,)
    before = tensors(emb)
    step(emb)
    step(plain)
    ad, geo = emb.split_embedding_weights()
    assert torch.equal(ad, plain.split_embedding_weights()[0])
    assert torch.equal(geo.flatten(), before["weights"][-geo.numel() :])
    emb.unfreeze("geo")
    assert emb.frozen == ()
    step(emb)
    assert not torch.equal(geo.flatten(), before["weights"][-geo.numel() :])


def test_a_frozen_table_stays_frozen_in_copies_and_is_no_part_of_a_checkpoint() -> None:
    emb = make(gradient_clipping=0.5)
    emb.freeze("ad")
    grown = tbe.resized(emb, {"ad": 12})
    assert copy.deepcopy(emb).frozen == grown.frozen == ("ad",)
    assert grown.spec.gradient_clipping == 0.5
    other = make()
    other.load_state_dict(emb.state_dict())
    assert other.frozen == ()


@pytest.mark.parametrize("change", ["freeze", "unfreeze"])
def test_freezing_a_table_that_is_not_there_is_refused(change: str) -> None:
    emb = make()
    with pytest.raises(ValueError, match=r"^table 'gone': expected one of 'ad', 'geo'"):
        getattr(emb, change)("ad", "gone")
    with pytest.raises(ValueError, match=r"^table \['ad'\]: expected one of"):
        getattr(emb, change)(["ad"])
    assert emb.frozen == ()


def test_all_frozen_is_a_forward_alone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """No backward and nothing prepared for one; with weights that require it, their gradient alone."""
    trial = Trial(TABLES, (0, 1), torch.tensor(INDICES), torch.tensor(OFFSETS), torch.tensor(WEIGHTS))
    emb, call = replace(trial, frozen=(0, 1)).module(*place), trial.call()
    backend = tbe.registry.load(place[0])
    asked: list[bool] = []
    forward = type(backend).forward
    monkeypatch.setattr(
        type(backend), "forward", lambda self, lookup, carry: asked.append(carry) or forward(self, lookup, carry)
    )
    monkeypatch.setattr(
        type(backend), "backward_update", lambda *arguments: pytest.fail("nothing may be stepped")
    )
    ids, ends = call.indices.to(place[1]), call.offsets.to(place[1])
    assert not emb(ids, ends).requires_grad
    weights = torch.tensor(WEIGHTS, device=place[1], requires_grad=True)
    emb(ids, ends, weights).backward(call.grad.to(place[1]))
    assert asked == [False, False] and weights.grad is not None
    verdict = consult(emb.spec, emb.split_embedding_weights(), [{}, {}], emb.hyper.tolist(), call)
    verdict.judge_weight_grad(weights.grad)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_without_training_still_gives_the_weights_their_gradient(compiled: bool) -> None:
    emb, trained = make(), make()
    emb.requires_grad_(False)
    before = tensors(emb)
    torch._dynamo.reset()
    run = torch.compile(emb, fullgraph=True, backend="aot_eager") if compiled else emb
    found = []
    for module in (run, trained):
        weights = torch.tensor(WEIGHTS, requires_grad=True)
        step(module, per_sample_weights=weights)
        found.append(weights.grad)
    assert torch.equal(*found)
    assert not differing(before, tensors(emb))


# --- the mask of the weights' gradient ----------------------------------------------------------------------


@given(trial=trials(), data=st.data())
def test_masked_features_get_no_weight_gradient(place: Place, trial: Trial, data: st.DataObject) -> None:
    """All else has the same bits as without a mask."""
    if trial.per_sample_weights is None:
        weights = torch.linspace(-1, 1, trial.indices.numel())
        trial = replace(
            trial, per_sample_weights=weights, pooling="sum" if trial.pooling == "none" else trial.pooling
        )
    features = len(trial.feature_table_map)
    keep = torch.tensor([data.draw(st.booleans()) for _ in range(features)])
    mask = keep.to(data.draw(st.sampled_from((torch.bool, torch.float32, torch.int32)))).to(place[1])
    call, found = trial.call(), []
    assert call.per_sample_weights is not None
    for given_mask in (mask, None):
        emb = trial.module(*place)
        weights = call.per_sample_weights.to(place[1], copy=True).requires_grad_()
        out = emb(call.indices.to(place[1]), call.offsets.to(place[1]), weights, feature_requires_grad=given_mask)
        out.backward(call.grad.to(place[1]))
        assert weights.grad is not None
        found.append((out.detach(), emb, weights.grad))
    (out, emb, grad), (plain_out, plain, plain_grad) = found
    assert same_bits(out, plain_out)
    assert same_bits(emb.weights, plain.weights) and all(map(same_bits, emb.states, plain.states))
    batch = (call.offsets.numel() - 1) // features
    lengths = call.offsets.diff().long().view(features, batch).sum(1)
    kept = keep.repeat_interleave(lengths).to(place[1])
    assert same_bits(grad[kept], plain_grad[kept])
    assert not grad[~kept].any()


def test_a_wrong_mask_is_refused() -> None:
    emb, weights = make(), torch.tensor(WEIGHTS, requires_grad=True)
    before = tensors(emb)
    for mask, message in {
        (True, False): "feature_requires_grad=tuple: expected a torch.Tensor",
        torch.ones(3): r"feature_requires_grad has shape \[3\]: expected \[2\], one for every feature",
        torch.ones(2, device="meta"): "feature_requires_grad is on meta: expected cpu",
        torch.ones(2, dtype=torch.complex64): "feature_requires_grad has dtype torch.complex64",
    }.items():
        with pytest.raises(ValueError, match="^" + message):
            emb(**inputs(per_sample_weights=weights), feature_requires_grad=mask)
    with pytest.raises(ValueError, match=r"^feature_requires_grad without per_sample_weights: expected None"):
        emb(**inputs(), feature_requires_grad=torch.ones(2))
    assert not differing(before, tensors(emb))


# --- compiled -----------------------------------------------------------------------------------------------


def test_a_compiled_module_clips_masks_and_freezes_as_eager_does() -> None:
    torch._dynamo.reset()
    eager, emb = make(gradient_clipping=0.5), make(gradient_clipping=0.5)
    compiled = torch.compile(emb, fullgraph=True, backend="aot_eager")
    mask = torch.tensor([True, False])
    for frozen in ((), ("geo",), ("ad", "geo"), ()):
        found = []
        for module, run in ((eager, eager), (emb, compiled)):
            module.unfreeze(*module.frozen)
            module.freeze(*frozen)
            weights = torch.tensor(WEIGHTS, requires_grad=True)
            step(run, per_sample_weights=weights, feature_requires_grad=mask)
            found.append(weights.grad)
        assert torch.equal(*found) and not found[0][3:].any()
        assert not differing(tensors(eager), tensors(emb))
