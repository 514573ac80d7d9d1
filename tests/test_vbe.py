"""Variable batch per feature: values by the fp64 reference, order by loops, refusals, torch.compile."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import TABLES, differing, make, tensors
from hypothesis import given
from hypothesis import strategies as st
from judge import Call, consult, judge, same_bits
from problems import Trial, offsets_of, trials

import tbe
from tbe_core import Table, tolerances

pytestmark = pytest.mark.filterwarnings("ignore::tbe.BadLookupWarning")

Place = tuple[str, str]
Sizes = list[list[int]]
NAME = "batch_size_per_feature_per_rank"


@st.composite
def variable(draw: st.DrawFn) -> tuple[Trial, Sizes]:
    """A trial whose offsets hold as many bags a feature and rank as the sizes say."""
    trial = draw(trials())
    features, ranks = len(trial.feature_table_map), draw(st.integers(1, 3))
    size = st.one_of(st.just(0), st.integers(0, 5))
    sizes = [draw(st.lists(size, min_size=ranks, max_size=ranks)) for _ in range(features)]
    lengths: list[int] = []
    ids: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(trial.seed)
    for t, row in zip(trial.feature_table_map, sizes, strict=True):
        mine = draw(
            st.lists(st.one_of(st.integers(0, 6), st.integers(0, 40)), min_size=sum(row), max_size=sum(row))
        )
        rows = trial.tables[t].rows
        worst = 3 if trial.bounds_check in ("warn", "ignore") else 0  # ids just past the end, or pruned
        ids.append(torch.randint(-1, rows + worst, (sum(mine),), generator=generator))
        lengths += mine
    weights = trial.per_sample_weights
    if weights is not None:
        weights = torch.randn(sum(lengths), generator=generator).to(weights.dtype)
    return replace(
        trial,
        pooling="sum" if trial.pooling == "none" else trial.pooling,
        indices=torch.cat(ids).to(trial.indices.dtype),
        offsets=offsets_of(lengths, trial.offsets.dtype),
        per_sample_weights=weights,
    ), sizes


def padded_offsets(trial: Trial, sizes: Sizes) -> torch.Tensor:
    """What the reference takes: every feature's bags, then empty ones."""
    lengths, tallest, at, found = trial.offsets.diff().tolist(), max(map(sum, sizes)), 0, []
    for row in sizes:
        found += [*lengths[at : at + sum(row)], *[0] * (tallest - sum(row))]
        at += sum(row)
    return offsets_of(found)


def flat_places(emb: tbe.TableBatchedEmbeddingBags, sizes: Sizes) -> tuple[list[int], list[int]]:
    """Row and column in the padded output of every element of the flat one."""
    rows: list[int] = []
    columns: list[int] = []
    layout = emb.spec.layout
    for rank in range(len(sizes[0])):
        for feature, row in enumerate(sizes):
            for bag in range(row[rank]):
                first, dim = layout.feature_columns[feature], layout.feature_dims[feature]
                rows += [sum(row[:rank]) + bag] * dim
                columns += range(first, first + dim)
    return rows, columns


def judged_step(emb: tbe.TableBatchedEmbeddingBags, trial: Trial, sizes: Sizes, seed: int) -> None:
    device, spec = emb.weights.device, emb.spec
    rows, columns = flat_places(emb, sizes)
    generator = torch.Generator().manual_seed(seed)
    flat_grad = torch.randn(len(rows), generator=generator).to(spec.output_dtype)
    grad = torch.zeros(max(map(sum, sizes)), spec.output_width, dtype=spec.output_dtype)
    grad[rows, columns] = flat_grad
    call = Call(trial.indices, padded_offsets(trial, sizes), trial.per_sample_weights, grad)
    tables, states = emb.split_embedding_weights(), emb.split_optimizer_states()
    verdict = consult(spec, tables, states, emb.hyper.tolist(), call)
    ids, ends = trial.indices.to(device, copy=True), trial.offsets.to(device, copy=True)
    weights = None
    if trial.per_sample_weights is not None:
        weights = trial.per_sample_weights.to(device, copy=True).requires_grad_(trial.weights_need_grad)
    out = emb(ids, ends, weights, batch_size_per_feature_per_rank=sizes)
    assert out.shape == (len(rows),) and out.dtype == spec.output_dtype and out.is_contiguous()
    tolerance = tolerances.forward(spec.weights_dtype, torch.float32)
    judge("output", out, verdict.out[rows, columns], verdict.out_magnitude[rows, columns], tolerance)
    with torch.no_grad():
        assert same_bits(emb(ids, ends, weights, batch_size_per_feature_per_rank=sizes), out)
    if out.requires_grad:
        out.backward(flat_grad.to(device))
    assert torch.equal(ids.cpu(), trial.indices) and torch.equal(ends.cpu(), trial.offsets)
    if weights is not None and trial.weights_need_grad:
        assert weights.grad is not None
        verdict.judge_weight_grad(weights.grad)
    verdict.judge_tables(tables)
    verdict.judge_states(states)


