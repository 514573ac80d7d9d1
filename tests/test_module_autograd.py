"""The operator under autograd, torch.library's checks, torch.compile, and torch's optimizers around it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import INDICES, OFFSETS, TABLES, differing, inputs, make, step, tensors
from torch import nn

import tbe
from tbe import BadLookupWarning
from tbe_core import reference, tolerances

# --- what gets a gradient -----------------------------------------------------------------------------------


def test_gradient_steps_the_tables_and_does_not_reach_them() -> None:
    emb = make()
    before = emb.weights.clone()
    step(emb)
    assert not emb.weights.requires_grad and emb.weights.grad is None
    assert all(view.grad is None and not view.requires_grad for view in emb.split_embedding_weights())
    assert not torch.equal(before, emb.weights)
    assert [p.numel() for p in emb.parameters() if p.requires_grad] == [0]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_equals_training_forward_and_trains_nothing(context: Any) -> None:
    emb = make()
    before, training = tensors(emb), emb(**inputs())
    with context():
        out = emb(**inputs())
    assert torch.equal(out, training.detach()) and not out.requires_grad
    assert training.requires_grad and not differing(before, tensors(emb))


def test_a_second_backward_is_refused_and_steps_nothing() -> None:
    emb = make()
    out = emb(**inputs()).sum()
    out.backward(retain_graph=True)
    before = tensors(emb)
    with pytest.raises(RuntimeError, match="a second backward through one lookup: its rows have been stepped"):
        out.backward()
    assert not differing(before, tensors(emb))


def test_two_calls_before_one_backward_are_two_steps() -> None:
    emb = make(optimizer=tbe.SGD(lr=0.1))
    judge = reference.Reference.of(emb.spec, emb.split_embedding_weights(), emb.split_optimizer_states())
    first, second = inputs(), inputs(indices=torch.tensor([9, 9, 1, 4, 0]))
    g = torch.randn(2, 2, 12, generator=torch.Generator().manual_seed(5))
    out = [emb(**first), emb(**second)]
    (out[0] * g[0] + out[1] * g[1]).sum().backward()
    for call, grad in ((first, g[0]), (second, g[1])):
        judge.backward_update(grad, call["indices"], call["offsets"], None, [0.1])
    limit = tolerances.weights("sgd", torch.float32)
    for table, expected in zip(emb.split_embedding_weights(), judge.tables, strict=True):
        torch.testing.assert_close(table.double(), expected, rtol=limit, atol=limit * 1e-2)


def test_a_caller_who_changes_ids_before_the_backward_is_told() -> None:
    emb, call = make(), inputs()
    out = emb(**call)
    before = tensors(emb)
    call["indices"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert not differing(before, tensors(emb))


def test_weights_without_gradient_ask_for_no_gradient_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*arguments: object) -> None:
        raise AssertionError("the weights' gradient was computed")

    import tbe_cpu

    monkeypatch.setattr(tbe_cpu.CpuBackend, "per_sample_weight_grad", unwanted)
    step(make(), per_sample_weights=torch.rand(5))
    with pytest.raises(AssertionError, match="was computed"):
        step(make(), per_sample_weights=torch.rand(5, requires_grad=True))


# --- torch.library ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [tbe.RowwiseAdagrad(lr=0.1), tbe.Adam(lr=0.1)], ids=["adagrad", "adam"])
@pytest.mark.parametrize(
    ("pooling", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("mean", True), ("none", False)]
)
def test_operators_pass_torch_s_own_checks(pooling: str, weighted: bool, optimizer: tbe.Optimizer) -> None:
    emb = make(pooling=pooling, tables=TABLES[:1] if pooling == "none" else TABLES, optimizer=optimizer)
    ids, ends = torch.tensor(INDICES), torch.tensor(OFFSETS)
    weights = torch.rand(5, requires_grad=True) if weighted else None
    plain = None if weights is None else weights.detach()
    grad = torch.randn(emb(ids, ends, plain).shape)
    ops, handle = torch.ops.tbe, emb._handle
    state = (emb.weights.detach().clone(), [s.clone() for s in emb.states], emb.hyper, emb.counter)
    lookup = (emb.weights, emb.states, emb.hyper, emb.counter, emb.hook, ids, ends, weights, handle, "")
    carry = ops.lookup(*lookup, True)[1].detach()
    calls = [
        (ops.lookup, (*lookup, True)),
        (ops.lookup, (*lookup, False)),
        (ops.backward_update, (grad, *state, ids, ends, plain, carry, handle, "")),
        (ops.check, (emb.weights, ids, ends, emb.bad, handle, "")),
    ]
    if plain is not None:
        calls.append((ops.per_sample_weight_grad, (grad, emb.weights, ids, ends, plain, handle, "")))
    for op, arguments in calls:
        found = torch.library.opcheck(op.default, arguments)
        assert len(found) >= 4 and set(found.values()) == {"SUCCESS"}, (op, found)


def test_every_operator_is_checked_above() -> None:
    schemas = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("tbe::")}
    checked = {"lookup", "backward_update", "check", "per_sample_weight_grad"}
    checked |= {"vbe_offsets", "vbe_flatten", "vbe_unflatten"}  # in test_vbe.py
    checked |= {"quantized_lookup"}  # in test_quantized.py
    checked |= {"inference"}  # in test_export.py
    assert schemas == {f"tbe::{name}" for name in checked}


# --- inside a model -----------------------------------------------------------------------------------------


class Model(nn.Module):
    """Pooled embeddings, scaled lookups and a dense layer."""

    def __init__(self, emb: tbe.TableBatchedEmbeddingBags) -> None:
        super().__init__()
        self.emb = emb
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.rand(64))
        self.dense = nn.Linear(emb.spec.output_width, 3)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dense(self.emb(indices, offsets, self.scale[: indices.numel()]).relu())
        return out


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of changing B and N, an empty one and an empty bag among them."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for bags, count in ((2, 9), (3, 20), (5, 31), (4, 0), (1, 6)):
        inner = torch.randint(0, count + 1, (2 * bags - 1,), generator=generator).sort().values
        ends = torch.cat([torch.tensor([0]), inner, torch.tensor([count])])
        found.append((torch.randint(0, 5, (count,), generator=generator), ends))
    return found


def train(model: nn.Module, run: Any, parameters: Any, clip: bool = False) -> list[torch.Tensor]:
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    losses = []
    for indices, offsets in batches():
        optimizer.zero_grad()
        loss = run(indices, offsets).square().sum()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("clip", [False, True])
def test_torch_s_optimizers_take_all_parameters_and_leave_the_tables(clip: bool) -> None:
    """``model.parameters()`` trains as the dense parameters alone do; the tables step themselves, once."""
    everything, dense = Model(make()), Model(make())
    before = everything.emb.weights.clone()
    got = train(everything, everything, everything.parameters(), clip)
    expected = train(dense, dense, [dense.scale, *dense.dense.parameters()], clip)
    assert all(map(torch.equal, got, expected))
    assert not differing(tensors(everything.emb), tensors(dense.emb))
    assert not torch.equal(before, everything.emb.weights)


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop],
)
def test_optimizers_of_torch_accept_the_module_s_parameters(optimizer: Any) -> None:
    emb, alone = make(), make()
    wrapped = optimizer(emb.parameters(), lr=0.5, weight_decay=0.1)
    for seed in (1, 2):
        step(emb, seed)
        wrapped.step()
        wrapped.zero_grad()
        step(alone, seed)
    assert not differing(tensors(emb), tensors(alone))
    wrapped.load_state_dict(wrapped.state_dict())


# --- torch.compile ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mode", ["warn", "error", "ignore", "none"])
def test_a_compiled_model_equals_eager_bit_for_bit(mode: str) -> None:
    """No graph break, changing shapes, and every update exactly once a step."""
    eager = Model(make(bounds_check=mode))
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = train(eager, eager, eager.parameters())
    got = train(model, compiled, model.parameters())
    assert all(map(torch.equal, got, expected))
    assert not differing(tensors(eager.emb), tensors(model.emb))
    assert torch.equal(eager.dense.weight, model.dense.weight) and torch.equal(eager.scale, model.scale)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_module_sees_a_new_learning_rate() -> None:
    eager, emb = make(), make()
    compiled = torch.compile(emb, fullgraph=True, backend="aot_eager")
    for lr in (0.1, 0.5):
        eager.set_learning_rate(lr)
        emb.set_learning_rate(lr)
        step(eager)
        step(compiled)
    assert not differing(tensors(eager), tensors(emb))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": torch.ones(5)}, "indices has dtype torch.float32: expected one of int32, int64"),
        ({"offsets": torch.tensor([0, 2, 5, 5])}, "offsets has length 4: expected T*B+1 with T=2"),
        ({"offsets": torch.tensor([0, 3, 2, 4, 5])}, "offsets[2]=2 after 3 (feature 0, bag 1): expected"),
        ({"per_sample_weights": torch.ones(4)}, "per_sample_weights has length 4: expected 5"),
    ],
)
def test_a_compiled_module_refuses_bad_input(changes: dict[str, Any], message: str) -> None:
    emb = make()
    before = tensors(emb)
    compiled = torch.compile(emb, fullgraph=True, backend="aot_eager")
    # The compiler wraps what is raised while it traces, and keeps the text.
    with pytest.raises((ValueError, torch._dynamo.exc.TorchRuntimeError)) as caught:
        compiled(**inputs(**changes))
    assert message in str(caught.value)
    assert not differing(before, tensors(emb))


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_module_counts_bad_ids_until_it_is_asked() -> None:
    emb = make()
    compiled = torch.compile(emb, fullgraph=True, backend="aot_eager")
    step(compiled, indices=torch.tensor([1, 2, 99, 0, 5]))
    with pytest.warns(BadLookupWarning, match=r"^2 ids .*\(2 so far\)") as caught:
        emb.flush()
    assert caught[0].filename == __file__
