"""Bad input: every refusal names the argument, the value and what was expected, and changes nothing."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import helpers
import pytest
import torch
from helpers import INDICES, OFFSETS, TABLES, differing, inputs, make, step, tensors

import tbe
from tbe import BadLookupWarning, Table

IDS, ENDS = torch.tensor(INDICES), torch.tensor(OFFSETS)
EVERY_OTHER = torch.arange(10)[::2]
META = torch.device("meta")

SHAPES = {
    "float ids": ({"indices": IDS.float()}, "indices has dtype torch.float32: expected one of int32, int64"),
    "int16 ids": ({"indices": IDS.short()}, "indices has dtype torch.int16: expected one of int32, int64"),
    "bool ids": ({"indices": IDS > 1}, "indices has dtype torch.bool: expected one of int32, int64"),
    "list of ids": ({"indices": list(INDICES)}, "indices=list: expected a torch.Tensor"),
    "no ids": ({"indices": None}, "indices=NoneType: expected a torch.Tensor"),
    "ids elsewhere": ({"indices": IDS.to(META)}, "indices is on meta: expected cpu, where the tables are"),
    "matrix of ids": ({"indices": IDS[None]}, "indices has shape [1, 5]: expected one dimension"),
    "scalar id": ({"indices": IDS[0]}, "indices has shape []: expected one dimension"),
    "strided ids": ({"indices": EVERY_OTHER}, "indices has stride (2,): expected a contiguous tensor"),
    "float offsets": (
        {"offsets": ENDS.double()},
        "offsets has dtype torch.float64: expected one of int32, int64",
    ),
    "list of offsets": ({"offsets": list(OFFSETS)}, "offsets=list: expected a torch.Tensor"),
    "offsets elsewhere": ({"offsets": ENDS.to(META)}, "offsets is on meta: expected cpu, where the tables are"),
    "matrix of offsets": ({"offsets": ENDS[None]}, "offsets has shape [1, 5]: expected one dimension"),
    "strided offsets": ({"offsets": EVERY_OTHER}, "offsets has stride (2,): expected a contiguous tensor"),
    "one offset too few": (
        {"offsets": ENDS[:-1].clone()},
        "offsets has length 4: expected T*B+1 with T=2 features, feature-major",
    ),
    "no offsets": ({"offsets": ENDS[:0]}, "offsets has length 0: expected T*B+1 with T=2 features"),
    "short weights": (
        {"per_sample_weights": torch.ones(4)},
        "per_sample_weights has length 4: expected 5, one for every index",
    ),
    "long weights": (
        {"per_sample_weights": torch.ones(6)},
        "per_sample_weights has length 6: expected 5, one for every index",
    ),
    "integer weights": (
        {"per_sample_weights": torch.ones(5, dtype=torch.int64)},
        "per_sample_weights has dtype torch.int64: expected one of float32, float16, bfloat16",
    ),
    "fp64 weights": (
        {"per_sample_weights": torch.ones(5, dtype=torch.float64)},
        "per_sample_weights has dtype torch.float64: expected one of float32, float16, bfloat16",
    ),
    "weights elsewhere": (
        {"per_sample_weights": torch.ones(5, device=META)},
        "per_sample_weights is on meta: expected cpu, where the tables are",
    ),
    "matrix of weights": (
        {"per_sample_weights": torch.ones(5, 1)},
        "per_sample_weights has shape [5, 1]: expected one dimension",
    ),
    "strided weights": (
        {"per_sample_weights": torch.ones(10)[::2]},
        "per_sample_weights has stride (2,): expected a contiguous tensor",
    ),
    "scalar weight": ({"per_sample_weights": 2.0}, "per_sample_weights=float: expected a torch.Tensor"),
}

OFFSET_VALUES = {
    "late start": ([1, 2, 3, 3, 5], "offsets[0]=1: expected 0"),
    "negative start": ([-1, 2, 3, 3, 5], "offsets[0]=-1: expected 0"),
    "decreasing": (
        [0, 2, 1, 3, 5],
        "offsets[2]=1 after 2 (feature 0, bag 1): expected offsets that never decrease",
    ),
    "past the end inside": (
        [0, 2, 3, 9, 5],
        "offsets[4]=5 after 9 (feature 1, bag 1): expected offsets that never decrease",
    ),
    "past the end": ([0, 2, 3, 3, 6], "offsets[-1]=6: expected 5, the length of indices"),
    "trailing ids": ([0, 2, 3, 3, 4], "offsets[-1]=4: expected 5, the length of indices"),
}


def assert_refused(emb: tbe.TableBatchedEmbeddingBags, call: dict[str, Any], message: str) -> None:
    """``call`` raises, starting with ``message``; neither tables nor the caller's tensors changed."""
    before = tensors(emb)
    copies = {k: v.clone() for k, v in call.items() if isinstance(v, torch.Tensor) and v.device != META}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        emb(**call)
    assert not differing(before, tensors(emb))
    assert not differing(copies, {k: call[k] for k in copies})
    # The refused call leaves nothing behind: the next step is the one of a module that never saw it.
    fresh = make(bounds_check=emb.spec.bounds_check, pooling=emb.spec.pooling)
    assert torch.equal(step(emb), step(fresh))
    assert not differing(tensors(emb), tensors(fresh))


