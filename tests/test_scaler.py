"""autocast and ``torch.amp.GradScaler`` around the module: same bits, and skipped steps that update nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import INDICES, OFFSETS, differing, inputs, make, step, tensors
from torch import nn

import tbe

pytestmark = pytest.mark.values
Place = tuple[str, str]
OPTIMIZERS = {
    "sgd": tbe.SGD(lr=0.1),
    "decay": tbe.RowwiseAdagrad(lr=0.1, eps=1e-4, weight_decay=0.01, weight_decay_mode="decoupled"),
    "adam": tbe.Adam(lr=0.1, weight_decay=0.01),
    "partial rowwise lamb": tbe.PartialRowwiseLAMB(lr=0.1),
}


def on(place: Place, **changes: Any) -> tbe.TableBatchedEmbeddingBags:
    return make(backend=place[0], device=place[1], **changes)


def call(place: Place, **changes: Any) -> dict[str, torch.Tensor]:
    return {k: v.to(place[1]) for k, v in inputs(**changes).items()}


def gradient(place: Place, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 12, generator=torch.Generator().manual_seed(seed)).to(place[1])


def scaler_on(place: Place, scale: float = 1024.0, **options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(place[1], init_scale=scale, growth_interval=10**6, **options)


def backward(emb: nn.Module, place: Place, scaler: torch.amp.GradScaler, grad: torch.Tensor) -> None:
    """One scaled backward whose unscaled output gradient is ``grad``."""
    scaler.scale((emb(**call(place)) * grad).sum()).backward()


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_autocast_does_not_reach_the_module(
    pooling: str, weights: torch.dtype, amp: torch.dtype, place: Place
) -> None:
    plain, cast = (on(place, pooling=pooling, weights_dtype=weights) for _ in range(2))
    factors, found = torch.rand(5, device=place[1]), []
    for emb, enabled in ((plain, False), (cast, True)):
        mine = factors.clone().requires_grad_()
        with torch.autocast(place[1], dtype=amp, enabled=enabled):
            out = emb(**call(place, per_sample_weights=mine))
            assert out.dtype == torch.float32
            out.backward(gradient(place))
        found.append((out, mine.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert not differing(tensors(plain), tensors(cast))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("output", [torch.float32, torch.float16, torch.bfloat16])
def test_deferred_steps_equal_immediate_ones(output: torch.dtype, optimizer: str, place: Place) -> None:
    now, later = (on(place, optimizer=OPTIMIZERS[optimizer], output_dtype=output) for _ in range(2))
    deferred = tbe.FusedOptimizer(later, defer=True)
    grads = [gradient(place, seed).to(output) for seed in range(3)]
    for emb in (now, later):
        before = tensors(emb)
        outs = [emb(**call(place)) for _ in grads]  # three forwards, then three backwards: three steps
        for out, grad in zip(outs, grads, strict=True):
            out.backward(grad)
        assert bool(differing(before, tensors(emb))) == (emb is now)
    deferred.step()
    assert not differing(tensors(now), tensors(later))
    deferred.step()
    assert not differing(tensors(now), tensors(later)), "nothing is kept any more"


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_scaler_s_step_equals_an_unscaled_one(optimizer: str, unscale: bool, place: Place) -> None:
    """The scale is a power of two: bit for bit."""
    plain, scaled = (on(place, optimizer=OPTIMIZERS[optimizer]) for _ in range(2))
    tables, scaler = tbe.FusedOptimizer(scaled, defer=True), scaler_on(place)
    for seed in range(3):
        backward(plain, place, scaler_on(place, enabled=False), gradient(place, seed))
        backward(scaled, place, scaler, gradient(place, seed))
        if unscale:
            scaler.unscale_(tables)
            norm = nn.utils.clip_grad_norm_(tables.param_groups[0]["params"], 1e-6)
            assert norm < 1e-9, "what stands for the tables' gradients counts for nothing in a norm"
        scaler.step(tables)
        scaler.update()
    assert not differing(tensors(plain), tensors(scaled))
    assert scaler.get_scale() == 1024.0


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_updates_nothing(optimizer: str, value: float, place: Place) -> None:
    emb = on(place, optimizer=OPTIMIZERS[optimizer])
    tables, scaler = tbe.FusedOptimizer(emb, defer=True), scaler_on(place)
    step_like = tensors(emb)
    grad = gradient(place)
    grad[1, 7] = value
    backward(emb, place, scaler, gradient(place, 5))
    backward(emb, place, scaler, grad)  # one bad backward of two, and neither counts
    scaler.step(tables)
    scaler.update()
    assert not differing(step_like, tensors(emb))
    assert scaler.get_scale() == 512.0, "the scaler saw it and backed off"
    assert emb.counter is None or emb.counter[0] == 0, "a skipped step is none"
    backward(emb, place, scaler, gradient(place, 1))
    scaler.step(tables)
    scaler.update()
    good = on(place, optimizer=OPTIMIZERS[optimizer])
    backward(good, place, scaler_on(place, enabled=False), gradient(place, 1))
    assert not differing(tensors(good), tensors(emb)), "the next step is as if the skipped one had never been"
    assert emb.counter is None or torch.equal(emb.counter, good.counter)


def test_rounding_at_random_counts_the_steps_that_are_taken(place: Place) -> None:
    options: dict[str, Any] = {"weights_dtype": torch.bfloat16, "stochastic_rounding": True, "rounding_seed": 9}
    emb, good = on(place, **options), on(place, **options)
    tables, scaler = tbe.FusedOptimizer(emb, defer=True), scaler_on(place)
    for seed, skipped in ((0, False), (1, True), (2, False)):
        grad = gradient(place, seed)
        if skipped:
            grad[0, 0] = torch.nan
        else:
            good(**call(place)).backward(grad)
        backward(emb, place, scaler, grad)
        scaler.step(tables)
        scaler.update()
    assert not differing(tensors(good), tensors(emb)) and emb.counter.tolist() == [2, 9]


def test_an_overflow_of_fp16_is_found(place: Place) -> None:
    emb = on(place, output_dtype=torch.float16)
    tables, scaler = tbe.FusedOptimizer(emb, defer=True), scaler_on(place, scale=2.0**20)
    before = tensors(emb)
    backward(emb, place, scaler, torch.ones(2, 12, device=place[1], dtype=torch.float16))
    scaler.step(tables)
    scaler.update()
    assert not differing(before, tensors(emb)) and scaler.get_scale() == 2.0**19


@pytest.mark.parametrize("bad", [False, True])
def test_watched_parameters_decide_too(bad: bool, place: Place) -> None:
    emb, dense = on(place), nn.Linear(12, 1, device=place[1])
    tables = tbe.FusedOptimizer(emb, defer=True, watch=dense.parameters())
    sgd, scaler = torch.optim.SGD(dense.parameters(), lr=0.1), scaler_on(place)
    before, weight = tensors(emb), dense.weight.detach().clone()
    scaler.scale(dense(emb(**call(place))).sum()).backward()
    assert dense.bias.grad is not None
    if bad:
        dense.bias.grad.fill_(torch.inf)
    scaler.step(sgd)
    scaler.step(tables)
    scaler.update()
    assert bool(differing(before, tensors(emb))) != bad and torch.equal(weight, dense.weight) == bad
    assert scaler.get_scale() == (512.0 if bad else 1024.0)


def test_without_a_scaler_an_infinite_gradient_steps_its_own_rows_alone(place: Place) -> None:
    now, later = (on(place, optimizer=tbe.SGD(lr=0.1)) for _ in range(2))
    deferred = tbe.FusedOptimizer(later, defer=True)
    grad = gradient(place)
    grad[1, :4] = torch.inf  # the bag of id 9 in the first table
    for emb in (now, later):
        emb(**call(place)).backward(grad)
    deferred.step()
    assert not differing(tensors(now), tensors(later))
    assert now.split_embedding_weights()[0].isfinite().all(dim=1).logical_not().nonzero().tolist() == [[9]]


def test_zero_grad_drops_what_is_kept() -> None:
    emb = make()
    deferred, before = tbe.FusedOptimizer(emb, defer=True), tensors(emb)
    step(emb)
    deferred.zero_grad()
    deferred.step()
    assert not differing(before, tensors(emb))
    alone = make()
    for module in (emb, alone):
        step(module, 2)
    deferred.step()
    assert not differing(tensors(emb), tensors(alone))


def test_gradients_of_per_sample_weights_do_not_wait() -> None:
    emb, alone = make(), make()
    deferred = tbe.FusedOptimizer(emb, defer=True)
    factors = [torch.rand(5).requires_grad_() for _ in range(2)]
    factors[1].data.copy_(factors[0])
    for module, mine in zip((emb, alone), factors, strict=True):
        step(module, per_sample_weights=mine)
    assert torch.equal(factors[0].grad, factors[1].grad)  # type: ignore[arg-type]
    deferred.step()
    assert not differing(tensors(emb), tensors(alone))


@pytest.mark.parametrize("bad", [False, True])
def test_empty_batches_are_no_trouble(bad: bool, place: Place) -> None:
    emb = on(place)
    tables, scaler = tbe.FusedOptimizer(emb, defer=True), scaler_on(place)
    before = tensors(emb)
    none = torch.tensor([], dtype=torch.int64, device=place[1])
    out = emb(none, torch.zeros(5, dtype=torch.int64, device=place[1]))
    scaler.scale((out * (torch.inf if bad else 1)).sum()).backward()
    scaler.step(tables)
    scaler.update()
    assert not differing(before, tensors(emb)) and scaler.get_scale() == (512.0 if bad else 1024.0)


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    place = ("triton", "cuda")
    emb = on(place)
    tables, scaler = tbe.FusedOptimizer(emb, defer=True), scaler_on(place)
    backward(emb, place, scaler, gradient(place))
    scaler.step(tables)  # compiles kernels
    scaler.update()
    given, grad = call(place), gradient(place)
    torch.cuda.set_sync_debug_mode("error")
    try:
        scaler.scale((emb(**given) * grad).sum()).backward()
        tables.param_groups[0]["lr"] = 0.5
        scaler.step(tables)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_cannot_be_is_refused() -> None:
    emb = make()
    deferred = tbe.FusedOptimizer(emb, defer=True)
    with pytest.raises(ValueError, match=r"defer=True: modules\[0\] is deferred by another FusedOptimizer"):
        tbe.FusedOptimizer(emb, defer=True)
    with pytest.raises(ValueError, match="watch without defer=True"):
        tbe.FusedOptimizer(make(), watch=[nn.Parameter(torch.ones(1))])
    step(emb)
    with pytest.raises(RuntimeError, match="work that is kept"):
        deferred.__getstate__()
    before = tensors(emb)
    with pytest.raises(Exception, match=r"inside torch\.compile: expected an uncompiled call"):
        torch.compile(emb, backend="eager", fullgraph=True)(torch.tensor(INDICES), torch.tensor(OFFSETS))
    assert not differing(before, tensors(emb))
