"""The launches of the dense tier: tables of few rows, without a sort. Imports Triton."""

from __future__ import annotations

import torch

from tbe_core import Lookup, Training

from .kernels.dense import tbe_dense_step_kernel, tbe_dense_sums_kernel
from .launch import variant_of
from .launcher import Part, run
from .shapes import step_constant, step_tensors
from .tables import DenseTables, DeviceTables

BLOCK_COLUMNS = 128
BAGS = 32
LENGTH = 256
UNROLL = 10
PIECES = 16


def update_dense(
    lookup: Lookup, tables: DeviceTables, dense: DenseTables, grad: torch.Tensor, training: Training
) -> None:
    """Step the rows of the small tables."""
    plan, batch = lookup.plan, lookup.batch
    variant = (*variant_of(lookup, tables), grad.dtype, grad.data_ptr() % 16 == 0)
    count = dense.features.shape[0]
    # Enough programs for every processor, each with whole tiles of bags.
    chunks = max(min(plan.caps.processors * 4 // count, -(-batch // BAGS)), 1)
    chunk_bags = -(-batch // (chunks * BAGS)) * BAGS
    chunks = -(-batch // chunk_bags)
    rows = max(dense.rows, 16)
    block = max(min(dense.width, BLOCK_COLUMNS), 16)
    width = max(dense.width, 16)
    slots = count * chunks
    buffer = torch.empty(slots * rows * (width + 1) * 4, dtype=torch.uint8, device=grad.device)
    partials = Part(buffer, 0, slots * rows * width, torch.float32)
    touched = Part(buffer, slots * rows * width * 4, slots * rows, torch.int32)
    run(
        tbe_dense_sums_kernel,
        (slots, -(-width // block)),
        lookup.indices,
        lookup.offsets,
        grad,
        partials,
        touched,
        dense.features,
        batch,
        chunk_bags,
        chunks,
        lookup.indices.numel(),
        grad.shape[1],
        ROWS=rows,
        BAGS=BAGS,
        LENGTH=LENGTH,
        UNROLL=UNROLL,
        BLOCK_D=block,
        WIDTH=width,
        MEAN=lookup.spec.pooling == "mean",
        EXACT=plan.caps.triton_interpret,
        ALIGN=dense.align,
        num_warps=plan.config.dense_warps,
        variant=variant,
    )
    run(
        tbe_dense_step_kernel,
        (dense.row_list.shape[0],),
        *step_tensors(lookup, training),
        partials,
        touched,
        dense.row_list,
        chunks,
        ROWS=rows,
        BLOCK_D=width,
        WIDTH=width,
        PIECES=max(PIECES * 128 // max(width, 128), 1),
        num_warps=4,
        variant=variant,
        STEP=step_constant(lookup.spec),
    )
