"""What the tests of the FBGEMM drop-in share: the real modules, if they can be imported, and inputs for both."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import tbe.compat.fbgemm as ours

try:
    import fbgemm_gpu.split_table_batched_embeddings_ops_training as training
except (ImportError, OSError) as error:  # OSError: a library built for another torch
    REAL, WHY = None, f"fbgemm_gpu cannot be imported: {error}"
else:
    REAL, WHY = training, ""

needs_fbgemm = pytest.mark.skipif(REAL is None, reason=WHY)
SPECS = ((10, 8), (50, 4), (7, 16))
MAP = (0, 1, 1, 2)
"""Table 1 has two features. FBGEMM's CPU module wants the features of a table side by side."""
BAGS = 6


def make(module: Any, specs: Sequence[tuple[int, int]] = SPECS, **options: Any) -> Any:
    """The module's class on the CPU, with the same rows every time."""
    host, cpu = ours.EmbeddingLocation.HOST, ours.ComputeDevice.CPU
    if module is REAL:
        host, cpu = training.EmbeddingLocation.HOST, training.ComputeDevice.CPU
    full = [(rows, dim, host, cpu) for rows, dim in specs]
    made = module.SplitTableBatchedEmbeddingBagsCodegen(full, **{"feature_table_map": list(MAP), **options})
    return filled(made)


def filled(module: Any) -> Any:
    torch.manual_seed(1)
    module.init_embedding_weights_uniform(-1.0, 1.0)
    return module


def batch(
    seed: int,
    bags: Sequence[int] = (BAGS,) * len(MAP),
    specs: Sequence[tuple[int, int]] = SPECS,
    feature_map: Sequence[int] = MAP,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Indices, offsets and weights; bags of 0 to 4 ids, ``bags[f]`` of them for feature f."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (sum(bags),), generator=draw)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ends = offsets[[0, *itertools.accumulate(bags)]].tolist()
    ids = [
        torch.randint(0, specs[table][0], (last - first,), generator=draw)
        for table, first, last in zip(feature_map, ends, ends[1:], strict=False)
    ]
    indices = torch.cat(ids)
    return indices, offsets, torch.rand(len(indices), generator=draw) + 0.5


def train(module: Any, steps: Sequence[int], weighted: bool = False, **options: Any) -> list[torch.Tensor]:
    """One step a seed; everything that comes out: outputs, then gradients of the weights."""
    found = []
    bags = [sum(ranks) for ranks in options.get("batch_size_per_feature_per_rank", ())] or (BAGS,) * len(MAP)
    for seed in steps:
        indices, offsets, weights = batch(seed, bags)
        samples = weights.requires_grad_() if weighted else None
        out = module(indices, offsets, samples, **options)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
        out.backward(grad.to(out.dtype))
        found += [out.detach(), *([] if samples is None else [samples.grad])]
    return found


def states(module: Any) -> list[torch.Tensor]:
    """Tables and optimizer states, in order."""
    return [*module.split_embedding_weights(), *itertools.chain(*module.split_optimizer_states())]


def assert_near(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor], tolerance: float) -> None:
    """Same shapes and dtypes; values within the tolerance, relative above 1 and absolute below."""
    assert len(left) == len(right)
    for mine, theirs in zip(left, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
