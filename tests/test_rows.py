"""Initialisers, ``reset_rows`` and ``tbe.resized``: values, seeds, kept bits, refusals that change nothing."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import TABLES, differing, inputs, make, step, tensors

import tbe
from tbe_core import reference, tolerances

BIG = (tbe.Table("a", 4000, 8), tbe.Table("b", 30, 3))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = pytest.mark.values
Place = tuple[str, str]


def seeded(device: str = "cpu", seed: int = 3) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


# --- initialisers -------------------------------------------------------------------------------------------

INITS: dict[str, tuple[Any, float, float, float, float]] = {
    "uniform": (tbe.init.uniform(-0.5, 1.5), 0.5, 2 / 12**0.5, -0.5, 1.5),
    "normal": (tbe.init.normal(0.3, mean=0.25), 0.25, 0.3, -1.75, 2.25),
    "truncated": (tbe.init.truncated_normal(1.0), 0.0, 0.8796, -2.0, 2.0),
    "one-sided": (tbe.init.truncated_normal(1.0, low=0.0, high=9.0), 0.7979, 0.6028, 0.0, 9.0),
}
"""Initialiser, mean, standard deviation, least and greatest value: those of the distributions."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", INITS)
def test_initialisers_have_their_distribution(name: str, dtype: torch.dtype, place: Place) -> None:
    init, mean, std, least, most = INITS[name]
    options = {"tables": BIG, "weights_dtype": dtype, "backend": place[0], "device": place[1]}
    made, again, other = (make(init=init, generator=seeded(place[1], seed), **options) for seed in (3, 3, 4))
    values = made.split_embedding_weights()[0].float()
    assert float(values.mean()) == pytest.approx(mean, abs=5 * std / 32000**0.5)
    assert float(values.std()) == pytest.approx(std, rel=0.03)
    assert float(values.min()) >= least and float(values.max()) <= most
    assert values.unique().numel() > 400
    assert not differing(tensors(made), tensors(again))
    assert differing(tensors(made), tensors(other)) == ["weights"]


def test_a_seed_gives_the_same_rows_of_a_large_table_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from tbe import pieces

    monkeypatch.setattr(pieces, "ELEMENTS", 100)
    values = torch.randn(4000, 8)
    made = make(tables=BIG, init={"a": tbe.init.from_tensor(values), "b": tbe.init.normal(5.0)})
    assert torch.equal(made.split_embedding_weights()[0], values)
    drawn = make(tables=BIG, init=tbe.init.uniform(0, 1)).split_embedding_weights()[0]
    assert drawn.unique(dim=0).shape[0] == 4000 and float(drawn.mean()) == pytest.approx(0.5, abs=0.01)