@given(drawn=variable())
def test_any_variable_batch(place: Place, drawn: tuple[Trial, Sizes]) -> None:
    trial, sizes = drawn
    emb = trial.module(*place)
    for seed in (1, 2):
        judged_step(emb, trial, sizes, seed)


@given(drawn=variable())
def test_sizes_that_are_all_equal_are_the_plain_lookup(place: Place, drawn: tuple[Trial, Sizes]) -> None:
    """Of one rank, and of several: the same bits, bag by bag."""
    trial, sizes = drawn
    ends = padded_offsets(trial, sizes).to(place[1])
    batch = max(map(sum, sizes))
    plain, emb = trial.module(*place), trial.module(*place)
    ids = trial.indices.to(place[1])
    weights = None if trial.per_sample_weights is None else trial.per_sample_weights.to(place[1])
    expected = plain(ids, ends, weights)
    same = [[batch // 2, batch - batch // 2] for _ in sizes]
    out = emb(ids, ends, weights, batch_size_per_feature_per_rank=same)
    assert same_bits(out, expected[flat_places(emb, same)])
    grad = torch.randn(out.shape).to(out)
    whole = torch.zeros_like(expected)
    whole[flat_places(emb, same)] = grad
    if out.requires_grad:
        out.backward(grad)
        expected.backward(whole)
    assert same_bits(emb.weights, plain.weights) and all(map(same_bits, emb.states, plain.states))


def test_widths_without_a_common_divisor(place: Place) -> None:
    trial = Trial(
        (Table("a", 9, 3), Table("b", 7, 8), Table("c", 5, 1)), (2, 0, 1, 0),
        torch.tensor([0, 4, 1, 1, 8, 6, 2, 0]), offsets_of([1, 1, 0, 2, 1, 1, 2]), torch.randn(8), "mean",
        tbe.RowwiseAdagrad(lr=0.5),
    )  # fmt: skip
    judged_step(trial.module(*place), trial, [[2, 0], [0, 1], [1, 2], [0, 1]], 3)


def test_micro_batches_of_variable_batches_step_once(place: Place) -> None:
    """Two halves of the bags; the reference judges the one step of the whole."""
    ids, lengths, sizes = torch.tensor([0, 4, 1, 1, 3, 2, 2, 0, 4]), [1, 2, 0, 1, 1, 1, 3], [[2, 1], [3, 1]]
    trial = Trial((Table("a", 9, 3), Table("b", 5, 8)), (0, 1), ids, offsets_of(lengths))
    emb = trial.module(*place)
    grad = torch.randn(4, 11)
    grad[3, :3] = 0
    call = Call(ids, padded_offsets(trial, sizes), None, grad)
    tables, states = emb.split_embedding_weights(), emb.split_optimizer_states()
    verdict = consult(emb.spec, tables, states, emb.hyper.tolist(), call)
    parts = (([0, 1, 2, 3, 4], [1, 2, 1, 1], [[2], [2]]), ([5, 6, 7, 8], [0, 1, 3], [[1], [2]]))
    order = {0: ([0, 1, 2, 3, 4], [0, 1]), 1: ([5, 6, 7, 8], [2, 3])}
    with emb.accumulate():
        for number, (_, part, size) in enumerate(parts):
            places, bags = order[number]
            mine = grad[bags]
            flat = torch.cat([mine[: size[0][0], :3].flatten(), mine[: size[1][0], 3:].flatten()])
            out = emb(
                ids[places].to(place[1]), offsets_of(part).to(place[1]), batch_size_per_feature_per_rank=size
            )
            out.backward(flat.to(place[1]))
    verdict.judge_tables(tables)


# --- refusals -----------------------------------------------------------------------------------------------

IDS = torch.tensor([1, 2, 9, 0, 4])
SIZES = [[1, 2], [0, 1]]
ENDS = torch.tensor([0, 2, 3, 3, 5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NAME: [[1, 2]]}, f"{NAME} has 1 rows: expected 2, one for every feature"),
        ({NAME: [[1, 2], [1]]}, f"{NAME}[1] has length 1: expected 2, one for every rank"),
        ({NAME: [[], []]}, f"{NAME}[0] has length 0: expected 1, one for every rank"),
        ({NAME: [[1, 2], [2, -1]]}, f"{NAME}[1][1]=-1: expected an int >= 0"),
        ({NAME: [[1, 2], [0, 1.0]]}, f"{NAME}[1][1]=1.0: expected an int >= 0"),
        ({NAME: [[1, 2], [0, True]]}, f"{NAME}[1][1]=True: expected an int >= 0"),
        ({NAME: [3, 1]}, f"{NAME}[0]=3: expected a list of int"),
        ({NAME: torch.tensor(SIZES)}, f"{NAME}=Tensor: expected a list of lists of int, on the host"),
        ({NAME: [[1, 2], [0, 2]]}, f"offsets has length 5: expected 6, the sum of {NAME} and 1"),
        ({"offsets": ENDS.float()}, "offsets has dtype torch.float32: expected one of int32, int64"),
        ({"indices": IDS.float()}, "indices has dtype torch.float32: expected one of int32, int64"),
        ({"indices": [1]}, "indices=list: expected a torch.Tensor"),
        ({"per_sample_weights": torch.ones(4)}, "per_sample_weights has length 4: expected 5"),
        (
            {"offsets": torch.tensor([0, 2, 1, 3, 5])},
            "offsets[2]=1 after 2 (feature 0, bag 1): expected offsets that never decrease",
        ),
        (
            {"offsets": torch.tensor([0, 2, 3, 6, 5])},
            "offsets[4]=5 after 6 (feature 1, bag 0): expected offsets that never decrease",
        ),
        ({"offsets": torch.tensor([1, 2, 3, 3, 5])}, "offsets[0]=1: expected 0"),
        ({"offsets": torch.tensor([0, 2, 3, 3, 4])}, "offsets[-1]=4: expected 5, the length of indices"),
        (
            {"indices": torch.tensor([1, 2, 9, 0, 5])},
            "indices[4]=5 (feature 1, table 'geo', bag 0): expected an id in [0, 5)",
        ),
    ],
)
def test_wrong_input_is_refused_by_the_caller_s_own_positions(changes: dict[str, Any], message: str) -> None:
    emb = make(bounds_check="error")
    before = tensors(emb)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        emb(**{"indices": IDS, "offsets": ENDS, NAME: SIZES, **changes})
    assert not differing(before, tensors(emb))


