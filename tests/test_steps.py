"""Steps that divide by what may be nothing, and stochastic rounding: every optimizer on every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import INTERPRETED
from judge import same_bits
from problems import Trial, from_runs, offsets_of, run_and_compare, step, step_and_compare
from test_values import TIERS

import tbe
from tbe_core import Table
from tbe_core.optimizers import REGISTRY
from tbe_core.rounding import random_words, round_stochastically

Place = tuple[str, str]
HALVES = (torch.float16, torch.bfloat16)
ALL = [kind(lr=0.5) for kind in REGISTRY.values()] + [
    kind(lr=0.5, weight_decay=0.1) for kind in (tbe.Adam, tbe.LAMB, tbe.LARS)
]
each_optimizer = pytest.mark.parametrize("optimizer", ALL, ids=str)


@pytest.mark.values
@each_optimizer
@pytest.mark.parametrize("scale", (1e-8, 1.0, 1e4))
def test_rows_of_zeros_and_gradients_of_any_size(place: Place, optimizer: tbe.Optimizer, scale: float) -> None:
    """Zero rows and others, from fresh state, two steps: never NaN, and a zero row learns."""
    trial = from_runs([3, 1, 20, 2, 5], bags=4, dim=12, optimizer=optimizer, fresh_state=True)
    emb, call = trial.module(*place), trial.call()
    with torch.no_grad():
        emb.split_embedding_weights()[0][:3] = 0
    for _ in range(2):
        step_and_compare(emb, replace(call, grad=call.grad * scale))
    table = emb.split_embedding_weights()[0]
    assert table.isfinite().all()
    assert (table[:3] != 0).any(dim=1).all(), "a row of zeros does not learn"


@pytest.mark.values
@each_optimizer
def test_a_gradient_of_zero(place: Place, optimizer: tbe.Optimizer) -> None:
    trial = from_runs([3, 1, 20], bags=4, dim=12, optimizer=optimizer, fresh_state=True)
    emb, call = trial.module(*place), trial.call()
    with torch.no_grad():
        emb.split_embedding_weights()[0][0] = 0
    step_and_compare(emb, replace(call, grad=torch.zeros_like(call.grad)))
    assert emb.split_embedding_weights()[0].isfinite().all()


@pytest.mark.values
@each_optimizer
def test_an_infinite_gradient_stays_in_its_bag(place: Place, optimizer: tbe.Optimizer) -> None:
    ids = torch.tensor([0, 1, 1, 2, 3, 4, 4, 5, 0])
    trial = Trial((Table("few", 7, 20),), (0,), ids, offsets_of([3, 2, 4, 0]), None, "sum", optimizer)
    call = trial.call()
    call.grad[1, 5] = float("inf")
    for config in (None, *TIERS.values()):
        emb = trial.module(*place)
        step(emb, call, config=config)
        table = emb.split_embedding_weights()[0]
        assert table[[0, 1, 4, 5, 6]].isfinite().all()
        assert not table[[2, 3]].isfinite().all(dim=1).any()


@pytest.mark.values
@pytest.mark.case("adam_resumes")
@pytest.mark.parametrize("optimizer", [o for o in ALL if o.STATE], ids=str)
def test_save_load_step_equals_never_having_stopped(place: Place, optimizer: tbe.Optimizer) -> None:
    """Mixed dims do not disturb each other's state; the count of steps is saved with it."""
    tables = tuple(Table(f"d{dim}", 9, dim) for dim in (16, 8, 64))
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 9, (30,), generator=generator)
    trial = Trial(
        tables, (2, 0, 1), ids, offsets_of([5] * 6), None, "sum", optimizer, torch.bfloat16,
        fresh_state=True, stochastic_rounding=True,
    )  # fmt: skip
    through, stopped = trial.module(*place), trial.module(*place)
    times = 2 if INTERPRETED else 4
    for number in range(times):
        call = replace(trial, seed=number).call()
        step_and_compare(through, call)
        fresh = replace(trial, seed=99).module(*place)
        fresh.load_state_dict(stopped.state_dict())
        stopped = fresh
        step_and_compare(stopped, call)
    assert through.state_dict()["step"] == times
    for name, mine in through.state_dict().items():
        assert torch.equal(mine, stopped.state_dict()[name]), name


# --- stochastic rounding ------------------------------------------------------------------------------------


@pytest.mark.values
@pytest.mark.case("stochastic_rounding")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounding_depends_on_the_seed_and_the_step_alone(place: Place, dtype: torch.dtype) -> None:
    """The same seed gives the same bits whatever the tier; another seed or step gives others."""
    trial = from_runs([70, 3, 40, 1, 17], 7, 24, weights_dtype=dtype, stochastic_rounding=True, fresh_state=True)
    # Whole numbers: every order of additions has the same sum.
    call = replace(trial.call(), grad=trial.call().grad.mul(8).round())
    found = []
    for config in (None, *TIERS.values()):
        emb = trial.module(*place)
        step(emb, call, config=config)
        found.append(emb.weights.detach().cpu())
    assert all(same_bits(found[0], other) for other in found[1:])
    seeded, later = trial.module(*place), trial.module(*place)
    assert seeded.counter is not None and later.counter is not None
    seeded.counter[1], later.counter[0] = 12345, 1
    for emb in (seeded, later):
        step(emb, call)
        share = (emb.weights.detach().cpu() != found[0]).double().mean()
        assert 0.2 < share < 0.8, "about half of what is rounded falls to the other side"


