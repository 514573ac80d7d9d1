"""The forward of read-only quantised tables: gather packed rows, decode them in fp32, pool them.

A packed row is its codes, then at ``head``, a multiple of 4 bytes, its fp32 scale and, for integers, its fp32
bias; rows are multiples of 16 bytes apart (tbe_core.quantization). ``words_ptr`` is the same storage as fp32.
"""

import triton
import triton.language as tl

from .forward import bag_range, is_row, row_offsets
from .jagged import bags_of


@triton.jit
def from_e4m3(codes):
    """fp32 of e4m3 codes, exactly, on targets with fp8 instructions and without: the bits below the sign are a
    float16's three places down, 2^8 too small; float16 has e4m3's subnormal numbers too."""
    bits = codes.to(tl.int16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def decoded(codes, scale, bias, FORMAT: tl.constexpr):
    """fp32 values of codes of one byte or less, row by row."""
    if FORMAT == "fp8":
        return from_e4m3(codes) * scale[:, None]
    else:
        return codes.to(tl.float32) * scale[:, None] + bias[:, None]


@triton.jit
def head_of(dim, FORMAT: tl.constexpr):
    """Byte of a row where its scale lies."""
    if FORMAT == "int4":
        return ((dim + 1) // 2 + 3) // 4 * 4
    else:
        return (dim + 3) // 4 * 4


@triton.jit(do_not_specialize=["batch", "bag_blocks", "lookups"])
def tbe_quantized_pool_kernel(
    out_ptr,
    codes_ptr,
    words_ptr,
    indices_ptr,
    offsets_ptr,
    sample_weights_ptr,
    features_ptr,
    batch,
    bag_blocks,
    lookups,
    out_width,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    BAGS: tl.constexpr,
    UNROLL: tl.constexpr,
    FORMAT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    COLUMN_ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_LOOKUPS: tl.constexpr,
    STREAMS: tl.constexpr,
):
    """Grid: features x blocks of BAGS bags x column blocks of BLOCK bytes. A program pools BAGS neighbouring bags
    side by side. D and STRIDE are 0 where the features' dims differ. ``features_ptr`` is int64
    ``[T_g, 6]``: feature, rows, first byte of the table, first column, dim, bytes of a row."""
    pid = tl.program_id(0)
    column_block = pid % COLUMN_BLOCKS
    bag_block = (pid // COLUMN_BLOCKS) % bag_blocks
    meta = features_ptr + (pid // COLUMN_BLOCKS // bag_blocks) * 6
    feature = tl.load(meta).to(tl.int32)
    rows = tl.load(meta + 1)
    table = tl.multiple_of(tl.load(meta + 2), 16)
    column = tl.multiple_of(tl.load(meta + 3), COLUMN_ALIGN)
    if D > 0:
        dim = D
        stride = STRIDE
    else:
        dim = tl.load(meta + 4).to(tl.int32)
        stride = tl.multiple_of(tl.load(meta + 5).to(tl.int32), 16)
    head = head_of(dim, FORMAT)
    bags = bag_block * BAGS + tl.arange(0, BAGS)
    in_batch = bags < batch
    start, length = bag_range(offsets_ptr, feature * batch + bags, in_batch, lookups)
    if not WIDE_LOOKUPS:
        start = start.to(tl.int32)
    places = column_block * BLOCK + tl.arange(0, BLOCK)
    # Of the row's own 16 bytes a load may read what follows the codes: it is not stored.
    inside = (places < stride)[None, :]
    codes_ptr += table
    words_ptr += table // 4
    acc = tl.zeros([BAGS, BLOCK], tl.float32)
    high = tl.zeros([BAGS, BLOCK], tl.float32)
    for i in range(0, tl.max(length, axis=0), UNROLL):
        for j in tl.static_range(UNROLL):
            position = start + (i + j)
            has = (i + j) < length
            ids = tl.load(indices_ptr + position, mask=has, other=-1)
            valid = is_row(ids, rows)
            at = row_offsets(ids, stride, WIDE, 16)
            if STRIDE >= BLOCK * COLUMN_BLOCKS:
                codes = tl.load(codes_ptr + at[:, None] + places[None, :], mask=valid[:, None], other=0)
            else:
                codes = tl.load(codes_ptr + at[:, None] + places[None, :], mask=valid[:, None] & inside, other=0)
            word = words_ptr + (at + head) // 4
            scale = tl.load(word, mask=valid, other=0.0)
            bias = scale
            if FORMAT != "fp8":
                bias = tl.load(word + 1, mask=valid, other=0.0)
            if WEIGHTED:
                weight = tl.load(sample_weights_ptr + position, mask=has & valid, other=0).to(tl.float32)
            else:
                weight = tl.full([BAGS], 1.0, tl.float32)
            if FORMAT == "int4":
                low_values = decoded(codes & 15, scale, bias, FORMAT)
                high_values = decoded(codes >> 4, scale, bias, FORMAT)
                if WEIGHTED:
                    low_values *= weight[:, None]
                    high_values *= weight[:, None]
                acc += low_values
                high += high_values
            else:
                values = decoded(codes, scale, bias, FORMAT)
                if WEIGHTED:
                    values *= weight[:, None]
                acc += values
    if FORMAT == "int4":
        pooled = tl.interleave(acc, high)
        cols = column_block * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    else:
        pooled = acc
        cols = places
    if MEAN:
        pooled = pooled / tl.maximum(length, 1).to(tl.float32)[:, None]
    out = out_ptr + bags.to(tl.int64)[:, None] * out_width + column + cols[None, :]
    mask = in_batch[:, None] & (cols < dim)[None, :]
    if STREAMS:
        tl.store(out, pooled.to(out_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")
    else:
        tl.store(out, pooled.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["bags", "batch", "lookups"])
def tbe_quantized_rows_kernel(
    out_ptr,
    codes_ptr,
    words_ptr,
    indices_ptr,
    offsets_ptr,
    tables_ptr,
    bags,
    batch,
    lookups,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Pooling none. Grid: blocks of ROWS lookups x column blocks of BLOCK bytes. A program decodes ROWS rows; a
    row that does not exist is 0. ``tables_ptr`` is int64 ``[T, 2]``: rows, first byte of the feature's table."""
    pid = tl.program_id(0)
    first = pid.to(tl.int64) * ROWS if WIDE else pid * ROWS
    positions = first + tl.arange(0, ROWS)
    mask = positions < lookups
    last = tl.minimum(first + ROWS, lookups) - 1
    bag = bags_of(offsets_ptr, positions, first, last, bags, ROWS)
    inside = mask & (bag < bags)
    meta = tables_ptr + (bag // batch) * 2
    limit = tl.load(meta, mask=inside, other=0)
    table = tl.multiple_of(tl.load(meta + 1, mask=inside, other=0), [16])
    ids = tl.load(indices_ptr + positions, mask=inside, other=-1).to(tl.int64)
    valid = (ids >= 0) & (ids < limit)
    at = table + tl.multiple_of(ids * STRIDE, [16])
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(
        codes_ptr + at[:, None] + places[None, :], mask=valid[:, None] & (places < STRIDE)[None, :], other=0
    )
    word = words_ptr + (at + head_of(D, FORMAT)) // 4
    scale = tl.load(word, mask=valid, other=0.0)
    bias = scale
    if FORMAT != "fp8":
        bias = tl.load(word + 1, mask=valid, other=0.0)
    if FORMAT == "int4":
        values = tl.interleave(decoded(codes & 15, scale, bias, FORMAT), decoded(codes >> 4, scale, bias, FORMAT))
        cols = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    else:
        values = decoded(codes, scale, bias, FORMAT)
        cols = places
    out = out_ptr + positions.to(tl.int64)[:, None] * D + cols[None, :]
    tl.store(out, values.to(out_ptr.dtype.element_ty), mask=mask[:, None] & (cols < D)[None, :])