def test_bags_are_needed() -> None:
    emb = make(tables=TABLES[:1], pooling="none")
    with pytest.raises(ValueError, match="with pooling='none': expected None, there are no bags"):
        emb(IDS, torch.tensor([0, 2, 5]), batch_size_per_feature_per_rank=[[2]])


@pytest.mark.filterwarnings("default::tbe.BadLookupWarning")
def test_a_warning_points_at_the_caller() -> None:
    emb = make()
    with pytest.warns(tbe.BadLookupWarning, match=r"^1 ids outside their table") as caught:
        emb(torch.tensor([1, 2, 9, 0, 5]), ENDS, batch_size_per_feature_per_rank=SIZES)
    assert caught[0].filename == __file__


# --- the operators, and compiled ----------------------------------------------------------------------------


def test_operators_pass_torch_s_own_checks() -> None:
    handle, ops = make()._handle, torch.ops.tbe
    flat = [size for row in SIZES for size in row]
    padded = torch.randn(3, 12, requires_grad=True)
    for op, arguments in (
        (ops.vbe_offsets, (IDS, ENDS, flat, handle)),
        (ops.vbe_flatten, (padded, flat, handle)),
        (ops.vbe_unflatten, (torch.randn(20), flat, handle)),
    ):
        found = torch.library.opcheck(op.default, arguments)
        assert len(found) >= 4 and set(found.values()) == {"SUCCESS"}, (op, found)


def test_a_compiled_module_equals_eager_whatever_the_sizes() -> None:
    torch._dynamo.reset()
    eager, emb = make(), make()
    compiled = torch.compile(emb, fullgraph=True, backend="aot_eager")
    for sizes in (
        SIZES,
        [[2, 2], [1, 3]],
        [[4, 2], [1, 3]],
        [[1, 1], [5, 3]],
        [[0, 1], [5, 2]],
        [[3, 3], [0, 0]],
    ):
        bags = sum(map(sum, sizes))
        ids, ends = torch.arange(2 * bags) % 5, 2 * torch.arange(bags + 1)
        mask = torch.tensor([True, False])
        found = []
        for module in (eager, compiled):
            weights = torch.linspace(-1, 1, 2 * bags, requires_grad=True)
            out = module(ids, ends, weights, batch_size_per_feature_per_rank=sizes, feature_requires_grad=mask)
            out.backward(torch.linspace(0, 1, out.numel()))
            found.append((out.detach(), weights.grad))
        assert all(map(torch.equal, *found))
        of_first = 2 * sum(sizes[0])
        assert not found[0][1][of_first:].any() and found[0][1][:of_first].any() == bool(of_first)
        assert not differing(tensors(eager), tensors(emb))


def test_a_compiled_module_refuses_bad_offsets_by_the_caller_s_own_positions() -> None:
    torch._dynamo.reset()
    emb = make()
    before = tensors(emb)
    compiled = torch.compile(emb, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=re.escape("offsets[4]=5 after 6 (feature 1, bag 0): expected")):
        compiled(IDS, torch.tensor([0, 2, 3, 6, 5]), batch_size_per_feature_per_rank=SIZES)
    assert not differing(before, tensors(emb))
