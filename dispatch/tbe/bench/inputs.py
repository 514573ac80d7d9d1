"""Inputs of a workload, generated on the device itself: 84M lookups take well under a second there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tbe.bench.workloads import DISTINCT, ZIPF, Workload

SETS = 3  # in rotation, so that one batch's rows are not what the caches hold from the pass before

_STRIDE = 7919  # a prime: arange(n) * 7919 mod rows has no row twice while n <= rows
_SCATTER, _SHIFT = 2_654_435_761, 12_345  # Knuth's multiplicative hash: hot rows are not neighbours


@dataclass(frozen=True)
class Inputs:
    """One batch. ``indices`` [N], ``offsets`` [T*B+1] feature-major, both of the workload's index dtype;
    ``per_sample_weights`` [N] fp32 or None; ``grad`` [B, sum of dims] in the output dtype."""

    indices: Tensor
    offsets: Tensor
    per_sample_weights: Tensor | None
    grad: Tensor


def make_inputs(workload: Workload, device: torch.device, seed: int) -> Inputs:
    """One batch of ``workload`` on ``device``; the same seed gives the same batch on the same kind of device.

    Weights are uniform [0, 1), gradients normal with standard deviation 1e-3. For ``distinct`` ids the seed
    picks where the sequence starts, so that batches of consecutive seeds share no row while rows last.
    """
    generator = torch.Generator(device).manual_seed(seed)
    lengths = _lengths(workload, device, generator)
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=device)
    torch.cumsum(lengths.flatten(), 0, out=offsets[1:])
    ends = [0, *offsets[workload.batch :: workload.batch].tolist()]
    indices = torch.empty(ends[-1], dtype=workload.index_dtype, device=device)
    for feature in range(workload.features):
        begin, end = ends[feature], ends[feature + 1]
        indices[begin:end] = _ids(workload, workload.rows[feature], end - begin, generator, seed)
    weights = torch.rand(ends[-1], device=device, generator=generator) if workload.weighted else None
    grad = torch.empty(workload.batch, workload.columns[-1], dtype=workload.output_dtype, device=device)
    grad.normal_(0.0, 1e-3, generator=generator)
    return Inputs(indices, offsets.to(workload.index_dtype), weights, grad)


def make_input_sets(workload: Workload, device: torch.device, seed: int) -> list[Inputs]:
    """The ``SETS`` batches that measurements rotate through."""
    return [make_inputs(workload, device, seed + number) for number in range(SETS)]


def feature_bounds(workload: Workload, offsets: Tensor) -> list[int]:
    """T+1 positions in ``indices``: feature t's lookups are ``[bounds[t], bounds[t + 1])``."""
    return [int(value) for value in offsets[:: workload.batch].tolist()]


def _lengths(workload: Workload, device: torch.device, generator: torch.Generator) -> Tensor:
    """Lookups a bag, int64 [T, B]."""
    shape = (workload.features, workload.batch)
    mean = torch.tensor(workload.lengths, device=device).unsqueeze(1)
    if not workload.varying:
        return mean.expand(shape).contiguous()
    unit = torch.rand(shape, dtype=torch.float64, device=device, generator=generator)
    return (unit * (2 * mean + 1)).long().clamp_(max=2 * int(mean.max()))


def _ids(workload: Workload, rows: int, count: int, generator: torch.Generator, seed: int) -> Tensor:
    """``count`` row numbers in [0, rows), int64."""
    device = generator.device
    if workload.ids == DISTINCT:
        start = seed * count % rows
        return (torch.arange(count, device=device) + start).mul_(_STRIDE).remainder_(rows)
    if workload.ids == ZIPF:
        rank = zipf_ranks(rows, workload.zipf_exponent, count, generator)
        return rank.mul_(_SCATTER).add_(_SHIFT).remainder_(rows)
    return torch.randint(0, rows, (count,), device=device, generator=generator)


def zipf_ranks(rows: int, exponent: float, count: int, generator: torch.Generator) -> Tensor:
    """``count`` ranks in [0, rows), int64, rank 0 the most frequent: a bounded power law by inverse CDF,

    rank = floor((u * ((rows + 1)^(1 - a) - 1) + 1)^(1 / (1 - a)) - 1), u uniform in [0, 1), in fp64.
    """
    power = 1.0 - exponent
    unit = torch.rand(count, dtype=torch.float64, device=generator.device, generator=generator)
    unit.mul_((rows + 1) ** power - 1.0).add_(1.0).pow_(1.0 / power).sub_(1.0)
    return unit.floor_().long().clamp_(0, rows - 1)
