"""The dense tier: tables of few rows, updated as counts transposed times gradient on tensor cores.

A bag's lookups in a table of R rows are R counts, found by comparing its ids with every row; so each gradient is
read once, however often its bag repeats a row, and nothing is sorted. ``features_ptr`` is int64 ``[F, 3]``:
feature, first column, dim. Slots: one a feature and chunk of bags, in that order.
"""

import triton
import triton.language as tl

from .forward import bag_range
from .row_updates import load_and_step_row


@triton.jit
def add_product(acc, counts, grad, EXACT: tl.constexpr):
    """``acc + counts @ grad``: fp32 gradients as three bf16 parts, which hold all their bits; counts up to 256
    are exact in bf16, so every product is."""
    if EXACT:
        return acc + tl.dot(counts.to(tl.float32), grad, input_precision="ieee")
    else:
        a = counts.to(tl.float32).to(tl.bfloat16)
        high = grad.to(tl.bfloat16)
        rest = grad - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(a, low, acc)
        acc = tl.dot(a, middle, acc)
        return tl.dot(a, high, acc)


LARGEST: tl.constexpr = tl.constexpr(3.38e38)
"""Up to here a number is finite in bf16 too."""


@triton.jit
def add_bag_by_bag(
    acc,
    seen,
    indices_ptr,
    offsets_ptr,
    grad_ptr,
    feature_bags,
    first,
    stop,
    lookups,
    out_width,
    column,
    cols,
    dim,
    rows,
    MEAN: tl.constexpr,
):
    """The sums of bags among whose gradients one is infinite or NaN: zero times it must be zero, so that it
    reaches only the rows of its own bag. Reads everything anew: it is rare, and must not take registers from the
    product."""
    for bag in range(first, stop):
        start, length = bag_range(offsets_ptr, feature_bags + bag, True, lookups)
        count = (rows - rows).to(tl.int32)
        for i in range(0, length):
            count += (rows == tl.load(indices_ptr + start + i)).to(tl.int32)
        at = grad_ptr + (tl.zeros([], tl.int64) + bag) * out_width + column + cols
        row = tl.load(at, mask=cols < dim, other=0.0).to(tl.float32)
        if MEAN:
            row = row / tl.maximum(length, 1).to(tl.float32)
        acc += tl.where(count[:, None] > 0, count[:, None].to(tl.float32) * row[None, :], 0.0)
        seen += count
    return acc, seen


@triton.jit(do_not_specialize=["batch", "chunk_bags", "chunks", "lookups"])
def tbe_dense_sums_kernel(
    indices_ptr,
    offsets_ptr,
    grad_ptr,
    partials_ptr,
    touched_ptr,
    features_ptr,
    batch,
    chunk_bags,
    chunks,
    lookups,
    out_width,
    ROWS: tl.constexpr,
    BAGS: tl.constexpr,
    LENGTH: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDTH: tl.constexpr,
    MEAN: tl.constexpr,
    EXACT: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Grid: (chunks of bags x features, column blocks). The gradient sums of a table's rows over one chunk of
    one feature's bags, and how often each row was looked up. LENGTH: lookups of a bag that are counted before
    a product, at most 256."""
    slot = tl.program_id(0)
    chunk = slot % chunks
    meta = features_ptr + (slot // chunks) * 3
    feature = tl.load(meta).to(tl.int32)
    column = tl.multiple_of(tl.load(meta + 1), ALIGN)
    dim = tl.load(meta + 2).to(tl.int32)
    rows = tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BAGS)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    seen = tl.zeros([ROWS], tl.int32)
    stop = tl.minimum((chunk + 1) * chunk_bags, batch)
    for first in range(chunk * chunk_bags, stop, BAGS):
        bags = first + lane
        in_chunk = bags < stop
        start, length = bag_range(offsets_ptr, feature * batch + bags, in_chunk, lookups)
        at = bags.to(tl.int64)[:, None] * out_width + column + cols[None, :]
        grad = tl.load(grad_ptr + at, mask=in_chunk[:, None] & (cols < dim)[None, :], other=0.0).to(tl.float32)
        if MEAN:
            grad = grad / tl.maximum(length, 1).to(tl.float32)[:, None]
        odd = tl.sum(tl.sum((tl.abs(grad) <= LARGEST).to(tl.int32), axis=1), axis=0) < BAGS * BLOCK_D
        if odd:
            acc, seen = add_bag_by_bag(
                acc, seen, indices_ptr, offsets_ptr, grad_ptr, feature * batch, first,
                tl.minimum(first + BAGS, stop), lookups, out_width, column, cols, dim, rows, MEAN,
            )  # fmt: skip
        else:
            longest = tl.max(length, axis=0)
            for piece in range(0, longest, LENGTH):
                counts = tl.zeros([ROWS, BAGS], tl.int32)
                end = tl.minimum(piece + LENGTH, longest)
                for i in range(piece, end, UNROLL):
                    for j in tl.static_range(UNROLL):
                        here = ((i + j) < length) & ((i + j) < end)
                        ids = tl.load(indices_ptr + start + (i + j), mask=here, other=-1)
                        ids = tl.where((ids >= 0) & (ids < ROWS), ids, -1).to(tl.int32)
                        counts += (rows[:, None] == ids[None, :]).to(tl.int32)
                acc = add_product(acc, counts, grad, EXACT)
                seen += tl.sum(counts, axis=1)
    place = partials_ptr + (slot.to(tl.int64) * ROWS + rows)[:, None] * WIDTH + cols[None, :]
    tl.store(place, acc, mask=(cols < WIDTH)[None, :])
    if tl.program_id(1) == 0:
        tl.store(touched_ptr + slot.to(tl.int64) * ROWS + rows, seen)


@triton.jit(do_not_specialize=["chunks"])
def tbe_dense_step_kernel(
    weights_ptr,
    state1_ptr,
    state2_ptr,
    hyper_ptr,
    counter_ptr,
    partials_ptr,
    touched_ptr,
    rows_ptr,
    chunks,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
):
    """Grid: rows of the small tables. Sums a row's partials in order and steps it, if it was looked up.
    ``rows_ptr`` is int64 ``[rows, 6]``: row in its table, row among all, first element, dim, first feature of
    the table in the order of slots, and how many features it has."""
    meta = rows_ptr + tl.program_id(0) * 6
    row = tl.load(meta)
    key = tl.load(meta + 1)
    element = tl.load(meta + 2)
    dim = tl.load(meta + 3).to(tl.int32)
    begin = tl.load(meta + 4) * chunks
    slots = tl.load(meta + 5) * chunks
    cols = tl.arange(0, BLOCK_D)
    mask = cols < dim
    piece = tl.arange(0, PIECES)
    total = tl.zeros([BLOCK_D], tl.float32)
    seen = tl.zeros([PIECES], tl.int32)
    for i in range(0, slots, PIECES):
        inside = (i + piece) < slots
        at = (begin + i + piece) * ROWS + row
        seen += tl.load(touched_ptr + at, mask=inside, other=0)
        tile = tl.load(
            partials_ptr + at[:, None] * WIDTH + cols[None, :], mask=inside[:, None] & mask[None, :], other=0.0
        )
        total += tl.sum(tile, axis=0)
    if tl.sum(seen, axis=0) > 0:
        tensors = (weights_ptr, state1_ptr, state2_ptr, hyper_ptr, counter_ptr)
        load_and_step_row(tensors, element, key, total, cols, dim, STEP)