@pytest.mark.parametrize("mode", ["error", "warn", "ignore", "none"])
@pytest.mark.parametrize("case", SHAPES)
def test_wrong_tensors_are_refused_in_every_mode(case: str, mode: str) -> None:
    changes, message = SHAPES[case]
    assert_refused(make(bounds_check=mode), inputs(**changes), message)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mode", ["error", "warn", "ignore"])
@pytest.mark.parametrize("case", OFFSET_VALUES)
def test_wrong_offsets_are_refused(case: str, mode: str, dtype: torch.dtype) -> None:
    values, message = OFFSET_VALUES[case]
    assert_refused(make(bounds_check=mode), inputs(offsets=torch.tensor(values, dtype=dtype)), message)


def test_offsets_of_no_bags_must_still_be_right() -> None:
    call = {"indices": IDS, "offsets": torch.tensor([0])}
    assert_refused(make(), call, "offsets[-1]=0: expected 5, the length of indices")


def test_weights_without_pooling_are_refused() -> None:
    emb = make(tables=TABLES[:1], pooling="none")
    with pytest.raises(ValueError, match="per_sample_weights with pooling='none': expected None"):
        emb(IDS, torch.tensor([0, 2, 5]), torch.ones(5))


# --- ids outside their table --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "value", "where"),
    [
        (2, 10, "(feature 0, table 'ad', bag 1): expected an id in [0, 10)"),
        (4, 5, "(feature 1, table 'geo', bag 1): expected an id in [0, 5)"),
        (0, -2, "(feature 0, table 'ad', bag 0): expected an id in [0, 10)"),
        (3, 2**31 - 1, "(feature 1, table 'geo', bag 1): expected an id in [0, 5)"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_error_mode_names_the_first_bad_id(position: int, value: int, where: str, dtype: torch.dtype) -> None:
    ids = IDS.to(dtype, copy=True)
    ids[position] = value
    message = f"indices[{position}]={value} {where}, or -1 for a pruned one; 1 bad of 5"
    assert_refused(make(bounds_check="error"), inputs(indices=ids), message)


def test_error_mode_counts_the_bad_ids_and_follows_the_table_of_a_shared_feature() -> None:
    emb = make(bounds_check="error", feature_table_map=[1, 0, 1])
    ids, ends = torch.tensor([4, 9, 5, 5]), torch.tensor([0, 1, 2, 4])
    with pytest.raises(ValueError, match=r"indices\[2\]=5 \(feature 2, table 'geo', bag 0\).*2 bad of 4"):
        emb(ids, ends)


BAD = torch.tensor([1, 10, -7, 0, 5])
"""As ``IDS`` with three bad ids: 10 is just past table "ad", 5 just past "geo"."""
PRUNED = torch.tensor([1, -1, -1, 0, -1])


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", ["warn", "ignore"])
def test_bad_ids_contribute_and_train_nothing(mode: str, weighted: bool, pooling: str) -> None:
    """Bit for bit what pruned ids in their place do; the caller's ids stay."""
    weights = torch.linspace(0.5, 2, 5) if weighted else None
    emb, pruned = make(bounds_check=mode, pooling=pooling), make(bounds_check=mode, pooling=pooling)
    before, ids = [w.clone() for w in emb.split_embedding_weights()], BAD.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if mode == "warn" else "error")
        got = step(emb, indices=ids, per_sample_weights=weights)
        expected = step(pruned, indices=PRUNED, per_sample_weights=weights)
    assert torch.equal(ids, BAD)
    assert torch.equal(got, expected)
    assert differing(tensors(emb), tensors(pruned)) == (["bad"] if mode == "warn" else [])
    touched = [
        [r for r, (old, new) in enumerate(zip(was, now, strict=True)) if not torch.equal(old, new)]
        for was, now in zip(before, emb.split_embedding_weights(), strict=True)
    ]
    assert touched == [[1], [0]]


def test_warn_mode_warns_once_with_counts() -> None:
    emb = make()
    with pytest.warns(BadLookupWarning) as caught:
        step(emb, indices=BAD)
    assert [str(w.message).partition(";")[0] for w in caught] == [
        "3 ids outside their table were looked up (3 so far)"
    ]
    assert caught[0].filename == helpers.__file__, "it must point at the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(emb)
        emb.flush()
    ids = IDS.clone()
    ids[4] = 77
    with pytest.warns(BadLookupWarning, match=r"^1 ids outside their table were looked up \(4 so far\)"):
        step(emb, indices=ids)


@pytest.mark.parametrize("mode", ["error", "warn", "ignore", "none"])
def test_pruned_ids_are_silent_in_every_mode(mode: str) -> None:
    emb = make(bounds_check=mode)
    before = emb.weights.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = step(emb, indices=torch.full((5,), -1))
    assert torch.equal(out, torch.zeros(2, 12)) and torch.equal(before, emb.weights)


# --- the constructor ----------------------------------------------------------------------------------------

ARGUMENTS: dict[str, tuple[Any, str]] = {
    "dim 0": (lambda: Table("a", 4, 0), "dim=0 of table 'a': expected an integer >= 1"),
    "rows 0": (lambda: Table("a", 0, 4), "rows=0 of table 'a': expected an integer >= 1"),
    "negative rows": (lambda: Table("a", -3, 4), "rows=-3 of table 'a': expected an integer >= 1"),
    "float dim": (lambda: Table("a", 4, 2.0), "dim=2.0 of table 'a': expected an integer >= 1"),  # type: ignore[arg-type]
    "bool rows": (lambda: Table("a", True, 4), "rows=True of table 'a': expected an integer >= 1"),
    "no name": (lambda: Table("", 4, 4), "name='': expected a non-empty string without dots"),
    "dotted name": (lambda: Table("a.b", 4, 4), "name='a.b': expected a non-empty string without dots"),
    "no tables": (lambda: make(tables=[]), "tables=[]: expected a non-empty sequence of Table"),
    "one bare table": (
        lambda: make(tables=TABLES[0]),
        "tables=Table(name='ad', rows=10, dim=4): expected a non-",
    ),
    "a tuple": (lambda: make(tables=[("a", 4, 4)]), "tables[0]=('a', 4, 4): expected a Table(name, rows, dim)"),
    "same names": (
        lambda: make(tables=[TABLES[0], TABLES[0]]),
        "tables: the name 'ad' is used twice, expected distinct names",
    ),
    "map past the tables": (
        lambda: make(feature_table_map=[0, 2]),
        "feature_table_map[1]=2: expected a table number in [0, 2)",
    ),
    "negative map": (
        lambda: make(feature_table_map=[-1]),
        "feature_table_map[0]=-1: expected a table number in [0, 2)",
    ),
    "float map": (
        lambda: make(feature_table_map=[0, 1.0]),
        "feature_table_map[1]=1.0: expected a table number in [0, 2)",
    ),
    "empty map": (lambda: make(feature_table_map=[]), "feature_table_map is empty: expected a table number"),
    "number as map": (
        lambda: make(feature_table_map=1),
        "feature_table_map=1: expected a sequence of table numb",
    ),
    "pooling": (lambda: make(pooling="max"), "pooling='max': expected one of sum, mean, none"),
    "mixed dims": (
        lambda: make(pooling="none"),
        "pooling='none' with dims [4, 8]: expected one dim for all features",
    ),
    "bounds": (
        lambda: make(bounds_check="loud"),
        "bounds_check='loud': expected one of error, warn, ignore, none",
    ),
    "weights dtype": (
        lambda: make(weights_dtype=torch.int8),
        "weights_dtype=torch.int8: expected one of float32, float16, bfloat16",
    ),
    "output dtype": (
        lambda: make(output_dtype=torch.float64),
        "output_dtype=torch.float64: expected one of float32, float16, bfloat16",
    ),
    "optimizer": (
        lambda: make(optimizer="sgd"),
        "optimizer='sgd': expected an optimizer such as tbe.SGD(lr=0.01)",
    ),
    "torch optimizer": (
        lambda: make(optimizer=torch.optim.SGD),
        "optimizer=<class 'torch.optim.sgd.SGD'>: expect",
    ),
    "NaN lr": (lambda: tbe.SGD(lr=math.nan), "lr=nan: expected a finite number"),
    "infinite lr": (lambda: tbe.RowwiseAdagrad(lr=math.inf), "lr=inf: expected a finite number"),
    "negative lr": (lambda: tbe.SGD(lr=-0.1), "lr=-0.1: expected a number >= 0"),
    "text lr": (lambda: tbe.SGD(lr="0.1"), "lr='0.1': expected a finite number"),  # type: ignore[arg-type]
    "bool lr": (lambda: tbe.SGD(lr=True), "lr=True: expected a finite number"),
    "negative eps": (lambda: tbe.RowwiseAdagrad(eps=-1e-8), "eps=-1e-08: expected a number >= 0"),
    "NaN max_norm": (lambda: tbe.RowwiseAdagrad(max_norm=math.nan), "max_norm=nan: expected a finite number"),
    "decay mode": (
        lambda: tbe.RowwiseAdagrad(weight_decay_mode="L2"),
        "weight_decay_mode='L2': expected one of none, l2, decoupled",
    ),
    "idle decay": (
        lambda: tbe.RowwiseAdagrad(weight_decay=0.1),
        "weight_decay=0.1 has no effect with weight_decay_mode='none': expected 'l2' or 'decoupled'",
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_wrong_arguments_are_refused(case: str) -> None:
    wrong, message = ARGUMENTS[case]
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        wrong()


@pytest.mark.parametrize("lr", [math.nan, math.inf, -0.1, "fast", None])
def test_a_wrong_learning_rate_is_refused_and_changes_nothing(lr: Any) -> None:
    emb = make()
    before = tensors(emb)
    with pytest.raises(ValueError, match="^" + re.escape(f"lr={lr!r}: expected a")):
        emb.set_learning_rate(lr)
    assert not differing(before, tensors(emb))
