"""The forward: gather rows and pool them; and the gradient of per-sample weights, its transpose.

``features_ptr`` is int64 ``[T_g, 5]``: feature, rows, first element of the table, first column, dim.
"""

import triton
import triton.language as tl


@triton.jit
def bag_range(offsets_ptr, bags, mask, lookups):
    """Start and length of each bag; a bag out of order or range reads as empty."""
    start = tl.load(offsets_ptr + bags, mask=mask, other=0)
    end = tl.load(offsets_ptr + bags + 1, mask=mask, other=0)
    sound = (start >= 0) & (start <= end) & (end <= lookups)
    return tl.where(sound, start, 0), tl.where(sound, end - start, 0).to(tl.int32)


@triton.jit
def is_row(ids, rows):
    """Whether 0 <= id < rows, in one comparison: as an unsigned number a negative id exceeds every row."""
    return ids.to(tl.int64).to(tl.uint64, bitcast=True) < rows.to(tl.uint64, bitcast=True)


@triton.jit
def row_offsets(ids, dim, WIDE: tl.constexpr, ALIGN: tl.constexpr):
    """First element of each row within its table, with its alignment stated for 16-byte loads."""
    if WIDE:
        offsets = ids.to(tl.int64) * dim
    else:
        offsets = ids.to(tl.int32) * dim
    return tl.multiple_of(offsets, [ALIGN])


@triton.jit(do_not_specialize=["batch", "bag_blocks", "lookups"])
def tbe_forward_pool_kernel(
    out_ptr,
    weights_ptr,
    indices_ptr,
    offsets_ptr,
    sample_weights_ptr,
    features_ptr,
    batch,
    bag_blocks,
    lookups,
    out_width,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    BAGS: tl.constexpr,
    UNROLL: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    ALIGN: tl.constexpr,
    COLUMN_ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_LOOKUPS: tl.constexpr,
    STREAMS: tl.constexpr,
):
    """Grid: features x blocks of BAGS bags x column blocks. A program pools BAGS neighbouring bags side by
    side: short bags share a warp, a row takes only the lanes it fills, and nothing is reduced across lanes.
    D is 0 where the features' dims differ."""
    pid = tl.program_id(0)
    column_block = pid % COLUMN_BLOCKS
    bag_block = (pid // COLUMN_BLOCKS) % bag_blocks
    meta = features_ptr + (pid // COLUMN_BLOCKS // bag_blocks) * 5
    feature = tl.load(meta).to(tl.int32)
    rows = tl.load(meta + 1)
    table = tl.multiple_of(tl.load(meta + 2), ALIGN)
    column = tl.multiple_of(tl.load(meta + 3), COLUMN_ALIGN)
    if D > 0:
        dim = D
    else:
        dim = tl.multiple_of(tl.load(meta + 4).to(tl.int32), ALIGN)
    bags = bag_block * BAGS + tl.arange(0, BAGS)
    in_batch = bags < batch
    start, length = bag_range(offsets_ptr, feature * batch + bags, in_batch, lookups)
    if not WIDE_LOOKUPS:
        start = start.to(tl.int32)
    cols = column_block * BLOCK_D + tl.arange(0, BLOCK_D)
    col_mask = (cols < dim)[None, :]
    weights_ptr += table
    acc = tl.zeros([BAGS, BLOCK_D], tl.float32)
    for i in range(0, tl.max(length, axis=0), UNROLL):
        for j in tl.static_range(UNROLL):
            position = start + (i + j)
            has = (i + j) < length
            ids = tl.load(indices_ptr + position, mask=has, other=-1)
            valid = is_row(ids, rows)
            at = row_offsets(ids, dim, WIDE, ALIGN)[:, None] + cols[None, :]
            if D == BLOCK_D * COLUMN_BLOCKS:
                row = tl.load(weights_ptr + at, mask=valid[:, None], other=0.0).to(tl.float32)
            else:
                row = tl.load(weights_ptr + at, mask=valid[:, None] & col_mask, other=0.0).to(tl.float32)
            if WEIGHTED:
                row *= tl.load(sample_weights_ptr + position, mask=has, other=0).to(tl.float32)[:, None]
            acc += row
    if MEAN:
        acc = acc / tl.maximum(length, 1).to(tl.float32)[:, None]
    out = out_ptr + bags.to(tl.int64)[:, None] * out_width + column + cols[None, :]
    mask = in_batch[:, None] & col_mask
    if STREAMS:
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")
    else:
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["lookups", "row_base", "total_rows"])
def tbe_forward_rows_kernel(
    out_ptr,
    weights_ptr,
    keys_ptr,
    lookups,
    row_base,
    total_rows,
    element_base,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Pooling none. Grid: blocks of ROWS lookups. A program copies ROWS rows; a row that does not exist is 0."""
    pid = tl.program_id(0)
    first = pid.to(tl.int64) * ROWS if WIDE else pid * ROWS
    positions = first + tl.arange(0, ROWS)
    mask = positions < lookups
    keys = tl.load(keys_ptr + positions, mask=mask, other=0).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    col_mask = (cols < D)[None, :]
    at = element_base + (keys - row_base)[:, None] * D + cols[None, :]
    valid = (mask & (keys < total_rows))[:, None] & col_mask
    row = tl.load(weights_ptr + at, mask=valid, other=0.0).to(tl.float32)
    out = out_ptr + positions.to(tl.int64)[:, None] * D + cols[None, :]
    tl.store(out, row.to(out_ptr.dtype.element_ty), mask=mask[:, None] & col_mask)


@triton.jit(do_not_specialize=["batch", "lookups"])
def tbe_weight_grad_kernel(
    out_ptr,
    weights_ptr,
    grad_ptr,
    indices_ptr,
    offsets_ptr,
    features_ptr,
    batch,
    lookups,
    out_width,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    MEAN: tl.constexpr,
    ALIGN: tl.constexpr,
    COLUMN_ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Grid: features x bags. A program holds its bag's gradient and dots UNROLL rows with it at a time."""
    pid = tl.program_id(0)
    bag = pid % batch
    meta = features_ptr + (pid // batch) * 5
    feature = tl.load(meta).to(tl.int32)
    rows = tl.load(meta + 1)
    table = tl.multiple_of(tl.load(meta + 2), ALIGN)
    column = tl.multiple_of(tl.load(meta + 3), COLUMN_ALIGN)
    if D > 0:
        dim = D
    else:
        dim = tl.multiple_of(tl.load(meta + 4).to(tl.int32), ALIGN)
    start, length = bag_range(offsets_ptr, feature * batch + bag, True, lookups)
    cols = tl.arange(0, BLOCK_D)
    col_mask = cols < dim
    grad = tl.load(grad_ptr + bag.to(tl.int64) * out_width + column + cols, mask=col_mask, other=0.0)
    grad = grad.to(tl.float32)
    if MEAN:
        grad = grad / tl.maximum(length, 1).to(tl.float32)
    lane = tl.arange(0, UNROLL)
    for i in range(0, length, UNROLL):
        has = (i + lane) < length
        ids = tl.load(indices_ptr + start + i + lane, mask=has, other=-1)
        valid = is_row(ids, rows)
        at = table + row_offsets(ids, dim, WIDE, ALIGN)[:, None] + cols[None, :]
        row = tl.load(weights_ptr + at, mask=valid[:, None] & col_mask[None, :], other=0.0).to(tl.float32)
        tl.store(out_ptr + start + i + lane, tl.sum(row * grad[None, :], axis=1), mask=has)
