"""Gradient accumulation: micro-batches make the bits of one large batch, or nothing, or a refusal."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import INDICES, OFFSETS, TABLES, differing, inputs, make, step, tensors
from hypothesis import given
from hypothesis import strategies as st
from judge import Call, consult, same_bits
from problems import Trial, trials

import tbe
from tbe_core.dtypes import INDEX_DTYPES
from tbe_core.optimizers import REGISTRY

pytestmark = pytest.mark.filterwarnings("ignore::tbe.BadLookupWarning")

Place = tuple[str, str]


def cut(trial: Trial, call: Call, at: list[int]) -> list[tuple[Call, list[int]]]:
    """The bags [0, at[0]), [at[0], at[1]), ... as calls, each with the places of its ids in the batch."""
    features, batch = len(trial.feature_table_map), (call.offsets.numel() - 1) // len(trial.feature_table_map)
    ends, found = call.offsets.tolist(), []
    for first, last in zip([0, *at], [*at, batch], strict=True):
        places: list[int] = []
        offsets = [0]
        for bag in (t * batch + b for t in range(features) for b in range(first, last)):
            places += range(ends[bag], ends[bag + 1])
            offsets.append(len(places))
        weights = None if call.per_sample_weights is None else call.per_sample_weights[places]
        grad = call.grad[places] if trial.pooling == "none" else call.grad[first:last]
        found.append((Call(call.indices[places], torch.tensor(offsets), weights, grad), places))
    return found


def run(emb: Any, call: Call, device: str, dtype: torch.dtype = torch.int64) -> tuple[Any, Any]:
    """Forward and backward; the output and the weights' gradient. The caller's buffers are overwritten after."""
    given_ = [t.to(device, copy=True) for t in (call.indices, call.offsets.to(dtype), call.grad)]
    weights = None
    if call.per_sample_weights is not None:
        weights = call.per_sample_weights.to(device, copy=True).requires_grad_()
    out = emb(given_[0], given_[1], weights)
    if out.requires_grad:
        out.backward(given_[2])
    with torch.no_grad():
        for tensor in (*given_, *([] if weights is None else [weights])):
            tensor.fill_(1)
    return out.detach(), None if weights is None else weights.grad


@given(trial=trials(), data=st.data())
def test_micro_batches_make_the_bits_of_one_batch(place: Place, trial: Trial, data: st.DataObject) -> None:
    emb, whole, call = trial.module(*place), trial.module(*place), trial.call()
    batch = (call.offsets.numel() - 1) // len(trial.feature_table_map)
    for _ in range(2):  # the second block starts from the first one's state
        tables, states = whole.split_embedding_weights(), whole.split_optimizer_states()
        number = 1 if whole.counter is None else int(whole.counter[0]) + 1
        verdict = consult(whole.spec, tables, states, whole.hyper.tolist(), call, number)
        before = tensors(emb)
        at = sorted(data.draw(st.lists(st.integers(0, batch), max_size=3)))
        out, weight_grad = run(whole, call, place[1])
        with emb.accumulate():
            for (part, places), first in zip(cut(trial, call, at), [0, *at], strict=True):
                got, got_grad = run(emb, part, place[1], data.draw(st.sampled_from(INDEX_DTYPES)))
                expected = out[places] if trial.pooling == "none" else out[first : first + len(part.grad)]
                assert same_bits(got, expected)
                assert got_grad is None or same_bits(got_grad, weight_grad[places])
            assert all(map(same_bits, [emb.weights, *emb.states], [before["weights"], *emb_states(before)]))
        assert same_bits(emb.weights, whole.weights) and all(map(same_bits, emb.states, whole.states))
        verdict.judge_tables(emb.split_embedding_weights())
        verdict.judge_states(emb.split_optimizer_states())


def emb_states(found: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for name, tensor in found.items() if name.startswith("state")]


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_block_is_one_step_of_every_optimizer(place: Place, name: str) -> None:
    """Steps are counted once a block, so that bias corrections and random roundings are the large batch's."""
    ids, ends = torch.tensor([1, 2, 9, 1, 2, 0, 4, 4]), torch.tensor([0, 2, 3, 4, 5, 5, 6, 7, 8])
    trial = Trial(TABLES, (0, 1), ids, ends, optimizer=REGISTRY[name](), weights_dtype=torch.float16)
    options = {"weights_dtype": torch.float16, "stochastic_rounding": True, "optimizer": trial.optimizer}
    emb, whole = (make(backend=place[0], device=place[1], **options) for _ in range(2))
    for seed in (1, 2):
        call = replace(trial, seed=seed).call()
        run(whole, call, place[1])
        with emb.accumulate():
            for part, _ in cut(trial, call, [1, 3]):
                run(emb, part, place[1])
    assert whole.counter is not None and whole.counter[0] == 2 and emb.counter is not None
    assert torch.equal(emb.counter, whole.counter)
    assert not differing(tensors(emb), tensors(whole))