def test_tables_have_initialisers_of_their_own() -> None:
    emb = make(init={"geo": tbe.init.uniform(7, 8)})
    ad, geo = emb.split_embedding_weights()
    assert float(ad.abs().max()) < 0.1 < 7 <= float(geo.min()), "a table that is left out: the default"
    before = tensors(emb)
    assert tbe.initialise(emb, {"ad": tbe.init.uniform(3, 4)}) is emb
    assert torch.equal(geo, before["weights"][-40:].view(5, 8)) and float(ad.min()) >= 3
    tbe.initialise(emb, tbe.init.normal(0.0, mean=2.0))
    assert ad.unique().tolist() == geo.unique().tolist() == [2.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_from_a_tensor_of_another_dtype(dtype: torch.dtype, place: Place) -> None:
    values = torch.randn(10, 4, dtype=torch.float64)
    emb = make(weights_dtype=dtype, init={"ad": tbe.init.from_tensor(values)}, backend=place[0], device=place[1])
    assert torch.equal(emb.split_embedding_weights()[0].cpu(), values.to(dtype))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "order": (lambda: tbe.init.uniform(1, 0), "low=1 above high=0: expected low <= high"),
    "NaN": (lambda: tbe.init.uniform(float("nan"), 0), "low=nan: expected a finite number"),
    "std": (lambda: tbe.init.normal(-1), "std=-1: expected a number >= 0"),
    "no width": (lambda: tbe.init.truncated_normal(0), "std=0: expected a number > 0"),
    "empty": (lambda: tbe.init.truncated_normal(1, low=1, high=1), "low=1, high=1: expected low < high"),
    "far": (
        lambda: tbe.init.truncated_normal(1, low=5, high=6),
        "low=5, high=6: expected an interval that meets",
    ),
    "integers": (
        lambda: tbe.init.from_tensor(torch.ones(3, dtype=torch.int64)),
        "values is torch.int64: expected",
    ),
    "list": (lambda: tbe.init.from_tensor([1.0]), "values is list: expected"),  # type: ignore[arg-type]
    "table": (
        lambda: make(init={"city": tbe.init.normal()}),
        "init names table 'city': expected one of 'ad', 'geo'",
    ),
    "kind": (lambda: make(init={"ad": 3}), "init of table 'ad' is 3: expected one of tbe.init"),
    "shape": (
        lambda: make(init={"ad": tbe.init.from_tensor(torch.ones(5, 4))}),
        "init of table 'ad' is a tensor of shape [5, 4]: expected [10, 4]",
    ),
    "range": (
        lambda: make(weights_dtype=torch.float16, init={"ad": tbe.init.from_tensor(torch.full((10, 4), 1e5))}),
        "init of table 'ad' has values beyond the range of torch.float16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_initialisers_are_refused(case: str) -> None:
    wrong, message = REFUSED[case]
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        wrong()


def test_initialise_changes_nothing_when_one_table_is_refused() -> None:
    emb = make()
    before = tensors(emb)
    with pytest.raises(ValueError, match="'geo' is a tensor of shape"):
        tbe.initialise(emb, {"ad": tbe.init.normal(), "geo": tbe.init.from_tensor(torch.ones(1))})
    assert not differing(before, tensors(emb))


# --- reset --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_reset_rows_start_anew_and_no_others(dtype: torch.dtype, place: Place) -> None:
    options = {"weights_dtype": dtype, "backend": place[0], "device": place[1]}
    emb = make(init=tbe.init.uniform(1, 2), **options)
    call = {k: v.to(place[1]) for k, v in inputs().items()}
    for _ in range(3):
        emb(**call).sum().backward()
    before = (
        [w.clone() for w in emb.split_embedding_weights()],
        [s["sum"].clone() for s in emb.split_optimizer_states()],
    )
    emb.reset_rows("ad", [9, 1, 9, 1], generator=seeded(place[1]))
    others = [0, 2, 3, 4, 5, 6, 7, 8]
    (ad, geo), (ad_sum, geo_sum) = emb.split_embedding_weights(), (s["sum"] for s in emb.split_optimizer_states())
    assert before[1][0][[1, 2, 9]].min() > 0, "the rows were trained"
    assert ad_sum[[1, 9]].tolist() == [0, 0] and ad_sum[2] == before[1][0][2]
    assert (
        torch.equal(ad[others], before[0][0][others])
        and not (ad[[1, 9]] == before[0][0][[1, 9]]).all(dim=1).any()
    )
    assert float(ad[[1, 9]].min()) >= 1 and float(ad[[1, 9]].max()) <= 2, "drawn as the table was"
    assert torch.equal(geo, before[0][1]) and torch.equal(geo_sum, before[1][1])
    again = copy.deepcopy(emb)
    again.reset_rows(0, torch.tensor([1, 9], dtype=torch.int32), generator=seeded(place[1]))
    assert not differing(tensors(emb), tensors(again)), "same seed, same rows, however they are named"
    judge = reference.Reference.of(emb.spec, emb.split_embedding_weights(), emb.split_optimizer_states())
    emb(**call).sum().backward()
    judge.backward_update(torch.ones(2, 12), *(v.cpu() for v in call.values()), None, emb.hyper.tolist())
    limit = tolerances.weights("rowwise_adagrad", dtype)
    for table, expected in zip(emb.split_embedding_weights(), judge.tables, strict=True):
        torch.testing.assert_close(table.double().cpu(), expected, rtol=limit, atol=limit * 1e-2)


OPTIMIZERS = [tbe.SGD(), tbe.Adam(), tbe.PartialRowwiseAdam(), tbe.LARS()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.NAME)
def test_reset_clears_every_state_of_a_row_and_no_other(optimizer: tbe.Optimizer) -> None:
    emb = make(optimizer=optimizer)
    for seed in range(3):
        step(emb, seed, indices=torch.tensor([1, 2, 9, 0, 0]))
    before = [{k: v.clone() for k, v in state.items()} for state in emb.split_optimizer_states()]
    emb.reset_rows(0, [9, 2])
    for name, state in emb.split_optimizer_states()[0].items():
        assert before[0][name][2].any() and before[0][name][9].any(), "the rows had state"
        assert not state[[2, 9]].any() and torch.equal(state[[0, 1]], before[0][name][[0, 1]])
    assert all(torch.equal(v, before[1][k]) for k, v in emb.split_optimizer_states()[1].items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.NAME)
def test_growth_keeps_every_state_and_the_count_of_steps(optimizer: tbe.Optimizer) -> None:
    options: dict[str, Any] = {"weights_dtype": torch.bfloat16, "stochastic_rounding": True, "rounding_seed": 9}
    emb = make(optimizer=optimizer, **options)
    for seed in range(2):
        step(emb, seed)
    grown = tbe.resized(emb, {"ad": 13, "geo": 7})
    assert grown.counter.tolist() == [2, 9]
    for name, old in emb._named_views().items():
        new = grown._named_views()[name]
        kept = new[: old.shape[0]] if old.dim() else new
        assert torch.equal(old, kept), name
        assert "weight" in name or not old.dim() or not new[old.shape[0] :].any(), name
    # A grown table begins elsewhere in storage, and rounding is keyed by the row: fp32 tables go on bit for bit.
    plain = make(optimizer=optimizer)
    step(plain)
    other = tbe.resized(plain, {"ad": 13, "geo": 7})
    for seed in (3, 4):
        assert torch.equal(step(plain, seed), step(other, seed))
    assert torch.equal(plain.split_embedding_weights()[0], other.split_embedding_weights()[0][:10])


def test_reset_takes_an_initialiser_and_rows_of_a_tensor() -> None:
    emb, values = make(), torch.arange(40.0).view(10, 4)
    emb.reset_rows("ad", [3, 7], tbe.init.from_tensor(values))
    assert torch.equal(emb.split_embedding_weights()[0][[3, 7]], values[[3, 7]])
    emb.reset_rows("ad", [3], tbe.init.normal(0.0, mean=4.0))
    assert emb.split_embedding_weights()[0][3].tolist() == [4.0] * 4
    before = tensors(emb)
    for none in ([], torch.tensor([], dtype=torch.int64)):
        emb.reset_rows("ad", none)
    assert not differing(before, tensors(emb))


def test_wrong_resets_change_nothing() -> None:
    emb = make(init={"geo": tbe.init.from_tensor(torch.ones(5, 8))})
    step(emb)
    before = tensors(emb)
    wrong: tuple[tuple[Any, Any, str], ...] = (
        ("city", [1], "table='city': expected a number below 2 or one of 'ad', 'geo'"),
        (2, [1], "table=2: expected a number below 2"),
        ("ad", [1, 10, -1], "ids[1]=10: expected a row of table 'ad', in [0, 10); 2 wrong of 3"),
        ("ad", [1.5], "ids is [1] torch.float32: expected one dimension of int32 or int64"),
        ("ad", [[1]], "ids is [1, 1] torch.int64: expected one dimension"),
        ("geo", [1], "init=None: table 'geo' was made from a tensor, expected an initialiser"),
    )
    for table, ids, message in wrong:
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            emb.reset_rows(table, ids)
        assert not differing(before, tensors(emb))
    with pytest.raises(ValueError, match="shape"):
        emb.reset_rows("ad", [1], tbe.init.from_tensor(torch.ones(3, 4)))
    assert not differing(before, tensors(emb))


# --- growth -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_resized_module_keeps_old_rows_and_trains_like_a_large_one(dtype: torch.dtype, place: Place) -> None:
    options: dict[str, Any] = {"weights_dtype": dtype, "backend": place[0], "device": place[1]}
    emb = make(feature_table_map=[1, 0, 1], init=tbe.init.uniform(1, 2), **options)
    ends = torch.tensor([0, 1, 2, 3], device=place[1])
    emb(torch.tensor([4, 9, 0], device=place[1]), ends).sum().backward()
    emb.set_hyper(lr=0.3)
    before = tensors(emb)
    grown = tbe.resized(emb, {"geo": 7, "ad": 10}, generator=seeded(place[1]))
    assert not differing(before, tensors(emb)) and grown.spec.layout.tables[1].rows == 7
    assert grown.plan.backend == emb.plan.backend and torch.equal(grown.hyper, emb.hyper)
    for old, new in zip(emb._named_views().items(), grown._named_views().items(), strict=True):
        assert old[0] == new[0]
        assert torch.equal(old[1], new[1][: old[1].shape[0]]), old[0]
    geo, state = grown.split_embedding_weights()[1], grown.split_optimizer_states()[1]["sum"]
    assert float(geo[5:].min()) >= 1 and float(geo[5:].max()) <= 2 and state[5:].tolist() == [0, 0]
    again = tbe.resized(emb, {"geo": 7}, generator=seeded(place[1]))
    assert not differing(tensors(grown), tensors(again))
    ids = torch.tensor([6, 9, 0], device=place[1])
    judge = reference.Reference.of(grown.spec, grown.split_embedding_weights(), grown.split_optimizer_states())
    grown(ids, ends).sum().backward()
    judge.backward_update(torch.ones(1, 20), ids.cpu(), ends.cpu(), None, grown.hyper.tolist())
    limit = tolerances.weights("rowwise_adagrad", dtype)
    for table, expected in zip(grown.split_embedding_weights(), judge.tables, strict=True):
        torch.testing.assert_close(table.double().cpu(), expected, rtol=limit, atol=limit * 1e-2)
    assert pickle.loads(pickle.dumps(grown)).spec == grown.spec


def test_growth_keeps_what_the_module_was_told() -> None:
    emb = make(bounds_check="error", init={"ad": tbe.init.from_tensor(torch.ones(10, 4))}).eval()
    emb.requires_grad_(False)
    with pytest.raises(ValueError, match=r"init=None: table 'ad' was made from a tensor"):
        tbe.resized(emb, {"ad": 11})
    grown = tbe.resized(emb, {"ad": 11}, init={"ad": tbe.init.uniform(2, 3)})
    assert not grown.training and not grown.hook.requires_grad and grown.spec.bounds_check == "error"
    assert float(grown.split_embedding_weights()[0][10].min()) >= 2
    values = torch.arange(48.0).view(12, 4)
    grown = tbe.resized(emb, {"ad": 12}, init={"ad": tbe.init.from_tensor(values)})
    assert torch.equal(grown.split_embedding_weights()[0], torch.cat([torch.ones(10, 4), values[10:]]))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"geo": 4}, "rows['geo']=4: expected an integer >= 5, its rows now"),
        ({"geo": 7.5}, "rows['geo']=7.5: expected an integer >= 5"),
        ({"city": 9}, "table='city': expected a number below 2 or one of 'ad', 'geo'"),
    ],
)
def test_wrong_sizes_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        tbe.resized(make(tables=TABLES), rows)
