"""``tbe.FusedOptimizer``: torch's schedulers against a plain torch optimizer, write-through groups, copies."""

from __future__ import annotations

import copy
import math
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import TABLES, differing, inputs, make, step, tensors
from torch.optim import lr_scheduler as schedulers

import tbe

STEPS = 14


def one_cycle(cycles: bool) -> Callable[[Any], Any]:
    return lambda o: schedulers.OneCycleLR(o, max_lr=0.5, total_steps=STEPS + 1, cycle_momentum=cycles)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda n: 1 / (1 + n)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda n: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 3, gamma=0.3),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5], gamma=0.3),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=10, power=2),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, T_max=9, eta_min=0.01),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=4),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.4, step_size_up=3, cycle_momentum=False),
    "OneCycleLR": one_cycle(False),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "warm-up": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.LinearLR(o, start_factor=0.1, total_iters=4), schedulers.CosineAnnealingLR(o, T_max=10)],
        milestones=[4],
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, factor=0.1, total_iters=3), schedulers.ExponentialLR(o, 0.9)], optimizer=o
    ),
}


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_steps_the_tables_like_torch_s_sgd(
    name: str, as_tensor: bool, place: tuple[str, str]
) -> None:
    """Rows of a table, each looked up once, under the same schedule as a dense parameter of torch's."""
    backend, device = place
    emb = make(tables=TABLES[:1], optimizer=tbe.SGD(lr=0.2), backend=backend, device=device)
    plain = torch.nn.Parameter(emb.split_embedding_weights()[0].detach().clone())
    ids, ends = torch.arange(10, device=device), torch.arange(11, device=device)
    ours, torchs = tbe.FusedOptimizer(emb), torch.optim.SGD([plain], lr=0.2)
    if as_tensor:
        ours.param_groups[0]["lr"] = torch.tensor(0.2, device=device)
    pair = [SCHEDULERS[name](ours), SCHEDULERS[name](torchs)]
    g = torch.Generator().manual_seed(3)
    rates = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Detected call of")
        # SequentialLR passes an epoch to its parts, which torch itself deprecates.
        warnings.filterwarnings("ignore", message="The epoch parameter")
        for number in range(STEPS):
            grad = torch.randn(10, 4, generator=g).to(device)
            emb(ids, ends).backward(grad)
            plain.grad = grad
            for optimizer, scheduler in zip((ours, torchs), pair, strict=True):
                optimizer.step()
                metric = (1.0,) if name == "ReduceLROnPlateau" else ()
                scheduler.step(*metric)
            rates.append(float(torchs.param_groups[0]["lr"]))
            assert float(ours.param_groups[0]["lr"]) == pytest.approx(rates[-1], rel=1e-5, abs=1e-9), number
            assert emb.hyper[0].item() == pytest.approx(rates[-1], rel=1e-5, abs=1e-9)
            if not as_tensor:
                assert ours.param_groups[0]["lr"] == rates[-1], "the group keeps the host's digits"
            torch.testing.assert_close(emb.split_embedding_weights()[0], plain.detach(), rtol=1e-5, atol=1e-6)
    assert len(set(rates)) > 1, "the schedule changes nothing: the test is broken"


def test_one_cycle_s_momentum_is_refused_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="momentum"):
        one_cycle(True)(tbe.FusedOptimizer(make(optimizer=tbe.SGD())))


MOMENTA = {
    "betas": (tbe.Adam(lr=0.1, beta2=0.99), lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.99)), "beta1"),
    "momentum": (tbe.LARS(lr=0.1, momentum=0.8), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8), "momentum"),
}


@pytest.mark.parametrize("key", MOMENTA)
def test_one_cycle_cycles_momentum_like_torch_s(key: str) -> None:
    optimizer, torchs_own, name = MOMENTA[key]
    emb = make(optimizer=optimizer)
    ours, torchs = tbe.FusedOptimizer(emb), torchs_own([torch.nn.Parameter(torch.ones(1))])
    pair = [one_cycle(True)(o) for o in (ours, torchs)]
    seen = set()
    for _ in range(STEPS):
        for each, scheduler in zip((ours, torchs), pair, strict=True):
            each.step()
            scheduler.step()
        mine, theirs = ours.param_groups[0], torchs.param_groups[0]
        assert mine[key] == theirs[key] and mine["lr"] == theirs["lr"]
        at = emb.spec.optimizer.HYPER.index(name)
        expected = theirs[key][0] if key == "betas" else theirs[key]
        assert mine[name] == expected and emb.hyper[at] == torch.tensor(expected)
        seen.add(expected)
    assert len(seen) > 3


# --- hyper-parameters ---------------------------------------------------------------------------------------


def decayed() -> tbe.TableBatchedEmbeddingBags:
    optimizer = tbe.RowwiseAdagrad(lr=0.1, eps=1e-4, weight_decay=0.01, weight_decay_mode="l2", max_norm=0.05)
    return make(optimizer=optimizer)


