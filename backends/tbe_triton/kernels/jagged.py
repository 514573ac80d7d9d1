"""From positions in ``indices`` to keys and values for the sort; and the check of ids and offsets.

N lookups, T features, B bags a feature. ``features_ptr`` is int64 ``[T, 3]``: rows, first row among all rows,
first column in value units.
"""

import triton
import triton.language as tl


@triton.jit
def bag_at(offsets_ptr, position, bags, PROBES: tl.constexpr):
    """The largest bag in [0, bags] whose offset is <= the position. All lanes probe at once, so that a million
    bags take three round trips to memory and not twenty."""
    lane = tl.arange(0, PROBES)
    low = tl.zeros([], dtype=tl.int32)
    span = low + bags + 1
    while span > 1:
        stride = (span + PROBES - 1) // PROBES
        at = low + lane * stride
        below = (
            tl.load(offsets_ptr + at, mask=(at <= bags) & (lane * stride < span), other=position + 1) <= position
        )
        low += tl.maximum(tl.sum(below.to(tl.int32), axis=0) - 1, 0) * stride
        span = tl.minimum(stride, bags + 1 - low)
    return low


@triton.jit
def bags_of(offsets_ptr, positions, first_position, last_position, bags, CHUNK: tl.constexpr):
    """The bag of every position: the largest bag whose offset is <= the position, in [0, bags].

    Two searches bound the window of the whole block; the search of every lane runs inside it, in L1.
    """
    first = bag_at(offsets_ptr, first_position, bags, CHUNK)
    last = bag_at(offsets_ptr, last_position, bags, CHUNK)
    found = tl.zeros_like(positions).to(tl.int32) + first
    step = tl.zeros([], dtype=tl.int32) + 1
    while step <= last - first:
        step = step * 2
    step = step // 2
    while step > 0:
        candidate = tl.minimum(found + step, last)
        found = tl.where(tl.load(offsets_ptr + candidate) <= positions, candidate, found)
        step = step // 2
    return found


@triton.jit(do_not_specialize=["lookups", "bags", "batch", "total_rows", "counters"])
def tbe_linearise_kernel(
    indices_ptr,
    offsets_ptr,
    sample_weights_ptr,
    keys_ptr,
    values_ptr,
    counters_ptr,
    spare_counters_ptr,
    features_ptr,
    lookups,
    bags,
    batch,
    row_units,
    total_rows,
    counters,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    POOLED: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: blocks of CHUNK lookups. Writes key = row among all rows (``total_rows`` where the id contributes
    nothing) and value = place of the bag's gradient in units, with the fp32 factor in the low half of an
    int64 when the lookup is weighted or a mean. Also clears the update's counters, in both buffers of the
    sort, since either may end up with the result."""
    pid = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    clear = pid * CHUNK + lane
    tl.store(counters_ptr + clear, tl.zeros([CHUNK], tl.int32), mask=clear < counters)
    tl.store(spare_counters_ptr + clear, tl.zeros([CHUNK], tl.int32), mask=clear < counters)
    first = pid.to(tl.int64) * CHUNK if WIDE else pid * CHUNK
    if first < lookups:
        positions = first + lane
        mask = positions < lookups
        last = tl.minimum(first + CHUNK, lookups) - 1
        bag = bags_of(offsets_ptr, positions, first, last, bags, CHUNK)
        inside = mask & (bag < bags)
        feature = bag // batch
        meta = features_ptr + feature * 3
        rows = tl.load(meta, mask=inside, other=0)
        base = tl.load(meta + 1, mask=inside, other=0)
        column = tl.load(meta + 2, mask=inside, other=0)
        ids = tl.load(indices_ptr + positions, mask=inside, other=-1).to(tl.int64)
        valid = (ids >= 0) & (ids < rows)
        key = tl.where(valid, base + ids, total_rows)
        tl.store(keys_ptr + positions, key.to(keys_ptr.dtype.element_ty), mask=mask)
        if POOLED:
            value = (bag - feature * batch).to(tl.int64) * row_units + column
        else:
            value = positions.to(tl.int64)
        if WEIGHTED or MEAN:
            factor = tl.full([CHUNK], 1.0, tl.float32)
            if WEIGHTED:
                factor = tl.load(sample_weights_ptr + positions, mask=inside, other=0).to(tl.float32)
            if MEAN:
                start = tl.load(offsets_ptr + bag, mask=inside, other=0)
                end = tl.load(offsets_ptr + bag + 1, mask=inside, other=1)
                factor = factor / tl.maximum(end - start, 1).to(tl.float32)
            bits = factor.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
            value = (value << 32) | bits
        tl.store(values_ptr + positions, value.to(values_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["lookups", "bags", "batch"])
def tbe_check_kernel(
    bad_ptr,
    indices_ptr,
    offsets_ptr,
    features_ptr,
    lookups,
    bags,
    batch,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: blocks of CHUNK over max(lookups, bags + 1). Adds to int64 ``bad[2]``: ids outside [-1, rows), and
    offsets out of order or range. Integer atomics: the order cannot show in the result."""
    pid = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    first = pid.to(tl.int64) * CHUNK if WIDE else pid * CHUNK
    positions = first + lane
    here = positions <= bags
    at = tl.load(offsets_ptr + positions, mask=here, other=0)
    after = tl.load(offsets_ptr + positions + 1, mask=positions < bags, other=lookups)
    ends = (positions == bags) & (at != lookups)
    wrong = here & ((at < 0) | (at > after) | (at > lookups) | ends | ((positions == 0) & (at != 0)))
    wrong_offsets = tl.sum(wrong.to(tl.int32), axis=0)
    if wrong_offsets > 0:
        tl.atomic_add(bad_ptr + 1, wrong_offsets.to(tl.int64), sem="relaxed")
    if first < lookups:
        mask = positions < lookups
        last = tl.minimum(first + CHUNK, lookups) - 1
        bag = bags_of(offsets_ptr, positions, first, last, bags, CHUNK)
        inside = mask & (bag < bags)
        rows = tl.load(features_ptr + (bag // batch) * 3, mask=inside, other=0)
        ids = tl.load(indices_ptr + positions, mask=inside, other=-1).to(tl.int64)
        bad = tl.sum((inside & ((ids < -1) | (ids >= rows))).to(tl.int32), axis=0)
        if bad > 0:
            tl.atomic_add(bad_ptr, bad.to(tl.int64), sem="relaxed")
