"""Random and hand-made problems, and the one way to run a problem and compare it with the reference."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from judge import Call, consult, same_bits

import tbe
from tbe import policy, registry
from tbe.eager import clipped
from tbe_core import Absent, DeviceConfig, Lookup, Optimizer, Table, Training
from tbe_core.dtypes import INDEX_DTYPES, OUTPUT_DTYPES, SAMPLE_WEIGHT_DTYPES, WEIGHT_DTYPES
from tbe_core.optimizers import REGISTRY, WEIGHT_DECAY_MODES
from tbe_core.types import BOUNDS_CHECK_MODES, POOLING_MODES

F32 = torch.float32
STEPS_BEFORE = (0, 1, 7, 300, 10**6, 2**33)
"""Steps that a module with used states has taken."""
PLAIN_SGD = tbe.SGD(lr=0.5)


@dataclass(frozen=True)
class Trial:
    """A module and the inputs of one step. Tables, states and the output's gradient follow from ``seed``."""

    tables: tuple[Table, ...]
    feature_table_map: tuple[int, ...]
    indices: torch.Tensor
    offsets: torch.Tensor
    per_sample_weights: torch.Tensor | None = None
    pooling: Any = "sum"
    optimizer: Optimizer = PLAIN_SGD
    weights_dtype: torch.dtype = F32
    output_dtype: torch.dtype = F32
    bounds_check: Any = "warn"
    weights_need_grad: bool = True
    fresh_state: bool = False
    """States start at zero, as in a new module; otherwise at uniform [0, 1)."""
    seed: int = 0
    stochastic_rounding: bool = False
    gradient_clipping: float | None = None
    frozen: tuple[int, ...] = ()

    def module(self, backend: str, device: str) -> tbe.TableBatchedEmbeddingBags:
        """A module with normal(0, 1) rows: an update of lr 0.5 then changes a row by its own size."""
        emb = tbe.TableBatchedEmbeddingBags(
            self.tables,
            self.feature_table_map,
            self.pooling,
            optimizer=self.optimizer,
            weights_dtype=self.weights_dtype,
            output_dtype=self.output_dtype,
            bounds_check=self.bounds_check,
            backend=backend,
            device=device,
            stochastic_rounding=self.stochastic_rounding,
            rounding_seed=self.seed,
            gradient_clipping=self.gradient_clipping,
        )
        emb.freeze(*(self.tables[t].name for t in self.frozen))
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            # The whole storage, padding between tables included: a write there must show.
            emb.weights.copy_(torch.randn(emb.weights.shape, generator=generator))
            for state in emb.states:
                state.copy_(torch.rand(state.shape, generator=generator) * (not self.fresh_state))
            if emb.counter is not None and not self.fresh_state:
                emb.counter[0] = STEPS_BEFORE[self.seed % len(STEPS_BEFORE)]
        return emb

    def call(self, positive: bool = False) -> Call:
        """Inputs with a gradient normal(0, 1), or uniform [0, 1)."""
        spec = self.module("cpu", "cpu").spec
        batch = (self.offsets.numel() - 1) // len(self.feature_table_map)
        height = self.indices.numel() if self.pooling == "none" else batch
        generator = torch.Generator().manual_seed(self.seed + 1)
        draw = torch.rand if positive else torch.randn
        grad = draw((height, spec.output_width), generator=generator).to(self.output_dtype)
        return Call(self.indices, self.offsets, self.per_sample_weights, grad)