def test_a_group_has_every_hyper_parameter_and_writes_it_through() -> None:
    emb, made = decayed(), make(
        optimizer=tbe.RowwiseAdagrad(
            lr=0.7, eps=1e-2, weight_decay=0.2, weight_decay_mode="l2", max_norm=0.04
        )
    )  # fmt: skip
    (group,) = tbe.FusedOptimizer(emb).param_groups
    assert isinstance(group, dict) and group["params"][0] is emb.weights
    assert {k: v for k, v in group.items() if k != "params"} == {
        "lr": 0.1, "eps": 1e-4, "weight_decay": 0.01, "max_norm": 0.05
    }  # fmt: skip
    group["lr"] = 0.7
    group.update(eps=1e-2, weight_decay=0.2)
    group |= {"max_norm": 0.04, "note": 1}
    assert torch.equal(emb.hyper, made.hyper) and group["note"] == 1
    step(emb)
    step(made)
    assert not differing(tensors(emb), tensors(made))


def test_a_group_reads_what_the_module_was_told() -> None:
    emb, other = make(), make()
    (group,) = tbe.FusedOptimizer(emb).param_groups
    emb.set_learning_rate(0.3)
    views = (group["lr"], group.get("lr"), dict(group)["lr"], {**group}["lr"], dict(group.items())["lr"])
    assert views == (0.3,) * 5 and "0.3" in repr(group) and 0.3 in group.values()
    emb.load_state_dict(other.state_dict())
    assert group["lr"] == pytest.approx(0.1, rel=1e-7)
    emb.set_hyper(lr=0.3)
    emb.load_state_dict({**other.state_dict(), "hyper": emb.hyper.clone()})
    assert group["lr"] == 0.3, "the same fp32 number: the host's digits stay"


def test_hyper_parameters_are_no_autograd_event_and_seen_by_the_coming_backward() -> None:
    emb, made = decayed(), decayed()
    out = emb(**inputs())
    emb.set_hyper(lr=torch.tensor(0.7), eps=1e-2)
    made.set_hyper(lr=0.7, eps=1e-2)
    out.sum().backward()
    made(**inputs()).sum().backward()
    assert not differing(tensors(emb), tensors(made))


