"""The FBGEMM drop-in on its own: what it refuses, what it trains, its checkpoints and its converter's files."""

from __future__ import annotations

import copy
import io
import warnings
from dataclasses import dataclass
from typing import Any

import fbgemm_modules as modules
import pytest
import torch
from fbgemm_modules import assert_near, make, states, train
from typer.testing import CliRunner

import tbe
import tbe.compat.fbgemm as ours
from tbe.compat.fbgemm import arguments, convert

HOST, CPU = ours.EmbeddingLocation.HOST, ours.ComputeDevice.CPU
SPEC = (10, 8, HOST, CPU)
SGD: dict[str, Any] = {"optimizer": ours.OptimType.EXACT_SGD, "learning_rate": 0.1}
COUNTING = (
    ours.OptimType.ADAM,
    ours.OptimType.PARTIAL_ROWWISE_ADAM,
    ours.OptimType.LAMB,
    ours.OptimType.PARTIAL_ROWWISE_LAMB,
)


@dataclass(frozen=True)
class Extra:
    """As FBGEMM's ``UserEnabledConfigDefinition``."""

    use_rowwise_bias_correction: bool = False
    use_writeback_bwd_prehook: bool = False


REFUSED: dict[str, dict[str, Any]] = {
    **{name: {name: True} for name in arguments.REFUSED},
    "record_cache_metrics.record_cache_miss_counter": {
        "record_cache_metrics": ours.RecordCacheMetrics(True, False)
    },
    "extra_optimizer_config.use_writeback_bwd_prehook": {"extra_optimizer_config": Extra(False, True)},
    "optimizer_state_dtypes['momentum1']": {"optimizer_state_dtypes": {"momentum1": ours.SparseType.BF16}},
    "weights_precision": {"weights_precision": ours.SparseType.INT8},
    "output_dtype": {"output_dtype": ours.SparseType.INT8},
    "optimizer": {"optimizer": ours.OptimType.NONE},
    "weight_decay_mode": {
        "optimizer": ours.OptimType.EXACT_ROWWISE_ADAGRAD,
        "weight_decay_mode": ours.WeightDecayMode.COUNTER,
    },
    "embedding_specs[0][2]": {
        "embedding_specs": [(10, 8, ours.EmbeddingLocation.MANAGED_CACHING, ours.ComputeDevice.CUDA)]
    },
    "embedding_specs[0][3]": {"embedding_specs": [(10, 8, ours.EmbeddingLocation.MTIA, ours.ComputeDevice.MTIA)]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_and_value(name: str) -> None:
    options = {"embedding_specs": [SPEC], **REFUSED[name]}
    with pytest.raises(NotImplementedError) as caught:
        ours.SplitTableBatchedEmbeddingBagsCodegen(**options)
    assert str(caught.value).startswith(f"{name}=") and "expected" in str(caught.value)


def test_configurations_without_effect_are_taken() -> None:
    emb = make(
        ours, extra_optimizer_config=Extra(), record_cache_metrics=ours.RecordCacheMetrics(False, False),
        optimizer_state_dtypes={"momentum1": ours.SparseType.FP32}, cache_load_factor=0.5, prefetch_pipeline=True,
    )  # fmt: skip
    assert emb(torch.tensor([1]), torch.tensor([0, 1, 1, 1, 1])).shape == (1, emb.total_D)


WRONG: dict[str, dict[str, Any]] = {
    "embedding_specs is empty": {"embedding_specs": []},
    r"embedding_specs\[0\].*HOST": {"embedding_specs": [(10, 8, HOST, ours.ComputeDevice.CUDA)]},
    r"embedding_specs\[1\]\[3\]": {
        "embedding_specs": [SPEC, (10, 8, ours.EmbeddingLocation.DEVICE, ours.ComputeDevice.CUDA)]
    },
    "feature_table_map": {"embedding_specs": [SPEC, SPEC], "feature_table_map": [0, 0]},
    "table_names": {"table_names": ["a", "b"]},
    "device='cuda'": {"device": "cuda"},
    "optimizer='quick'": {"optimizer": "quick"},
    "embedding_table_index_type": {"embedding_table_index_type": torch.int16},
    "lr=-1": {"learning_rate": -1.0},
    "gradient_clipping": {"gradient_clipping": True, "max_gradient": 0.0},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ours.SplitTableBatchedEmbeddingBagsCodegen(**{"embedding_specs": [SPEC], **WRONG[message]})


CALLS: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "indices=list": (ValueError, {"indices": [1]}),
    "offsets has length 2": (ValueError, {"offsets": torch.tensor([0, 1])}),
    "per_sample_weights has length 2": (ValueError, {"per_sample_weights": torch.ones(2)}),
    "batch_size_per_feature_per_rank": (ValueError, {"batch_size_per_feature_per_rank": [[1], [1], [1]]}),
    "vbe_output=None": (ValueError, {"vbe_output_offsets": torch.zeros(1, 4, dtype=torch.int64)}),
    "vbe_output_offsets=None": (ValueError, {"vbe_output": torch.empty(1)}),
    "vbe_output is torch.float64": (
        ValueError,
        {
            "vbe_output": torch.empty(1, dtype=torch.float64),
            "vbe_output_offsets": torch.zeros(1, 4, dtype=torch.int64),
            "batch_size_per_feature_per_rank": [[1], [1], [1], [1]],
        },
    ),
    "vbe_output_offsets is torch.int64 .4, 1.": (
        ValueError,
        {
            "vbe_output": torch.empty(1),
            "vbe_output_offsets": torch.zeros(4, 1, dtype=torch.int64),
            "batch_size_per_feature_per_rank": [[1], [1], [1], [1]],
        },
    ),
}


@pytest.mark.parametrize("message", CALLS)
def test_wrong_calls_change_nothing(message: str) -> None:
    emb = make(ours, **SGD)
    kind, changes = CALLS[message]
    call = {"indices": torch.tensor([99]), "offsets": torch.tensor([0, 1, 1, 1, 1]), **changes}
    before = [t.clone() for t in states(emb)]
    with pytest.raises(kind, match=message):
        emb(**call)
    assert all(torch.equal(a, b) for a, b in zip(before, states(emb), strict=True))
    assert call["indices"] == [1] or call["indices"].tolist() == [99], "the caller's ids must be as they were"


def test_variable_batches_of_two_modules_share_an_output() -> None:
    """Each writes its parts where the offsets say, and both train as they do with outputs of their own."""
    sizes, dims = [[2, 3], [1, 0], [4, 2], [0, 3]], (8, 4, 4, 16)
    bags = [sum(ranks) for ranks in sizes]
    counts = torch.tensor([[of_ranks[rank] * dim for of_ranks, dim in zip(sizes, dims, strict=True)]
                           for rank in range(2)])  # fmt: skip
    both = torch.cat([counts, counts], dim=1)  # rank by rank: the first module's features, then the second's
    starts = (both.flatten().cumsum(0) - both.flatten()).view(2, 8)
    embs = [make(ours, **SGD) for _ in range(4)]
    calls = [modules.batch(seed, bags) for seed in (0, 1)]
    grad = torch.randn(int(both.sum()), generator=torch.Generator().manual_seed(2))
    shared = torch.full((int(both.sum()),), float("nan"))
    for module, (indices, offsets, _), at in zip(embs[:2], calls, starts.split(4, dim=1), strict=True):
        shared = module(
            indices, offsets, batch_size_per_feature_per_rank=sizes, vbe_output=shared, vbe_output_offsets=at
        )
    shared.backward(grad)
    for nth, (indices, offsets, _) in enumerate(calls):
        out = embs[2 + nth](indices, offsets, batch_size_per_feature_per_rank=sizes)
        parts = [(int(a), int(a + n)) for a, n in zip(starts[:, 4 * nth : 4 * nth + 4].flatten(),
                                                      counts.flatten(), strict=True)]  # fmt: skip
        assert torch.equal(out, torch.cat([shared[a:b] for a, b in parts]))
        out.backward(torch.cat([grad[a:b] for a, b in parts]))
        assert all(map(torch.equal, states(embs[nth]), states(embs[2 + nth])))
    assert not shared.isnan().any()


def test_warning_rewrites_and_trains_row_0() -> None:
    emb = make(ours, **SGD)
    indices, offsets = torch.tensor([99]), torch.tensor([0, 1, 1, 1, 1])
    before = emb.split_embedding_weights()[0].clone()
    with pytest.warns(tbe.BadLookupWarning, match="1 ids or offsets") as caught:
        emb(indices, offsets).sum().backward()
    assert caught[0].filename == __file__
    assert indices.tolist() == [0] and emb.bounds_check_warning.tolist() == [1]
    changed = (emb.split_embedding_weights()[0] != before).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [0]


def test_indices_of_an_earlier_graph_may_be_looked_up_again() -> None:
    emb = make(ours, **SGD)
    indices, offsets, _ = modules.batch(0)
    first, second = emb(indices, offsets), emb(indices, offsets)
    (first.sum() + second.sum()).backward()


def test_no_check_and_pruned_ids() -> None:
    emb = make(ours, **SGD, bounds_check_mode=ours.BoundsCheckMode.NONE)
    out = emb(torch.tensor([-1, 3]), torch.tensor([0, 1, 1, 1, 2]))
    assert not out[0, :8].any() and torch.equal(out[0, -16:], emb.split_embedding_weights()[2][3])


@pytest.mark.parametrize("optimizer", COUNTING, ids=str)
def test_optimizers_that_count_steps(optimizer: ours.OptimType) -> None:
    """The same training as the module inside, made without the drop-in; ``iter`` is the steps so far."""
    emb = make(ours, optimizer=optimizer, learning_rate=0.01, weight_decay=0.05)
    layout = emb.tables.spec.layout
    own = tbe.TableBatchedEmbeddingBags(
        layout.tables, layout.feature_table_map, optimizer=emb.tables.spec.optimizer, device="cpu"
    )
    with torch.no_grad():
        for mine, theirs in zip(own.split_embedding_weights(), emb.split_embedding_weights(), strict=True):
            mine.copy_(theirs)
    outs = train(emb, range(3))
    assert all(torch.equal(a, b) for a, b in zip(outs, train(own, range(3)), strict=True))
    assert emb.iter.tolist() == [3] and emb.state_dict()["iter"].tolist() == [3]
    assert list(emb.get_optimizer_state()[0]) == ["exp_avg", "exp_avg_sq"]
    again = make(ours, optimizer=optimizer, learning_rate=0.01, weight_decay=0.05)
    again.load_state_dict(emb.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(train(again, [3]), train(emb, [3]), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(states(again), states(emb), strict=True))
    emb.set_optimizer_step(7)
    assert emb.iter.tolist() == [7]


def test_lars() -> None:
    emb = make(ours, optimizer=ours.OptimType.LARS_SGD, learning_rate=0.1, eta=0.1)
    before = [t.clone() for t in states(emb)]
    train(emb, [0])
    assert not all(torch.equal(a, b) for a, b in zip(before, states(emb), strict=True))
    assert list(emb.get_optimizer_state()[0]) == ["momentum_buffer"]


def test_a_weighted_mean_steps_by_what_its_forward_divides() -> None:
    """FBGEMM's CPU backward leaves the bag's length out here; autograd of the formula is the judge."""
    emb = make(ours, **SGD, pooling_mode=ours.PoolingMode.MEAN)
    tables = [t.double().requires_grad_() for t in emb.split_embedding_weights()]
    indices, offsets, weights = modules.batch(0)
    samples, exact = weights.clone().requires_grad_(), weights.double().requires_grad_()
    bags = []
    for feature, table in enumerate(modules.MAP):
        for bag in range(feature * modules.BAGS, (feature + 1) * modules.BAGS):
            piece = slice(int(offsets[bag]), int(offsets[bag + 1]))
            rows = tables[table][indices[piece]] * exact[piece, None]
            bags.append(rows.sum(dim=0) / max(1, len(rows)))
    wanted = torch.cat(
        [torch.stack(bags[f * modules.BAGS : (f + 1) * modules.BAGS]) for f in range(len(modules.MAP))], dim=1
    )
    out = emb(indices, offsets, samples)
    grad = torch.randn(out.shape)
    out.backward(grad)
    wanted.backward(grad.double())
    assert_near([out.detach().double(), samples.grad.double()], [wanted.detach(), exact.grad], 1e-5)
    stepped = [(t - 0.1 * t.grad).detach() for t in tables]
    assert_near([w.double() for w in emb.split_embedding_weights()], stepped, 1e-5)


def test_hyper_parameters() -> None:
    emb = make(ours, optimizer=ours.OptimType.ADAM)
    emb.set_learning_rate(0.5)
    emb.update_hyper_parameters({"eps": 0.25, "beta1": 0.125, "weight_decay": 0.0625})
    assert emb.get_learning_rate() == 0.5 and emb.optimizer_args.beta1 == 0.125
    assert emb.tables.hyper.tolist() == pytest.approx([0.5, 0.125, 0.999, 0.25, 0.0625])
    with pytest.raises(NotImplementedError, match=r"momentum=0\.5"):
        emb.update_hyper_parameters({"eps": 0.75, "momentum": 0.5})
    assert emb.tables.hyper[3] == 0.25
    make(ours, **SGD).update_hyper_parameters({"eps": 0.5})  # SGD reads none
    rowwise = make(ours, optimizer=ours.OptimType.EXACT_ROWWISE_ADAGRAD)
    rowwise.update_hyper_parameters({"weight_decay": 0.5})
    assert rowwise.tables.hyper[2] == 0


def test_flat_tensors_write_through_or_are_refused() -> None:
    one = make(ours, ((10, 8), (5, 8)), feature_table_map=[0, 1], optimizer=ours.OptimType.EXACT_ROWWISE_ADAGRAD)
    one.weights_host.fill_(2.0)
    one.momentum1_host[10:].fill_(3.0)
    assert bool((one.split_embedding_weights()[1] == 2).all())
    assert one.split_optimizer_states()[1][0].tolist() == [3.0] * 5
    assert one.get_optimizer_buffer("momentum1_host").numel() == 15 and one.weights_dev.numel() == 0
    with pytest.raises(AttributeError, match="split_embedding_weights"):
        _ = make(ours).weights_host
    with pytest.raises(AttributeError, match="weights_nowhere"):
        _ = one.weights_nowhere


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_train_alone_and_alike(how: str) -> None:
    emb = make(ours, optimizer=ours.OptimType.ADAM)
    train(emb, [0])
    if how == "deepcopy":
        other = copy.deepcopy(emb)
    else:
        file = io.BytesIO()
        torch.save(emb, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    train(emb, [1])
    assert not torch.equal(emb.split_embedding_weights()[0], other.split_embedding_weights()[0])
    train(other, [1])
    assert all(torch.equal(a, b) for a, b in zip(states(emb), states(other), strict=True))


BROKEN: dict[str, Any] = {
    "weights_host is": torch.zeros(3),
    "momentum1_host is a list": [1.0],
    "D_offsets=": torch.tensor([0, 8, 12, 16, 33], dtype=torch.int32),
    "weights_placements=": torch.zeros(4, dtype=torch.int32),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_wrong_checkpoint_changes_nothing(message: str) -> None:
    emb = make(ours, optimizer=ours.OptimType.EXACT_ROWWISE_ADAGRAD)
    name = message.split("=")[0].split(" ")[0]
    saved = {n: v + 1 if n.endswith("_host") else v for n, v in emb.state_dict().items()}
    before = [t.clone() for t in states(emb)]
    with pytest.raises(RuntimeError, match=message):
        emb.load_state_dict({**saved, name: BROKEN[message]})
    assert all(torch.equal(a, b) for a, b in zip(before, states(emb), strict=True))


def test_missing_and_unexpected_keys() -> None:
    emb = make(ours)
    saved = emb.state_dict()
    del saved["weights_host"]
    found = emb.load_state_dict({**saved, "tables.weights": torch.zeros(1)}, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["weights_host"], ["tables.weights"])


def test_a_part_of_a_model_keeps_its_prefix() -> None:
    model = torch.nn.ModuleDict({"emb": make(ours), "over": torch.nn.Linear(1, 1)})
    assert {n.split(".")[0] for n in model.state_dict()} == {"emb", "over"}
    other = torch.nn.ModuleDict({"emb": make(ours), "over": torch.nn.Linear(1, 1)})
    train(model["emb"], [0])
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(states(model["emb"]), states(other["emb"]), strict=True))


@pytest.mark.parametrize("mode", ["WARNING", "IGNORE", "NONE"])
def test_compiled_without_a_graph_break(mode: str) -> None:
    """Bad ids are row 0 in the graph too and are counted; the caller's tensors stay and no warning is given."""
    options = {**SGD, "bounds_check_mode": ours.BoundsCheckMode[mode]}
    eager, other = make(ours, **options), make(ours, **options)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        indices, offsets, weights = modules.batch(seed)
        if mode != "NONE":
            indices[0] = 99
        again, given = indices.clone(), indices.tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tbe.BadLookupWarning)
            left, right = eager(indices, offsets, weights), compiled(again, offsets, weights)
        left.sum().backward()
        right.sum().backward()
        assert torch.equal(left, right) and again.tolist() == given
        assert torch.equal(eager.bounds_check_warning, other.bounds_check_warning)
    assert all(torch.equal(a, b) for a, b in zip(states(eager), states(other), strict=True))


def test_lookups_in_no_bag() -> None:
    emb = make(ours, **SGD, pooling_mode=ours.PoolingMode.MEAN)
    out = emb(torch.tensor([5, 3, 4]), torch.tensor([1, 3, 3, 3, 3]), torch.ones(3))
    torch.testing.assert_close(out[0, :8].detach(), emb.split_embedding_weights()[0][3:5].mean(dim=0))
    specs = ((10, 8), (5, 8))
    flat = make(ours, specs, feature_table_map=[0, 1], pooling_mode=ours.PoolingMode.NONE)
    with pytest.raises(ValueError, match=r"offsets\[0\]=1 without pooling"):
        flat(torch.tensor([5, 3]), torch.tensor([1, 2, 2]))


def test_prefetch_is_the_bounds_check_alone() -> None:
    emb = make(ours, **SGD)
    indices, offsets = torch.tensor([99]), torch.tensor([0, 1, 1, 1, 1])
    with pytest.warns(tbe.BadLookupWarning):
        emb.prefetch(indices, offsets)
    assert indices.tolist() == [0]
    emb.flush()
    emb.reset_cache_states()


def test_dense_gradient_masks_and_variable_batch() -> None:
    specs = list(modules.SPECS)
    emb = modules.filled(
        ours.DenseTableBatchedEmbeddingBagsCodegen(specs, feature_table_map=list(modules.MAP), use_cpu=True)
    )
    indices, offsets, weights = modules.batch(0)
    plain, masked = weights.clone().requires_grad_(), weights.clone().requires_grad_()
    emb(indices, offsets, plain).sum().backward()
    emb(indices, offsets, masked, feature_requires_grad=torch.tensor([0, 1, 1, 1])).sum().backward()
    first = int(offsets[modules.BAGS])
    assert first and not masked.grad[:first].any() and torch.equal(masked.grad[first:], plain.grad[first:])
    emb.weights.grad = None
    sizes = [[modules.BAGS]] * len(modules.MAP)
    together = emb(indices, offsets)
    flat = emb(indices, offsets, batch_size_per_feature_per_rank=sizes)
    wanted = torch.cat([piece.flatten() for piece in together.split([8, 4, 4, 16], dim=1)])
    assert torch.equal(flat, wanted)
    flat.sum().backward()
    assert int((emb.weights.grad != 0).sum()) > 0


@pytest.mark.parametrize("location", [HOST, ours.EmbeddingLocation.DEVICE])
def test_relocated_checkpoints(location: ours.EmbeddingLocation) -> None:
    emb = make(ours, optimizer=ours.OptimType.ADAM)
    train(emb, [0])
    moved = convert.relocated(emb.state_dict(), location)
    assert convert.location_of(moved) is location
    again = make(ours, optimizer=ours.OptimType.ADAM)
    again.load_state_dict(convert.relocated(moved, HOST))
    assert all(torch.equal(a, b) for a, b in zip(states(again), states(emb), strict=True))


def test_conversion_refuses_what_does_not_fit() -> None:
    saved = make(ours, optimizer=ours.OptimType.EXACT_ROWWISE_ADAGRAD).state_dict()
    with pytest.raises(ValueError, match=r"momentum1_host has 67 values: expected 392"):
        convert.to_native(saved, tbe.Adagrad())
    with pytest.raises(ValueError, match="rows_per_table"):
        convert.to_native({n: v for n, v in saved.items() if n != "rows_per_table"}, tbe.RowwiseAdagrad())
    with pytest.raises(ValueError, match="weights_host, weights_dev"):
        convert.location_of({**saved, "weights_dev": torch.ones(1)})


def test_converted_files(tmp_path: Any) -> None:
    emb = make(ours, optimizer=ours.OptimType.EXACT_ROWWISE_ADAGRAD)
    train(emb, [0])
    source, target = tmp_path / "theirs.pt", tmp_path / "mine.pt"
    torch.save({f"model.emb.{n}": v for n, v in emb.state_dict().items()} | {"over": torch.ones(2)}, source)
    app = CliRunner()
    options = [
        "--to",
        "native",
        "--optimizer",
        "rowwise_adagrad",
        "--hyper",
        "lr=0.5",
        "--hyper",
        "eps=0.25",
        "--prefix",
        "model.emb.",
    ]
    done = app.invoke(convert.app, [str(source), str(target), *options])
    assert done.exit_code == 0, done.output
    made = torch.load(target, weights_only=True)
    assert torch.equal(made.pop("over"), torch.ones(2))
    layout = emb.tables.spec.layout
    own = tbe.TableBatchedEmbeddingBags(
        layout.tables, layout.feature_table_map, optimizer=tbe.RowwiseAdagrad(lr=0.1), device="cpu"
    )
    own.load_state_dict({n.removeprefix("model.emb."): v for n, v in made.items()})
    assert own.hyper[:2].tolist() == [0.5, 0.25]
    mine = [
        (w, s["sum"]) for w, s in zip(own.split_embedding_weights(), own.split_optimizer_states(), strict=True)
    ]
    theirs = zip(emb.split_embedding_weights(), emb.split_optimizer_states(), strict=True)
    assert all(torch.equal(a, c) and torch.equal(b, d[0]) for (a, b), (c, d) in zip(mine, theirs, strict=True))
    for wrong in (
        ["--to", "native"],
        [*options, "--hyper", "momentum=1"],
        [*options, "--hyper", "lr=x"],
        ["--to", "moon"],
        ["--to", "dev", "--prefix", "model."],
    ):
        assert app.invoke(convert.app, [str(source), str(target), *wrong]).exit_code == 2