def test_weighted_and_plain_micro_batches_mix(place: Place) -> None:
    """A call without weights counts as one whose weights are 1."""
    options = {"backend": place[0], "device": place[1]}
    emb, ones = make(**options), make(**options)
    ids, ends = torch.tensor(INDICES), torch.tensor(OFFSETS)
    grad, weights = torch.randn(2, 12), torch.tensor([0.5, 2.0, -1.0, 3.0, 0.25]).half()
    for module, second in ((emb, None), (ones, torch.ones(5))):
        with module.accumulate():
            run(module, Call(ids, ends, weights, grad), place[1])
            run(module, Call(ids, ends, second, grad), place[1])
    assert not differing(tensors(emb), tensors(ones))


def test_a_block_without_backwards_and_one_without_ids_step_nothing(place: Place) -> None:
    emb = make(backend=place[0], device=place[1])
    before = tensors(emb)
    with emb.accumulate():
        pass
    with emb.accumulate():
        run(
            emb,
            Call(torch.tensor([], dtype=torch.int64), torch.zeros(5).long(), None, torch.ones(2, 12)),
            place[1],
        )
        run(
            emb,
            Call(torch.tensor([], dtype=torch.int64), torch.zeros(1).long(), None, torch.ones(0, 12)),
            place[1],
        )
    assert not differing(before, tensors(emb))


def test_a_block_that_raises_steps_nothing() -> None:
    emb, fresh = make(), make()
    before = tensors(emb)
    with pytest.raises(KeyError), emb.accumulate():
        step(emb)
        raise KeyError
    assert not differing(before, tensors(emb))
    for module in (emb, fresh):
        step(module)
    assert not differing(tensors(emb), tensors(fresh))


def test_a_nested_block_is_refused_and_the_outer_one_not_stepped() -> None:
    emb = make()
    before = tensors(emb)
    with pytest.raises(RuntimeError, match=r"accumulate\(\) inside accumulate\(\)"), emb.accumulate():
        step(emb)
        with emb.accumulate():
            pass
    assert not differing(before, tensors(emb))


def test_blocks_of_two_modules_nest() -> None:
    left, right, plain = make(), make(), make()
    with left.accumulate(), right.accumulate():
        step(left)
        step(right)
    step(plain)
    assert not differing(tensors(left), tensors(plain)) and not differing(tensors(right), tensors(plain))


def test_inference_inside_a_block_sees_the_tables_before_it() -> None:
    emb = make()
    expected = emb(**inputs()).detach()
    with emb.accumulate():
        step(emb)
        with torch.no_grad():
            assert torch.equal(emb(**inputs()), expected)
    assert not torch.equal(emb(**inputs()), expected)


def test_a_backward_after_its_block_is_refused() -> None:
    emb = make()
    before = tensors(emb)
    with emb.accumulate():
        out = emb(**inputs()).sum()
    with pytest.raises(RuntimeError, match="the accumulate\\(\\) block in which this lookup was made has ended"):
        out.backward()
    with pytest.raises(RuntimeError, match="has ended"), emb.accumulate():
        out.backward()
    assert not differing(before, tensors(emb))


def test_a_backward_inside_a_block_of_a_lookup_made_before_it_is_kept() -> None:
    emb, plain = make(), make()
    before, out = tensors(emb), emb(**inputs())
    with emb.accumulate():
        out.sum().backward()
        assert not differing(before, tensors(emb))
    plain(**inputs()).sum().backward()
    assert not differing(tensors(emb), tensors(plain))


def test_a_second_backward_inside_a_block_is_refused() -> None:
    emb, plain = make(), make()
    with emb.accumulate():
        out = emb(**inputs()).sum()
        out.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="a second backward through one lookup"):
            out.backward()
    plain(**inputs()).sum().backward()
    assert not differing(tensors(emb), tensors(plain))