@pytest.mark.values
@pytest.mark.case("stochastic_rounding")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounding_has_no_bias(place: Place, dtype: torch.dtype) -> None:
    """Steps of a fifth of a quantum: to nearest they are all lost, at random their mean is kept."""
    steps, rows, dim = (8, 16, 64) if INTERPRETED else (40, 64, 64)
    quantum = torch.finfo(dtype).eps  # of numbers in [1, 2)
    trial = Trial(
        (Table("t", rows, dim),), (0,), torch.arange(rows), offsets_of([1] * rows), None, "sum",
        tbe.SGD(lr=1.0), dtype, stochastic_rounding=True,
    )  # fmt: skip
    emb = trial.module(*place)
    with torch.no_grad():
        emb.weights.fill_(1.5)
    call = replace(trial.call(), grad=torch.full((rows, dim), -quantum / 5))
    for _ in range(steps):
        step(emb, call)
    moved = (emb.split_embedding_weights()[0].double() - 1.5) / quantum
    # A step moves by one quantum with probability 1/5: a binomial number of quanta.
    variance, count = steps * 0.16, rows * dim
    assert abs(float(moved.mean()) - steps / 5) < 5 * (variance / count) ** 0.5
    assert abs(float(moved.var()) - variance) < 6 * variance * (2 / count) ** 0.5
    plain = replace(trial, stochastic_rounding=False).module(*place)
    with torch.no_grad():
        plain.weights.fill_(1.5)
    step(plain, call)
    assert (plain.split_embedding_weights()[0] == 1.5).all()


@pytest.mark.values
@pytest.mark.case("stochastic_rounding")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@each_optimizer
def test_every_optimizer_rounds_to_a_neighbour(
    place: Place, dtype: torch.dtype, optimizer: tbe.Optimizer
) -> None:
    trial = from_runs([1, 2, 30, 7], 6, 24, optimizer=optimizer, weights_dtype=dtype, stochastic_rounding=True)
    run_and_compare(trial, *place)


@pytest.mark.case("stochastic_rounding")
def test_fp32_tables_are_never_rounded() -> None:
    with pytest.raises(ValueError, match="stochastic_rounding=True with weights_dtype float32: expected float16"):
        tbe.TableBatchedEmbeddingBags([Table("t", 3, 2)], optimizer=tbe.SGD(), stochastic_rounding=True)


@pytest.mark.parametrize("seed", (-1, 2**63, True, 1.0))
def test_a_seed_is_a_whole_number(seed: object) -> None:
    with pytest.raises(ValueError, match=r"rounding_seed=.*: expected an integer in \[0, 2\*\*63\)"):
        tbe.TableBatchedEmbeddingBags([Table("t", 3, 2)], optimizer=tbe.SGD(), rounding_seed=seed)  # type: ignore[arg-type]


def _draw(shape: tuple[int, int], step: int = 1, seed: int = 0) -> torch.Tensor:
    return random_words(torch.tensor(seed), torch.tensor(step), torch.arange(shape[0]), shape[1])


@pytest.mark.case("stochastic_rounding")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "value", (1.0009, -1.0009, 3e-5, -5.4321e-6, 2.1e-8, 70000.0, 65504.0, 3.1e38, 1e-39, 0.0, -0.0)
)
def test_every_number_goes_to_its_neighbours_in_proportion(dtype: torch.dtype, value: float) -> None:
    count = 1 << 18
    w = torch.full((count // 64, 64), value)
    found = round_stochastically(w, dtype, _draw((count // 64, 64)))
    exact = float(w[0, 0])
    if abs(exact) > torch.finfo(dtype).max:
        assert (found == torch.tensor(exact).to(dtype)).all()
        return
    seen = found.double().unique()
    assert len(seen) <= 2
    low, high = float(seen.min()), float(seen.max())
    if len(seen) == 1:
        assert abs(low - exact) <= 1e-6 * 2.0**-24, "one of the neighbours all but certainly"
    else:
        assert low <= exact <= high
        bits = torch.tensor([low, high]).to(dtype).view(torch.int16)
        assert abs(int(bits[0]) - int(bits[1])) == 1, "neighbours on the dtype's grid"
        share = float((found.double() == high).double().mean())
        expected = (exact - low) / (high - low)
        assert abs(share - expected) < 5 * (0.25 / count) ** 0.5 + 1e-6


@pytest.mark.parametrize("value", (float("inf"), float("-inf"), float("nan")))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_what_is_not_finite_stays(dtype: torch.dtype, value: float) -> None:
    w = torch.full((8, 8), value)
    found = round_stochastically(w, dtype, _draw((8, 8)))
    torch.testing.assert_close(found.float(), w, rtol=0, atol=0, equal_nan=True)


def test_random_words_are_uniform_and_unrelated() -> None:
    """Every bit is set half of the time; neighbours in row, column, step and seed share no bits but by chance."""
    first = _draw((512, 512))
    count = first.numel()
    limit = 6 * 0.5 / count**0.5
    bits = torch.stack([(first >> bit) & 1 for bit in range(32)]).double()
    assert ((bits.mean(dim=(1, 2)) - 0.5).abs() < limit).all()
    relatives = {
        "row": first.roll(1, 0), "column": first.roll(1, 1), "step": _draw((512, 512), step=2),
        "seed": _draw((512, 512), seed=1),
    }  # fmt: skip
    for name, other in relatives.items():
        same = torch.stack([((first ^ other) >> bit) & 1 for bit in range(32)]).double()
        assert ((same.mean(dim=(1, 2)) - 0.5).abs() < limit).all(), name
    # 256 bins of the highest byte: chi-squared of 255 degrees of freedom, six standard deviations.
    bins = torch.bincount((first >> 24).flatten(), minlength=256).double()
    chi = float(((bins - count / 256) ** 2 / (count / 256)).sum())
    assert abs(chi - 255) < 6 * (2 * 255) ** 0.5