def test_a_rate_written_as_a_tensor_stays_the_live_one() -> None:
    emb = make()
    (group,) = tbe.FusedOptimizer(emb).param_groups
    group["lr"] = mine = torch.tensor(0.5, dtype=torch.float64)
    mine.fill_(9)
    assert group["lr"] == 0.5 and group["lr"].data_ptr() == emb.hyper.data_ptr()
    group["lr"].fill_(0.25)
    assert emb.hyper[0] == 0.25
    group["lr"] = 0.125
    assert type(group["lr"]) is float and emb.hyper[0] == 0.125


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"beta": 1}, "beta=1: RowwiseAdagrad has no such hyper-parameter, expected one of lr, eps, w"),
    "a second one": ({"lr": 0.5, "eps": -1}, "eps=-1: expected a finite number >= 0"),
    "NaN": ({"eps": math.nan}, "eps=nan: expected a finite number >= 0"),
    "text": ({"lr": "fast"}, "lr='fast': expected a number"),
    "two numbers": ({"lr": torch.ones(2)}, "lr is a tensor of shape [2], torch.float32: expected one floating"),
    "integers": ({"lr": torch.tensor(1)}, "lr is a tensor of shape [], torch.int64: expected one floating"),
    "NaN tensor": ({"lr": torch.tensor(math.nan)}, "lr=nan: expected a finite number >= 0"),
    "another kernel": ({"max_norm": 0.0}, "max_norm=0.0: limits_norm would become False, expected values that"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_hyper_parameters_are_refused_and_change_nothing(case: str) -> None:
    values, message = WRONG[case]
    emb = decayed()
    (group,) = tbe.FusedOptimizer(emb).param_groups
    before, seen = tensors(emb), group.copy()
    writes: tuple[Callable[[], None], ...] = (lambda: emb.set_hyper(**values),)
    if case != "unknown":  # any other key of a group is the caller's own
        writes += (lambda: group.update(values),)
    for write in writes:
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            write()
        assert not differing(before, tensors(emb)) and group == seen


def test_betas_are_checked_as_a_pair() -> None:
    emb = make(optimizer=tbe.Adam(lr=0.1))
    before = tensors(emb)
    for wrong, message in ((0.5, r"betas=0.5: expected a pair"), ((0.5, 1.0), "beta2=1.0: expected a number in")):
        with pytest.raises(ValueError, match=message):
            emb.set_hyper(betas=wrong)
        assert not differing(before, tensors(emb))
    emb.set_hyper(betas=(0.5, 0.75))
    assert emb.hyper[1:3].tolist() == [0.5, 0.75] and tbe.FusedOptimizer(emb).param_groups[0]["beta2"] == 0.75


def test_hyper_parameters_cannot_leave_a_group() -> None:
    (group,) = tbe.FusedOptimizer(make()).param_groups
    group["initial_lr"] = 1.0
    for remove in (lambda: group.pop("lr"), lambda: group.__delitem__("eps"), group.clear, group.popitem):
        with pytest.raises(ValueError, match="cannot be"):
            remove()
    assert group.pop("initial_lr") == 1.0 and "initial_lr" not in group and group["lr"] == 0.1


# --- the optimizer ------------------------------------------------------------------------------------------


def test_step_and_zero_grad_change_nothing_and_a_closure_runs_once() -> None:
    emb, alone = make(), make()
    optimizer = tbe.FusedOptimizer(emb)
    before = tensors(emb)
    optimizer.step()
    optimizer.zero_grad()
    assert not differing(before, tensors(emb))

    def closure() -> float:
        step(emb)
        return 3.0

    with torch.no_grad():
        assert optimizer.step(closure) == 3.0
    step(alone)
    assert not differing(tensors(emb), tensors(alone))


def test_several_modules_have_a_group_each() -> None:
    one, two = make(optimizer=tbe.SGD(lr=0.1)), make()
    optimizer = tbe.FusedOptimizer([one, two])
    assert ["eps" in group for group in optimizer.param_groups] == [False, True]
    optimizer.param_groups[1]["lr"] = 0.5
    assert (one.hyper[0].item(), two.hyper[0].item()) == (pytest.approx(0.1), 0.5)
    for wrong, message in (
        ([], "modules is empty"),
        ([one, one], r"modules\[1\] is given twice"),
        ([torch.nn.Linear(1, 1)], r"modules\[0\] is a Linear"),
    ):
        with pytest.raises(ValueError, match=message):
            tbe.FusedOptimizer(wrong)
    with pytest.raises(ValueError, match="add_param_group: expected every module when"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


def test_a_schedule_goes_on_after_save_and_load() -> None:
    def made() -> tuple[Any, Any, Any]:
        emb = make()
        optimizer = tbe.FusedOptimizer(emb)
        return emb, optimizer, schedulers.OneCycleLR(optimizer, 0.5, total_steps=9, cycle_momentum=False)

    def advance(parts: tuple[Any, Any, Any], seed: int) -> None:
        step(parts[0], seed)
        parts[1].step()
        parts[2].step()

    whole, again = made(), made()
    for seed in range(3):
        advance(whole, seed)
    for left, right in zip(whole, again, strict=True):
        right.load_state_dict(pickle.loads(pickle.dumps(left.state_dict())))
    assert again[1].param_groups[0]["lr"] == whole[1].param_groups[0]["lr"]
    for seed in range(3, 8):
        advance(whole, seed)
        advance(again, seed)
        assert not differing(tensors(whole[0]), tensors(again[0]))
        assert again[1].param_groups[0] == {**whole[1].param_groups[0], "params": [again[0].weights]}


def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    emb, two = make(), make(optimizer=tbe.SGD(lr=0.7))
    optimizer = tbe.FusedOptimizer([emb, two])
    state = optimizer.state_dict()
    before, seen = (tensors(emb), tensors(two)), [group.copy() for group in optimizer.param_groups]
    first, second = state["param_groups"]
    no_rate = {k: v for k, v in second.items() if k != "lr"}
    for groups, message in (
        ([first, no_rate], r"param_groups\[1\] has no lr: expected lr"),
        ([{**first, "lr": 0.9}, {**second, "lr": -1.0}], "lr=-1.0: expected a finite number >= 0"),
        ([first], "different number of parameter groups"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict({**state, "param_groups": groups})
        assert not differing(before[0], tensors(emb)) and not differing(before[1], tensors(two))
        assert [group.copy() for group in optimizer.param_groups] == seen


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
def test_a_copy_has_a_module_of_its_own(kind: str, defer: bool) -> None:
    emb = make()
    optimizer = tbe.FusedOptimizer(emb, defer=defer)
    optimizer.param_groups[0]["initial_lr"] = 2.0
    pair = (emb, optimizer)
    other, copied = copy.deepcopy(pair) if kind == "deepcopy" else pickle.loads(pickle.dumps(pair))
    (group,) = copied.param_groups
    assert group["params"][0] is other.weights and group["initial_lr"] == 2.0
    group["lr"] = 0.7
    assert (other.hyper[0].item(), emb.hyper[0].item()) == (pytest.approx(0.7), pytest.approx(0.1))
    optimizer.param_groups[0]["lr"] = 0.7
    for module, its in ((emb, optimizer), (other, copied)):
        before = tensors(module)
        step(module)
        assert bool(differing(before, tensors(module))) != defer
        its.step()
        assert differing(before, tensors(module)) == ["weights", "state 0"]
    assert not differing(tensors(emb), tensors(other))
