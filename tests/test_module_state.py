"""The module as an nn.Module: checkpoints, copies, moves and conversions, learning rate, hidden parameters."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import TABLES, differing, inputs, make, step, tensors
from torch import nn

import tbe
from tbe import BackendError, BadLookupWarning

OPTIMIZERS = {
    "sgd": tbe.SGD(lr=0.1),
    "rowwise_adagrad": tbe.RowwiseAdagrad(lr=0.1),
    "decay and norm": tbe.RowwiseAdagrad(
        lr=0.1, eps=1e-4, weight_decay=0.01, weight_decay_mode="l2", max_norm=0.05
    ),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def through_a_file(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# --- views --------------------------------------------------------------------------------------------------


def test_tables_and_states_are_views_in_table_order() -> None:
    tables = [tbe.Table("wide", 3, 8), tbe.Table("narrow", 5, 2), tbe.Table("also_wide", 4, 8)]
    emb = make(tables=tables)
    views, states = emb.split_embedding_weights(), emb.split_optimizer_states()
    assert [tuple(v.shape) for v in views] == [(3, 8), (5, 2), (4, 8)]
    assert [{k: tuple(v.shape) for k, v in s.items()} for s in states] == [{"sum": (n,)} for n in (3, 5, 4)]
    for number, (view, state) in enumerate(zip(views, states, strict=True)):
        view.fill_(number)
        state["sum"].fill_(number)
    assert [v.unique().tolist() for v in emb.split_embedding_weights()] == [[0], [1], [2]]
    assert [s["sum"].unique().tolist() for s in emb.split_optimizer_states()] == [[0], [1], [2]]
    ids, ends = torch.tensor([2, 4, 0]), torch.tensor([0, 1, 2, 3])
    assert emb(ids, ends).detach().tolist() == [[0.0] * 8 + [1.0] * 2 + [2.0] * 8]


def test_rows_start_small_and_random() -> None:
    weights = make(tables=[tbe.Table("a", 1000, 16)]).split_embedding_weights()[0]
    assert abs(float(weights.mean())) < 1e-3 and float(weights.std()) == pytest.approx(0.01, rel=0.05)


# --- checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_save_load_step_equals_never_having_stopped(optimizer: str, dtype: torch.dtype) -> None:
    tables = [tbe.Table("a", 10, 16), tbe.Table("b", 5, 8), tbe.Table("c", 6, 64)]
    options = {"tables": tables, "optimizer": OPTIMIZERS[optimizer], "weights_dtype": dtype}
    whole, again = make(**options), make(**options)
    ends = {"indices": torch.tensor([1, 2, 4, 0, 5]), "offsets": torch.tensor([0, 2, 3, 5])}
    step(whole, 1, **ends)
    whole.set_learning_rate(0.03)
    step(whole, 2, **ends)
    for table in again.split_embedding_weights():
        table.fill_(1)
    again.load_state_dict(through_a_file(whole.state_dict()))
    for seed in (3, 4):
        assert torch.equal(step(whole, seed, **ends), step(again, seed, **ends))
    assert not differing(tensors(whole), tensors(again))


def test_a_checkpoint_holds_tables_state_and_hyper_parameters_by_name() -> None:
    emb = nn.Sequential(make())
    assert list(emb.state_dict()) == ["0.hyper", "0.ad.weight", "0.ad.sum", "0.geo.weight", "0.geo.sum"]
    assert list(make(optimizer=tbe.SGD()).state_dict()) == ["hyper", "ad.weight", "geo.weight"]


def test_a_checkpoint_does_not_depend_on_the_order_of_storage() -> None:
    """Tables are found by name: a module with the same tables in another order loads it."""
    emb, turned = make(), make(tables=TABLES[::-1])
    step(emb)
    turned.load_state_dict(emb.state_dict())
    for left, right in zip(emb.split_embedding_weights(), turned.split_embedding_weights()[::-1], strict=True):
        assert torch.equal(left, right)


def refuse(emb: nn.Module, module: tbe.TableBatchedEmbeddingBags, state: dict[str, Any], *told: str) -> None:
    """Loading raises with every text of ``told`` and changes nothing."""
    before = tensors(module)
    with pytest.raises(RuntimeError) as caught:
        emb.load_state_dict(state)
    assert not [text for text in told if text not in str(caught.value)], caught.value
    assert not differing(before, tensors(module))


@pytest.mark.parametrize("nested", [False, True])
def test_checkpoints_that_do_not_fit_change_nothing(nested: bool) -> None:
    saved, emb = make(), make()
    step(saved)
    outer: nn.Module = nn.ModuleDict({"emb": emb}) if nested else emb
    prefix = "emb." if nested else ""
    good = {prefix + name: value for name, value in saved.state_dict().items()}
    key = prefix + "geo.weight"
    refuse(outer, emb, {**good, key: torch.ones(6, 8)}, f"{key} is [6, 8] torch.float32: expected [5, 8]")
    refuse(outer, emb, {**good, key: good[key].half()}, f"{key} is [5, 8] torch.float16: expected [5, 8] torch.f")
    refuse(outer, emb, {**good, key: [1.0]}, f"{key} is a list: expected a tensor")
    outer.load_state_dict(good)
    assert not differing(tensors(saved), tensors(emb))


def test_strict_refuses_missing_and_unexpected_keys() -> None:
    state = dict(make().state_dict())
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"city\.weight"'):
        make().load_state_dict({**state, "city.weight": torch.ones(2)})
    del state["geo.weight"], state["hyper"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"hyper", "geo\.weight"'):
        make().load_state_dict(state)


def test_not_strict_loads_what_is_there_and_reports_the_rest() -> None:
    saved, emb = make(), make()
    step(saved)
    state = {k: v for k, v in saved.state_dict().items() if not k.startswith("geo")}
    before = [v.clone() for v in emb.split_embedding_weights()]
    found = emb.load_state_dict({**state, "city.weight": torch.ones(1)}, strict=False)
    assert found.missing_keys == ["geo.weight", "geo.sum"] and found.unexpected_keys == ["city.weight"]
    assert torch.equal(emb.split_embedding_weights()[0], saved.split_embedding_weights()[0])
    assert not torch.equal(before[0], emb.split_embedding_weights()[0])
    assert torch.equal(before[1], emb.split_embedding_weights()[1])
    with pytest.raises(RuntimeError, match="expected"):
        emb.load_state_dict({**state, "ad.weight": torch.ones(1)}, strict=False)


# --- copies, moves, conversions -----------------------------------------------------------------------------

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda emb: pickle.loads(pickle.dumps(emb)),
    "deepcopy": copy.deepcopy,
    "file": lambda emb: _module_through_a_file(emb),
}


def _module_through_a_file(emb: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(emb, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_goes_on_by_itself_and_like_its_original(kind: str) -> None:
    emb = make()
    step(emb, 1)
    other = COPIES[kind](emb)
    assert other.plan == emb.plan and repr(other) == repr(emb)
    step(other, 2)
    assert differing(tensors(emb), tensors(other)) == ["weights", "state 0"]
    step(emb, 2)
    assert not differing(tensors(emb), tensors(other))


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_does_not_repeat_its_original_s_warnings(kind: str) -> None:
    emb = make()
    bad = torch.tensor([1, 2, 99, 0, 4])
    with pytest.warns(BadLookupWarning, match=r"^1 ids .*\(1 so far\)"):
        step(emb, indices=bad)
    other = COPIES[kind](emb)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(other)
    with pytest.warns(BadLookupWarning, match=r"^1 ids .*\(2 so far\)"):
        step(other, indices=bad)


def test_moving_to_where_it_is_keeps_everything() -> None:
    emb = make()
    before = tensors(emb)
    assert emb.to("cpu") is emb and emb.cpu() is emb and emb.float() is emb
    assert not differing(before, tensors(emb))


CONVERSIONS: dict[str, tuple[torch.dtype, Callable[[Any], Any], str]] = {
    "fp32 to fp16": (
        torch.float32,
        nn.Module.half,
        "tables of torch.float32 to torch.float16",
    ),
    "fp32 to fp64": (
        torch.float32,
        nn.Module.double,
        "tables of torch.float32 to torch.float64",
    ),
    "fp16 to fp32": (
        torch.float16,
        nn.Module.float,
        "tables of torch.float16 to torch.float32",
    ),
    "state": (
        torch.float16,
        nn.Module.half,
        "optimizer state of torch.float32 to torch.float16",
    ),
    "inside": (
        torch.float32,
        lambda m: nn.Sequential(m).to(torch.bfloat16),
        "tables of torch.float32 to torch.bfloat16",
    ),
}


@pytest.mark.parametrize("case", CONVERSIONS)
def test_conversions_are_refused_and_change_nothing(case: str) -> None:
    dtype, convert, message = CONVERSIONS[case]
    emb = make(weights_dtype=dtype)
    before = tensors(emb)
    with pytest.raises(
        ValueError, match=f"^cannot convert {message}: weights_dtype and output_dtype are set when"
    ):
        convert(emb)
    assert not differing(before, tensors(emb))
    assert {k: v.dtype for k, v in before.items()} == {k: v.dtype for k, v in tensors(emb).items()}


def test_a_device_that_nothing_serves_is_refused_and_changes_nothing() -> None:
    emb = make()
    before = tensors(emb)
    with pytest.raises(BackendError, match="cpu: serves CPU tensors only, not meta"):
        emb.to("meta")
    assert not differing(before, tensors(emb))
    with pytest.raises(BackendError, match="cpu: serves CPU tensors only, not meta"):
        make(device="meta")


def test_torch_s_default_dtype_does_not_reach_the_module() -> None:
    expected = make()
    step(expected)
    torch.set_default_dtype(torch.float64)
    try:
        emb = make()
        assert {emb.hyper.dtype, emb.hook.dtype, emb.weights.dtype} == {torch.float32}
        out = emb(**inputs())
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    assert not differing(tensors(expected), tensors(emb))


# --- learning rate ------------------------------------------------------------------------------------------


def test_set_learning_rate_equals_a_module_made_with_it() -> None:
    emb, made = make(), make(optimizer=tbe.RowwiseAdagrad(lr=0.7))
    emb.set_learning_rate(0.7)
    step(emb)
    step(made)
    assert not differing(tensors(emb), tensors(made))


def test_a_rate_set_between_forward_and_backward_is_the_one_that_steps() -> None:
    emb, made = make(), make(optimizer=tbe.RowwiseAdagrad(lr=0.7))
    out = emb(**inputs())
    emb.set_learning_rate(0.7)
    out.sum().backward()
    made(**inputs()).sum().backward()
    assert not differing(tensors(emb), tensors(made))


def test_a_rate_of_zero_trains_nothing_but_the_state() -> None:
    emb = make()
    emb.set_learning_rate(0)
    before = tensors(emb)
    step(emb)
    assert differing(before, tensors(emb)) == ["state 0"]


def test_repr_tells_the_operator() -> None:
    text = repr(make())
    assert "2 tables, 2 features, 15 rows, D=4,8, pooling=sum, RowwiseAdagrad(lr=0.1" in text
