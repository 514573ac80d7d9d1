"""The case past_int32: more elements in a table, or rows in all, than 32 bits count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import Poison
from judge import Call, consult
from problems import offsets_of, step

import tbe
from tbe import policy, registry
from tbe_core import Absent, Layout, Lookup, Spec, Table, Training

Place = tuple[str, str]
ADAGRAD = tbe.RowwiseAdagrad(lr=0.5)


def _compact(spec: Spec, ids: torch.Tensor, used: torch.Tensor) -> tuple[Spec, torch.Tensor]:
    """The same problem over a table of the ``used`` rows alone, for the reference."""
    table = spec.layout.tables[-1]
    small = Layout.make([Table(table.name, len(used), table.dim)], None)
    return replace(spec, layout=small), torch.searchsorted(used, ids)


def _run_huge(tables: list[Table], place: Place, poison: Poison, weighted: bool) -> None:
    """One step by the backend's contract on the last table's last rows. Only the pages of those rows are
    written, so that on a CPU the rest of the tables is address space and no memory."""
    layout = Layout.make(tables, [len(tables) - 1])
    spec = Spec(layout, tbe.SGD(lr=0.5), weights_dtype=torch.float16)
    device, last = torch.device(place[1]), tables[-1]
    with poison.off():
        weights = torch.empty(layout.total_elements, dtype=torch.float16, device=device)
    base = layout.element_bases[-1]
    table = weights[base : base + last.rows * last.dim].view(last.rows, last.dim)
    used = torch.tensor([last.rows - 9, last.rows - 5, last.rows - 2, last.rows - 1])
    at = used.to(device)
    table[at] = torch.randn(len(used), last.dim).half().to(device)
    neighbours = at - 1
    table[neighbours[:3]] = 7.0
    ids = used[torch.tensor([3, 0, 3, 3, 1, 2, 3, 0])]
    sample = torch.rand(len(ids)) if weighted else None
    problem = spec.problem(torch.int64, torch.int64, weighted)
    plan = policy.plan_for(problem, device, policy.request(place[0]))
    backend = registry.load(place[0])
    assert not isinstance(backend, Absent)
    offsets, grad = offsets_of([3, 0, 5]), torch.randn(3, last.dim)
    lookup = Lookup(
        spec, plan, weights, ids.to(device), offsets.to(device), None if sample is None else sample.to(device)
    )
    hyper = torch.tensor([0.5], device=device)
    small, compact = _compact(spec, ids, used)
    verdict = consult(small, [table[at]], [{}], [0.5], Call(compact, offsets, sample, grad))
    out, carry = backend.forward(lookup, True)
    verdict.judge_output(out)
    if sample is not None:
        verdict.judge_weight_grad(backend.per_sample_weight_grad(lookup, grad.to(device)))
    backend.backward_update(lookup, grad.to(device), Training((), hyper), carry)
    verdict.judge_tables([table[at]])
    assert (table[neighbours[:3]] == 7.0).all()


@pytest.mark.values
@pytest.mark.case("past_int32")
@pytest.mark.parametrize("weighted", (False, True))
def test_elements_past_int32(place: Place, poison: Poison, weighted: bool) -> None:
    assert 17_000_000 * 128 > 2**31
    _run_huge([Table("t", 17_000_000, 128)], place, poison, weighted)


@pytest.mark.values
@pytest.mark.case("past_int32")
@pytest.mark.parametrize("weighted", (False, True))
def test_rows_past_int32(place: Place, poison: Poison, weighted: bool) -> None:
    _run_huge([Table(f"t{i}", 600_000_000, 1) for i in range(4)], place, poison, weighted)


@pytest.mark.gpu
@pytest.mark.case("past_int32")
@pytest.mark.parametrize("weighted", (False, True))
def test_module_past_int32(weighted: bool) -> None:
    """The front door with row-wise state, on the device: 17M x 128 in fp16 is 4.4 GB."""
    emb = tbe.TableBatchedEmbeddingBags(
        [Table("t", 17_000_000, 128)], optimizer=ADAGRAD, weights_dtype=torch.float16, device="cuda"
    )
    table, used = emb.split_embedding_weights()[0], torch.tensor([0, 1, 16_999_990, 16_999_998, 16_999_999])
    picked = torch.randint(0, len(used), (40,))
    sample = torch.rand(40) if weighted else None
    offsets = offsets_of([10, 0, 25, 5])
    small, compact = _compact(emb.spec, used[picked], used)
    call = Call(compact, offsets, sample, torch.randn(4, 128))
    verdict = consult(small, [table[used.cuda()]], [{"sum": torch.zeros(5)}], emb.hyper.tolist(), call)
    outcome = step(emb, replace(call, indices=used[picked]))
    verdict.judge_output(outcome.out)
    verdict.judge_tables([table[used.cuda()]])
    verdict.judge_states([{"sum": emb.split_optimizer_states()[0]["sum"][used.cuda()]}])
