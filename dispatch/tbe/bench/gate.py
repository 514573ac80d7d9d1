"""The correctness gate: no figure of an operator is kept unless one step of it was right on a sample.

From a known start (``implementations.load``), one forward and backward run; the output of sampled bags
and the weights and state of sampled rows are compared with an fp64 computation of just those on the
device. The sample of rows always has the most looked-up row of every table, and rows that were not looked
up at all, which must come out bit-identical.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tbe.bench.implementations import Built
from tbe.bench.inputs import Inputs, feature_bounds
from tbe.bench.profile import Profile
from tbe.bench.workloads import Workload
from tbe_core.optimizers import Hyper

SAMPLE = 4096  # bags and rows over all features
_LEAST = 64  # bags and rows a feature, however many features there are
_CHUNK = 1 << 24  # fp64 elements of one temporary: 128 MiB

FORWARD_TOLERANCE = {torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 8e-3}
STATE_TOLERANCE = 1e-4
UPDATE_TOLERANCE = 1e-4
ARITHMETIC = 2.5e-7  # of a weight's magnitude before and after: four roundings of the step in fp32


@dataclass(frozen=True)
class FeatureSample:
    """Sampled lookups of one feature and table. ``bags`` [S] of the batch; ``lookup_rows``,
    ``lookup_bag`` and ``lookup_scale`` [n] list those bags' lookups: row, position in ``bags`` and fp64
    factor. ``rows`` [R] are the sampled rows, ``touched`` [R] whether any lookup names them, ``gradient``
    [R, D] their fp64 sums."""

    bags: Tensor
    lookup_rows: Tensor
    lookup_bag: Tensor
    lookup_scale: Tensor
    rows: Tensor
    touched: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Verdict:
    """``forward_error`` and ``state_error`` are relative to the sum of magnitudes and to the state,
    ``weight_error`` is in units of what the table's dtype allows (1 is the limit). ``reason`` is None
    when all are within tolerance. The worst over the sample; infinite where a result is not a number."""

    forward_error: float
    weight_error: float
    state_error: float
    reason: str | None


@torch.no_grad()
def draw(workload: Workload, inputs: Inputs, facts: Profile, seed: int) -> list[FeatureSample]:
    """Sample bags and rows of every feature and sum the rows' gradients in fp64. One sample serves every
    implementation of a workload."""
    generator = torch.Generator(inputs.indices.device).manual_seed(seed)
    bounds = feature_bounds(workload, inputs.offsets)
    count = max(_LEAST, SAMPLE // workload.features)
    return [
        _draw_feature(workload, inputs, facts, feature, (bounds[feature], bounds[feature + 1]), count, generator)
        for feature in range(workload.features)
    ]


def _draw_feature(
    workload: Workload,
    inputs: Inputs,
    facts: Profile,
    feature: int,
    span: tuple[int, int],
    count: int,
    generator: torch.Generator,
) -> FeatureSample:
    device, batch = inputs.indices.device, workload.batch
    offsets = inputs.offsets[feature * batch : (feature + 1) * batch + 1].long() - span[0]
    ids = inputs.indices[span[0] : span[1]].long()
    scale = _lookup_scale(workload, inputs, span, offsets)

    ends = torch.tensor([0, batch - 1], device=device)
    bags = torch.unique(torch.cat([ends, _random(batch, count, device, generator)]))
    starts, lengths = offsets[bags], offsets[bags + 1] - offsets[bags]
    lookup_bag = torch.repeat_interleave(torch.arange(bags.numel(), device=device), lengths)
    first = torch.cumsum(lengths, 0) - lengths
    position = torch.arange(lookup_bag.numel(), device=device) + (starts - first)[lookup_bag]

    rows = [_random(workload.rows[feature], count // 4, device, generator)]
    if ids.numel():
        rows += [ids[_random(ids.numel(), count, device, generator)]]
        rows += [torch.tensor([facts.hottest[feature]], device=device)]
    sampled = torch.unique(torch.cat(rows))
    column = workload.columns[feature]
    grad = inputs.grad[:, column : column + workload.dims[feature]]
    gradient, hits = _sum_gradients(ids, offsets, scale, grad, sampled)
    return FeatureSample(bags, ids[position], lookup_bag, scale[position], sampled, hits > 0, gradient)


def _random(limit: int, count: int, device: torch.device, generator: torch.Generator) -> Tensor:
    return torch.randint(0, limit, (count,), device=device, generator=generator)


def _lookup_scale(workload: Workload, inputs: Inputs, span: tuple[int, int], offsets: Tensor) -> Tensor:
    """What each lookup of a feature is multiplied by, fp64 [n]: its weight, over the bag's length for
    mean."""
    if inputs.per_sample_weights is None:
        scale = torch.ones(span[1] - span[0], dtype=torch.float64, device=offsets.device)
    else:
        scale = inputs.per_sample_weights[span[0] : span[1]].double()
    if workload.pooling == "mean":
        lengths = offsets.diff()
        scale = scale / torch.repeat_interleave(lengths, lengths)
    return scale


def _sum_gradients(
    ids: Tensor, offsets: Tensor, scale: Tensor, grad: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradient sums [R, D] and lookup counts [R] of ``rows`` (sorted), fp64.

    Each chunk is a [R, n] selection matrix times an [n, D] block of gradients: unlike index_add_ it has no
    contention on a row that has most of the lookups, and it is repeatable.
    """
    slot = torch.searchsorted(rows, ids).clamp_(max=rows.numel() - 1)
    hit = (rows[slot] == ids).nonzero().squeeze(1)
    gradient = torch.zeros(rows.numel(), grad.shape[1], dtype=torch.float64, device=grad.device)
    hits = torch.bincount(slot[hit], minlength=rows.numel())
    wanted = torch.arange(rows.numel(), device=rows.device).unsqueeze(1)
    step = max(1, _CHUNK // max(rows.numel(), grad.shape[1]))
    for begin in range(0, hit.numel(), step):
        part = hit[begin : begin + step]
        bag = torch.searchsorted(offsets, part, right=True) - 1
        select = (slot[part] == wanted).double().mul_(scale[part])
        gradient.addmm_(select, grad[bag].double())
    return gradient, hits


@dataclass(frozen=True)
class Start:
    """A table's sampled values before the step: the sampled bags' lookups and the sampled rows."""

    lookups: Tensor
    weights: Tensor
    states: list[Tensor]


@torch.no_grad()
def remember(built: Built, sample: list[FeatureSample]) -> list[Start]:
    """Copy what the check needs of the values before the step."""
    views = zip(built.tables(), built.states(), sample, strict=True)
    return [Start(w[s.lookup_rows], w[s.rows], [state[s.rows] for state in states]) for w, states, s in views]


@torch.no_grad()
def judge(
    built: Built, workload: Workload, sample: list[FeatureSample], before: list[Start], out: Tensor
) -> Verdict:
    """Compare the output ``out`` and what ``built`` now holds with the fp64 computation, after one step."""
    forward = weight = state = 0.0
    views = zip(sample, before, built.tables(), built.states(), strict=True)
    for feature, (s, start, table, states) in enumerate(views):
        column = workload.columns[feature]
        got = out[:, column : column + workload.dims[feature]][s.bags]
        forward = max(forward, _forward_error(s, start, got))
        errors = _update_errors(workload, s, start, table[s.rows], [x[s.rows] for x in states])
        weight, state = max(weight, errors[0]), max(state, errors[1])
    return Verdict(forward, weight, state, _reason(workload, forward, weight, state))


def _reason(workload: Workload, forward: float, weight: float, state: float) -> str | None:
    limit = FORWARD_TOLERANCE[workload.output_dtype]
    wrong = []
    if forward > limit:
        wrong.append(f"forward off by {forward:.2g} of the summed magnitudes (limit {limit:g})")
    if weight > 1.0:
        wrong.append(f"weights off by {weight:.3g} times what rounding allows")
    if state > STATE_TOLERANCE:
        wrong.append(f"state off by {state:.2g} (limit {STATE_TOLERANCE:g})")
    return "; ".join(wrong) or None


def _forward_error(s: FeatureSample, start: Start, got: Tensor) -> float:
    terms = start.lookups.double() * s.lookup_scale.unsqueeze(1)
    expected = torch.zeros(got.shape, dtype=torch.float64, device=got.device)
    magnitude = expected.clone()
    expected.index_add_(0, s.lookup_bag, terms)
    magnitude.index_add_(0, s.lookup_bag, terms.abs())
    return _worst(got.double() - expected, magnitude)


def _update_errors(
    workload: Workload, s: FeatureSample, start: Start, weights: Tensor, states: list[Tensor]
) -> tuple[float, float]:
    """Worst weight error in units of the allowance, and worst relative state error, of an operator's first
    step."""
    optimizer = workload.optimizer
    # As fp32, which is what every operator computes with.
    hyper = torch.tensor(optimizer.hyper_values(), device=weights.device).double().unbind()
    before = start.weights.double()
    expected_states = [state.double() for state in start.states]
    named = {kind.name: state for kind, state in zip(optimizer.STATE, expected_states, strict=True)}
    first = torch.ones((), dtype=torch.int64, device=weights.device)
    expected = optimizer.step_rows(before.clone(), s.gradient, named, Hyper(hyper, optimizer.HYPER, first))
    allowed = torch.maximum(half_ulp(expected, weights.dtype), half_ulp(weights.double(), weights.dtype))
    allowed += ARITHMETIC * (expected.abs() + before.abs())
    # A sum with cancellation is only as good as its terms: the row's RMS stands in for small elements.
    allowed += UPDATE_TOLERANCE * _with_row(expected - before)
    touched = s.touched.unsqueeze(1)
    expected = torch.where(touched, expected, before)
    allowed = torch.where(touched, allowed, 0.0)  # untouched rows are bit-identical
    worst = 0.0
    for got, old, new in zip(states, start.states, expected_states, strict=True):
        of_row = s.touched if got.dim() == 1 else touched
        right = torch.where(of_row, new, old.double())
        slack = torch.where(of_row, new.abs() if got.dim() == 1 else _with_row(new), 0.0)
        worst = max(worst, _worst(got.double() - right, slack))
    return _worst(weights.double() - expected, allowed), worst


def _with_row(values: Tensor) -> Tensor:
    """Magnitudes [R, D], each with its row's RMS added."""
    return values.abs() + values.square().mean(dim=1, keepdim=True).sqrt()


def half_ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the spacing of ``dtype`` at ``values`` (fp64), never under that of its subnormals."""
    info = torch.finfo(dtype)
    spacing = torch.exp2((torch.frexp(values)[1] - 1).double()) * info.eps
    spacing = torch.where(values == 0, 0.0, spacing)  # frexp gives zero the exponent of 1/2
    return spacing.clamp_(min=info.tiny * info.eps) / 2


def _worst(difference: Tensor, scale: Tensor) -> float:
    """Largest |difference| / scale; 0 where there is no difference, infinite where it is not a number."""
    if not difference.numel():
        return 0.0
    ratio = torch.where(difference == 0, 0.0, difference.abs() / scale)
    return float(ratio.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