def offsets_of(lengths: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """``[T*B+1]`` offsets from bag lengths, feature-major."""
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def from_runs(runs: list[int], bags: int, dim: int, seed: int = 0, **options: Any) -> Trial:
    """One table; row ``r`` is looked up ``runs[r]`` times, shuffled over ``bags`` bags of about equal length."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(len(runs)), torch.tensor(runs))
    ids = ids[torch.randperm(len(ids), generator=generator)]
    ends = torch.linspace(0, len(ids), bags + 1).long()
    return Trial((Table("t", len(runs), dim),), (0,), ids, ends, seed=seed, **options)


@dataclass
class Outcome:
    out: torch.Tensor
    weight_grad: torch.Tensor | None


def step(
    emb: tbe.TableBatchedEmbeddingBags, call: Call, need_grad: bool = True, config: DeviceConfig | None = None
) -> Outcome:
    """One forward and backward; asserts that no tensor of the caller changes.

    With ``config`` the backend is called by its contract, with those thresholds in the plan.
    """
    device = emb.weights.device
    given = {name: getattr(call, name) for name in ("indices", "offsets", "per_sample_weights", "grad")}
    passed = {name: None if t is None else t.to(device, copy=True) for name, t in given.items()}
    weights = passed["per_sample_weights"]
    if config is not None:
        outcome = _step_by_contract(emb, passed, config)
    else:
        if weights is not None:
            weights.requires_grad_(need_grad)
        out = emb(passed["indices"], passed["offsets"], weights)
        if out.requires_grad:
            out.backward(passed["grad"])
        else:
            assert not emb.spec.trained, "nothing is frozen, and no backward"
        outcome = Outcome(out.detach(), None if weights is None else weights.grad)
    for name, tensor in given.items():
        if tensor is not None:
            kept = torch.allclose(passed[name].detach().cpu(), tensor, rtol=0, atol=0, equal_nan=True)
            assert kept, f"{name} of the caller was changed"
    return outcome


def _step_by_contract(
    emb: tbe.TableBatchedEmbeddingBags, passed: dict[str, Any], config: DeviceConfig
) -> Outcome:
    indices, offsets, weights = passed["indices"], passed["offsets"], passed["per_sample_weights"]
    problem = emb.spec.problem(indices.dtype, offsets.dtype, weights is not None)
    plan = policy.plan_for(problem, emb.weights.device, policy.request(emb.requested_backend))
    backend = registry.load(plan.backend)
    assert not isinstance(backend, Absent)
    plan = replace(plan, config=config)
    lookup = Lookup(emb.spec, plan, emb.weights.data, indices, offsets, weights)
    out, carry = backend.forward(lookup, True)
    grad = clipped(emb.spec, passed["grad"])
    weight_grad = None if weights is None else backend.per_sample_weight_grad(lookup, grad)
    training = Training(tuple(emb.states), emb.hyper, emb.counter)
    training.advance()
    backend.backward_update(lookup, grad, training, carry)
    return Outcome(out, weight_grad)


def step_and_compare(
    emb: tbe.TableBatchedEmbeddingBags, call: Call, need_grad: bool = True, config: DeviceConfig | None = None
) -> None:
    """One step from the module's present state, judged: output, weight gradient, tables, states, and that
    nothing but the touched rows has changed."""
    tables, states = emb.split_embedding_weights(), emb.split_optimizer_states()
    step_number = 1 if emb.counter is None else int(emb.counter[0]) + 1
    verdict = consult(emb.spec, tables, states, emb.hyper.tolist(), call, step_number)
    before = [emb.weights.detach().cpu().clone(), *(s.cpu().clone() for s in emb.states)]
    counted = int(emb.bad[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = step(emb, call, need_grad, config)
        if emb.spec.bounds_check == "warn" and config is None:
            emb.flush()
    if config is None:
        _check_warnings(emb, call, caught, int(emb.bad[0]) - counted)
    assert outcome.out.dtype == emb.spec.output_dtype and outcome.out.device == emb.weights.device
    verdict.judge_output(outcome.out)
    if call.per_sample_weights is not None and (need_grad or config is not None):
        assert outcome.weight_grad is not None
        verdict.judge_weight_grad(outcome.weight_grad)
    else:
        assert outcome.weight_grad is None
    verdict.judge_tables(tables)
    verdict.judge_states(states)
    # Where every table is frozen the module takes no step.
    stepped = config is not None or bool(emb.spec.trained)
    assert emb.counter is None or int(emb.counter[0]) == step_number - (not stepped)
    _check_untouched(emb, before, verdict.touched)


def bad_ids(emb: tbe.TableBatchedEmbeddingBags, call: Call) -> int:
    """Ids outside [-1, rows of their table)."""
    layout, ends = emb.spec.layout, call.offsets.tolist()
    batch = (len(ends) - 1) // layout.features
    found = 0
    for feature in range(layout.features):
        ids = call.indices[ends[feature * batch] : ends[(feature + 1) * batch]]
        found += int(((ids < -1) | (ids >= layout.feature_table(feature).rows)).sum())
    return found


def _check_warnings(emb: tbe.TableBatchedEmbeddingBags, call: Call, caught: list[Any], counted: int) -> None:
    bad = bad_ids(emb, call) if emb.spec.bounds_check == "warn" else 0
    assert counted == bad, f"{counted} bad ids were counted, expected {bad}"
    warned = [w for w in caught if issubclass(w.category, tbe.BadLookupWarning)]
    assert bool(warned) == bool(bad), f"{bad} bad ids, {len(warned)} warnings"
    for other in caught:
        if other not in warned:
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)


def _check_untouched(
    emb: tbe.TableBatchedEmbeddingBags, before: list[torch.Tensor], touched: list[list[int]]
) -> None:
    """Everything but the touched rows is bit-identical, in tables, states and the padding between tables."""
    layout = emb.spec.layout
    elements = torch.ones(layout.total_elements, dtype=torch.bool)
    rows = torch.ones(layout.total_rows, dtype=torch.bool)
    for t, table in enumerate(layout.tables):
        for row in touched[t]:
            at = layout.element_bases[t] + row * table.dim
            elements[at : at + table.dim] = False
            rows[layout.row_bases[t] + row] = False
    for was, now in zip(before, [emb.weights.detach(), *emb.states], strict=True):
        keep = elements if now.numel() == layout.total_elements else rows
        assert same_bits(now.cpu()[keep], was[keep]), "a row that nobody looked up was changed"


def run_and_compare(trial: Trial, backend: str, device: str, config: DeviceConfig | None = None) -> None:
    """Make the module of ``trial``, step it once and judge everything."""
    step_and_compare(trial.module(backend, device), trial.call(), trial.weights_need_grad, config)


DIMS = st.one_of(st.integers(1, 40), st.sampled_from((64, 100, 128, 200, 256)))


@st.composite
def optimizers(draw: st.DrawFn) -> Optimizer:
    """Any optimizer with any of its options; half of them are the two that are used most."""
    kind = draw(st.sampled_from((tbe.SGD, tbe.RowwiseAdagrad) * 3 + tuple(REGISTRY.values())))
    options: dict[str, Any] = {}
    for name in kind.HYPER:
        if name in CHOICES:
            options[name] = draw(st.sampled_from(CHOICES[name]))
    if kind is tbe.RowwiseAdagrad:
        mode = draw(st.sampled_from(WEIGHT_DECAY_MODES))
        options["weight_decay_mode"] = mode
        options["weight_decay"] = 0.0 if mode == "none" else draw(st.sampled_from((0.1, 0.5)))
    return kind(lr=0.5, **options)


CHOICES: dict[str, tuple[float, ...]] = {
    "eps": (1e-8, 1e-3),
    "beta1": (0.9, 0.0, 0.4),
    "beta2": (0.999, 0.0, 0.9999, 0.3),
    "weight_decay": (0.0, 0.1, 0.5),
    "max_norm": (0.0, 0.5, 3.0),
    "eta": (0.01, 0.5),
    "momentum": (0.9, 0.0),
}
"""Values of hyper-parameters that tests draw from."""


@st.composite
def trials(draw: st.DrawFn) -> Trial:
    """Any problem of the contract that is small: see the fields of ``Trial``."""
    pooling = draw(st.sampled_from(POOLING_MODES))
    count = draw(st.integers(1, 4))
    dims = draw(st.lists(DIMS, min_size=count, max_size=count))
    if pooling == "none" or draw(st.booleans()):
        dims = [dims[0]] * count
    tables = tuple(Table(f"t{i}", draw(st.integers(1, 60)), dim) for i, dim in enumerate(dims))
    features = tuple(draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=5)))
    bags = len(features) * draw(st.integers(0, 6))
    lengths = draw(st.lists(st.integers(0, 9), min_size=bags, max_size=bags))
    if bags and draw(st.booleans()):
        lengths[draw(st.integers(0, bags - 1))] = draw(st.integers(20, 300))
    mode = draw(st.sampled_from(BOUNDS_CHECK_MODES))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    rows_of = [tables[t].rows for t in features for _ in range(bags // len(features))]
    indices = _draw_ids(
        [r for r, length in zip(rows_of, lengths, strict=True) for _ in range(length)],
        few=draw(st.booleans()),
        bad=mode in ("warn", "ignore") and draw(st.booleans()),
        generator=generator,
    )
    weights = None
    if pooling != "none" and draw(st.booleans()):
        weights = torch.randn(len(indices), generator=generator).to(draw(st.sampled_from(SAMPLE_WEIGHT_DTYPES)))
    weights_dtype = draw(st.sampled_from(WEIGHT_DTYPES))
    return Trial(
        tables,
        features,
        indices.to(draw(st.sampled_from(INDEX_DTYPES))),
        offsets_of(lengths, draw(st.sampled_from(INDEX_DTYPES))),
        weights,
        pooling,
        draw(optimizers()),
        weights_dtype,
        draw(st.sampled_from(OUTPUT_DTYPES)),
        mode,
        draw(st.booleans()),
        draw(st.booleans()),
        seed,
        weights_dtype != F32 and draw(st.booleans()),
        draw(st.sampled_from((None, None, 0.4, 1e-3, 1e6))),
        tuple(t for t in range(count) if draw(st.sampled_from((False, False, True)))),
    )


def _draw_ids(rows: list[int], few: bool, bad: bool, generator: torch.Generator) -> torch.Tensor:
    """One id for every entry of ``rows``: uniform or from two rows, -1 here and there, and bad ones if asked."""
    limit = torch.tensor(rows, dtype=torch.int64)
    drawn = torch.randint(0, 2**31, limit.shape, generator=generator)
    ids = drawn % (limit.clamp(max=2) if few else limit)
    kind = torch.rand(limit.shape, generator=generator)
    ids = torch.where(kind < 0.05, -1, ids)
    if bad:
        # Just past the end, far past it, and far below zero.
        for part, value in enumerate((limit, limit + 7, torch.full_like(limit, 2**31 - 1), -limit - 1)):
            ids = torch.where((kind > 0.8 + 0.05 * part) & (kind <= 0.85 + 0.05 * part), value, ids)
    return ids
