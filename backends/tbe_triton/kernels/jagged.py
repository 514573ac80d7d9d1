"""From positions in ``indices`` to keys and values for the sort; and the check of ids and offsets.

N lookups, T features, B bags a feature. ``features_ptr`` is int64 ``[T, 3]``: rows, first row among all rows,
first column in value units.
"""

import triton
import triton.language as tl


@triton.jit
def bag_window(offsets_ptr, first_position, last_position, bags, PROBES: tl.constexpr):
    """The largest bags in [0, bags] whose offsets are <= either position. All lanes probe at once, so that a
    million bags take two or three round trips to memory and not twenty."""
    lane = tl.arange(0, PROBES)
    first = tl.zeros([], dtype=tl.int32)
    last = tl.zeros([], dtype=tl.int32)
    span = first + bags + 1
    while span > 1:
        stride = (span + PROBES - 1) // PROBES
        near = lane * stride < span
        at = first + lane * stride
        below = near & (at <= bags)
        below = below & (tl.load(offsets_ptr + at, mask=below, other=0) <= first_position)
        at = last + lane * stride
        under = near & (at <= bags)
        under = under & (tl.load(offsets_ptr + at, mask=under, other=0) <= last_position)
        first += tl.maximum(tl.sum(below.to(tl.int32), axis=0) - 1, 0) * stride
        last += tl.maximum(tl.sum(under.to(tl.int32), axis=0) - 1, 0) * stride
        span = stride
    return first, last


@triton.jit
def bags_of(offsets_ptr, positions, first, last):
    """The bag of every position, in the window [first, last]: the search of every lane stays in L1."""
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
        first_bag, last_bag = bag_window(offsets_ptr, first, last, bags, CHUNK)
        bag = bags_of(offsets_ptr, positions, first_bag, last_bag)
        inside = mask & (bag < bags)
        ids = tl.load(indices_ptr + positions, mask=inside, other=-1).to(tl.int64)
        feature = first_bag // batch
        if (feature == last_bag // batch) & (last_bag < bags):
            # Nearly every block lies within one feature: one look at its table serves all lanes.
            meta = features_ptr + feature * 3
            rows = tl.zeros([CHUNK], tl.int64) + tl.load(meta)
            base = tl.zeros([CHUNK], tl.int64) + tl.load(meta + 1)
            place = (bag - feature * batch).to(tl.int64) * row_units + tl.load(meta + 2)
        else:
            features = bag // batch
            metas = features_ptr + features * 3
            rows = tl.load(metas, mask=inside, other=0)
            base = tl.load(metas + 1, mask=inside, other=0)
            place = (bag - features * batch).to(tl.int64) * row_units
            place += tl.load(metas + 2, mask=inside, other=0)
        valid = (ids >= 0) & (ids < rows)
        key = tl.where(valid, base + ids, total_rows)
        tl.store(keys_ptr + positions, key.to(keys_ptr.dtype.element_ty), mask=mask)
        if POOLED:
            value = place
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
        first_bag, last_bag = bag_window(offsets_ptr, first, last, bags, CHUNK)
        bag = bags_of(offsets_ptr, positions, first_bag, last_bag)
        inside = mask & (bag < bags)
        rows = tl.load(features_ptr + (bag // batch) * 3, mask=inside, other=0)
        ids = tl.load(indices_ptr + positions, mask=inside, other=-1).to(tl.int64)
        bad = tl.sum((inside & ((ids < -1) | (ids >= rows))).to(tl.int32), axis=0)
        if bad > 0:
            tl.atomic_add(bad_ptr, bad.to(tl.int64), sem="relaxed")