def test_freezing_inside_a_block_is_refused_at_the_next_backward() -> None:
    emb = make()
    before = tensors(emb)
    with pytest.raises(RuntimeError, match="tables were frozen, unfrozen or moved"), emb.accumulate():
        step(emb)
        emb.freeze("ad")
        step(emb)
    assert not differing(before, tensors(emb))


def test_a_new_learning_rate_inside_a_block_holds_for_its_step() -> None:
    emb, plain = make(), make()
    with emb.accumulate():
        step(emb)
        emb.set_learning_rate(0.5)
    plain.set_learning_rate(0.5)
    step(plain)
    assert not differing(tensors(emb), tensors(plain))


def test_a_copy_made_inside_a_block_is_in_none() -> None:
    emb = make()
    with emb.accumulate():
        copies = [copy.deepcopy(emb), pickle.loads(pickle.dumps(emb))]
    for copied in copies:
        before = tensors(copied)
        step(copied)
        assert differing(before, tensors(copied))


def test_frozen_tables_stay_and_clipped_gradients_are_kept_clipped() -> None:
    emb, plain = make(gradient_clipping=0.3), make(gradient_clipping=0.3)
    for module in (emb, plain):
        module.freeze("geo")
    with emb.accumulate():
        step(emb)
    step(plain)
    assert not differing(tensors(emb), tensors(plain))
    emb.freeze("ad")
    before = tensors(emb)
    with emb.accumulate():
        weights = torch.ones(5, requires_grad=True)
        step(emb, per_sample_weights=weights)
    assert weights.grad is not None and not differing(before, tensors(emb))


def test_a_compiled_call_is_refused_inside_a_block() -> None:
    torch._dynamo.reset()
    emb = make()
    compiled = torch.compile(emb, fullgraph=True, backend="aot_eager")
    step(compiled)
    before = tensors(emb)
    with pytest.raises(RuntimeError) as caught, emb.accumulate():
        step(compiled)
    assert "a training call under torch.compile or a dispatch mode inside accumulate()" in str(caught.value)
    with emb.accumulate(), torch.no_grad():
        assert torch.equal(compiled(**inputs()), emb(**inputs()))
    assert not differing(before, tensors(emb))
    step(compiled)
    assert differing(before, tensors(emb))


def test_the_backend_of_the_lookups_makes_the_update(place: Place) -> None:
    emb, plain = make(device=place[1]), make(device=place[1])
    call = Call(torch.tensor(INDICES), torch.tensor(OFFSETS), None, torch.randn(2, 12))
    with emb.accumulate(), tbe.use_backend(place[0]):
        run(emb, call, place[1])
    with tbe.use_backend(place[0]):
        run(plain, call, place[1])
    assert not differing(tensors(emb), tensors(plain))


@pytest.mark.parametrize("bad", [False, True])
def test_scaled_micro_batches_make_one_deferred_step(bad: bool) -> None:
    """Clipped when unscaled, not before; skipped as a whole where one micro-batch overflowed."""
    options = {"optimizer": tbe.Adam(lr=0.1), "gradient_clipping": 0.5}
    emb, plain = make(**options), make(**options)
    grads = torch.randn(2, 2, 12)
    tables, scaler = tbe.FusedOptimizer(emb, defer=True), torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = tensors(emb)
    with emb.accumulate():
        for number, grad in enumerate(grads):
            poisoned = grad.clone()
            poisoned[0, 0] = torch.inf if bad and number else grad[0, 0]
            scaler.scale((emb(**inputs()) * poisoned).sum()).backward()
    assert not differing(before, tensors(emb))
    scaler.step(tables)
    scaler.update()
    with plain.accumulate():
        for grad in grads:
            plain(**inputs()).backward(grad)
    if bad:
        assert not differing(before, tensors(emb)) and emb.counter is not None and emb.counter[0] == 0
    else:
        assert not differing(tensors(plain), tensors(emb))
        assert emb.counter is not None and emb.counter[0] == 1


def test_deferring_inside_a_block_is_refused_at_the_next_backward() -> None:
    emb = make()
    before = tensors(emb)
    with pytest.raises(RuntimeError, match=r"FusedOptimizer\(defer=True\) was made since"), emb.accumulate():
        step(emb)
        optimizer = tbe.FusedOptimizer(emb, defer=True)
        step(emb)
    optimizer.step()
    assert not differing(before, tensors(emb))
