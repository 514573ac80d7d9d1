"""The balanced segmented update: sorted lookups in equal stretches, one program each, and the combine of runs
that are too long for one program.

A run is one row's lookups. The rule of ``tbe_core.tiers``: the program where a run starts walks on past its
stretch to finish it, unless the run covers a whole further stretch; then every program that it touches leaves a
partial sum. A stretch has two places for partials, of its group's BLOCK_D elements each: of the run that came in
from before, and of the run that starts here and goes on. ``groups_ptr`` is int64 ``[G, 6]``: first row, row
limit, first element, dim, stretch, BLOCK_D. Keys at or above the limit of the last group contribute nothing and
sort last.
"""

import triton
import triton.language as tl

from .row_updates import STATE1, STATE2, load_and_step_row, load_state, step_row
from .runs import arrive, run_pieces, run_start, unordered


@triton.jit(do_not_specialize=["lookups", "groups"])
def tbe_group_bounds_kernel(groups_ptr, keys_ptr, bounds_ptr, lookups, groups):
    """Grid: groups + 1. Where each group's lookups begin in the sorted keys, and where the last one's end."""
    g = tl.program_id(0)
    row = tl.load(groups_ptr + tl.minimum(g, groups - 1) * 6 + tl.where(g == groups, 1, 0))
    low = tl.zeros([], tl.int64)
    high = low + lookups
    while low < high:
        middle = (low + high) // 2
        if tl.load(keys_ptr + middle) < row:
            low = middle + 1
        else:
            high = middle
    tl.store(bounds_ptr + g, low)


@triton.jit
def gradient_place(value, unit, WEIGHTED: tl.constexpr):
    """First element of the lookup's gradient, and its fp32 factor."""
    factor = 1.0
    if WEIGHTED:
        factor = (value & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
        value = value >> 32
    return value.to(tl.int64) * unit, factor


@triton.jit
def update_stretch(
    tensors,
    grad_ptr,
    keys_ptr,
    values_ptr,
    counters_ptr,
    owners_ptr,
    partials_ptr,
    partials_at,
    sums,
    stretch,
    low,
    high,
    slot,
    row_base,
    limit,
    element_base,
    dim,
    unit,
    group,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STRETCH: tl.constexpr,
    UNROLL: tl.constexpr,
    WEIGHTED: tl.constexpr,
    FUSED: tl.constexpr,
    ALIGN: tl.constexpr,
    GRAD_ALIGN: tl.constexpr,
    ORDER: tl.constexpr,
    REDUCE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Walk one stretch lookup by lookup: UNROLL gradient rows, and where a run ends its row and state, are in
    flight before the first is added; a uniform branch steps the row at a run's end.

    REDUCE is None, or a device function that adds a partial to a row of ``sums`` in no fixed order: then all
    partials of a run are added to the row of the slot where it starts, and none is stored."""
    KIND1: tl.constexpr = STEP[STATE1]
    KIND2: tl.constexpr = STEP[STATE2]
    cols = tl.arange(0, BLOCK_D)
    mask = cols < dim
    partials_ptr += partials_at
    begin = low + stretch * STRETCH
    end = tl.minimum(begin + STRETCH, high)
    first = tl.load(keys_ptr + begin)
    last = tl.load(keys_ptr + end - 1)
    previous = tl.load(keys_ptr + begin - 1, mask=begin > low, other=-1)
    before = tl.load(keys_ptr + begin - STRETCH - 1, mask=begin - STRETCH > low, other=-1)
    after = tl.load(keys_ptr + end, mask=end < high, other=-1)
    far = tl.load(keys_ptr + end + STRETCH, mask=end + STRETCH < high, other=-1)
    comes_in = previous == first
    head_long = comes_in & ((before == first) | (after == first))
    through = comes_in & (first == last) & (after == last)
    tail_long = (after == last) & (far == last) & (not through)
    lane = tl.arange(0, STRETCH)
    walk = begin
    if comes_in & (not head_long):
        inside = tl.load(keys_ptr + begin + lane, mask=begin + lane < end, other=-1)
        walk = begin + tl.sum((inside == first).to(tl.int32), axis=0)
    stop = end
    if (after == last) & (not through) & (not tail_long):
        beyond = tl.load(keys_ptr + end + lane, mask=end + lane < high, other=-1)
        stop = end + tl.sum((beyond == last).to(tl.int32), axis=0)
    if last >= limit:
        tail_long = False
    start = stretch
    if REDUCE is not None:  # decided at compile time, and head_long is not
        if head_long:
            start = run_start(keys_ptr, first, stretch, low, STRETCH)
    acc = tl.zeros([BLOCK_D], tl.float32)
    if first < limit:
        for i in range(walk, stop, UNROLL):
            keys = ()
            rows = ()
            weights = ()
            states1 = ()
            states2 = ()
            run_ends = ()
            elements = ()
            for j in tl.static_range(UNROLL):
                here = i + j < stop
                key = tl.load(keys_ptr + i + j, mask=here, other=-1)
                following = tl.load(keys_ptr + i + j + 1, mask=i + j + 1 < high, other=-1)
                live = here & (key < limit)
                run_end = live & (key != following)
                value = tl.load(values_ptr + i + j, mask=here, other=0)
                place, factor = gradient_place(value, unit, WEIGHTED)
                place = tl.multiple_of(place, GRAD_ALIGN)
                if D == BLOCK_D:
                    row = tl.load(grad_ptr + place + cols, mask=live, other=0.0).to(tl.float32)
                else:
                    row = tl.load(grad_ptr + place + cols, mask=live & mask, other=0.0).to(tl.float32)
                if WEIGHTED:
                    row = row * factor
                steps = run_end & (not (head_long & (key == first)))
                element = tl.multiple_of(element_base + (key.to(tl.int64) - row_base) * dim, ALIGN)
                if D == BLOCK_D:
                    w = tl.load(tensors[0] + element + cols, mask=steps, other=0.0)
                else:
                    w = tl.load(tensors[0] + element + cols, mask=steps & mask, other=0.0)
                states1 = states1 + (load_state(tensors[1], key, element, cols, mask, steps, KIND1),)
                states2 = states2 + (load_state(tensors[2], key, element, cols, mask, steps, KIND2),)
                keys = keys + (key,)
                rows = rows + (row,)
                weights = weights + (w,)
                run_ends = run_ends + (run_end,)
                elements = elements + (element,)
            for j in tl.static_range(UNROLL):
                acc += rows[j]
                if run_ends[j]:
                    if head_long & (keys[j] == first):
                        if REDUCE is None:
                            tl.store(partials_ptr + (stretch * 2).to(tl.int64) * BLOCK_D + cols, acc, mask=mask)
                        else:
                            REDUCE(sums, slot - (stretch - start), acc, BLOCK_D)
                    else:
                        step_row(
                            tensors, elements[j], keys[j], weights[j].to(tl.float32), states1[j], states2[j],
                            acc, cols, dim, STEP,
                        )  # fmt: skip
                    acc = tl.zeros([BLOCK_D], tl.float32)
        if REDUCE is None:
            if through:
                tl.store(partials_ptr + (stretch * 2).to(tl.int64) * BLOCK_D + cols, acc, mask=mask)
            if tail_long:
                tl.store(partials_ptr + (stretch * 2 + 1).to(tl.int64) * BLOCK_D + cols, acc, mask=mask)
        elif through | tail_long:
            REDUCE(sums, tl.where(through, slot - (stretch - start), slot), acc, BLOCK_D)
        if FUSED:
            if head_long:
                # Not earlier: over the walk above it would cost a register that wide rows do not have.
                start = run_start(keys_ptr, first, stretch, low, STRETCH)
                pieces = run_pieces(keys_ptr, first, low + (start + 1) * STRETCH, high, STRETCH)
                element = element_base + (first.to(tl.int64) - row_base) * dim
                arrive(
                    tensors, counters_ptr, partials_ptr, keys_ptr, first,
                    slot - (stretch - start), start, pieces, element, cols, dim, BLOCK_D, ORDER, STEP,
                )  # fmt: skip
            if tail_long:
                pieces = run_pieces(keys_ptr, last, end, high, STRETCH)
                element = element_base + (last.to(tl.int64) - row_base) * dim
                arrive(
                    tensors, counters_ptr, partials_ptr, keys_ptr, last,
                    slot, stretch, pieces, element, cols, dim, BLOCK_D, ORDER, STEP,
                )  # fmt: skip
        else:
            if tail_long:
                # The order of this list shows in no result: every entry is combined by itself.
                entry = tl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu")
                record = owners_ptr + entry.to(tl.int64) * 4
                tl.store(record, end.to(tl.int64))
                if REDUCE is None:
                    tl.store(record + 1, partials_at + (stretch * 2).to(tl.int64) * BLOCK_D)
                else:
                    tl.store(record + 1, slot.to(tl.int64))
                tl.store(record + 2, high.to(tl.int64))
                tl.store(record + 3, (slot - slot + group).to(tl.int64))


@triton.jit
def update_share(
    tensors,
    grad_ptr,
    keys_ptr,
    values_ptr,
    counters_ptr,
    owners_ptr,
    partials_ptr,
    sums,
    groups_ptr,
    bounds_ptr,
    lookups,
    unit,
    pid,
    group,
    programs,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEST: tl.constexpr,
    PARTIALS: tl.constexpr,
    LEAST_STRETCH: tl.constexpr,
    STRETCH: tl.constexpr,
    UNROLL: tl.constexpr,
    GROUPED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    FUSED: tl.constexpr,
    ALIGN: tl.constexpr,
    GRAD_ALIGN: tl.constexpr,
    ORDER: tl.constexpr,
    REDUCE: tl.constexpr,
    TURNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """The share of program ``pid`` in a group: one stretch or, with TURNS, every ``programs``-th one."""
    meta = groups_ptr + group * 6
    row_base = tl.load(meta)
    limit = tl.load(meta + 1)
    element_base = tl.multiple_of(tl.load(meta + 2), 8)
    if D > 0:
        dim = D
    else:
        dim = tl.multiple_of(tl.load(meta + 3).to(tl.int32), ALIGN)
    low = pid - pid + (lookups - lookups)
    high = lookups
    first_slot = pid - pid
    partials_at = first_slot.to(tl.int64)
    if GROUPED:
        low = tl.load(bounds_ptr + group)
        high = tl.load(bounds_ptr + group + 1)
        partials_at = low * PARTIALS + group * 2 * WIDEST
        first_slot = low // LEAST_STRETCH + group
    if TURNS:
        for turn in range(pid, (high - low + STRETCH - 1) // STRETCH, programs):
            stretch = pid - pid + turn
            update_stretch(
                tensors, grad_ptr, keys_ptr, values_ptr, counters_ptr, owners_ptr,
                partials_ptr, partials_at, sums, stretch, low, high, first_slot + stretch,
                row_base, limit, element_base, dim, unit, group,
                D, BLOCK_D, STRETCH, UNROLL, WEIGHTED, FUSED, ALIGN, GRAD_ALIGN, ORDER, REDUCE, STEP,
            )  # fmt: skip
    else:
        update_stretch(
            tensors, grad_ptr, keys_ptr, values_ptr, counters_ptr, owners_ptr,
            partials_ptr, partials_at, sums, pid, low, high, first_slot + pid,
            row_base, limit, element_base, dim, unit, group,
            D, BLOCK_D, STRETCH, UNROLL, WEIGHTED, FUSED, ALIGN, GRAD_ALIGN, ORDER, REDUCE, STEP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["lookups", "programs", "first_group"])
def tbe_update_kernel(
    weights_ptr,
    state1_ptr,
    state2_ptr,
    hyper_ptr,
    counter_ptr,
    grad_ptr,
    keys_ptr,
    values_ptr,
    counters_ptr,
    owners_ptr,
    partials_ptr,
    groups_ptr,
    bounds_ptr,
    lookups,
    unit,
    programs,
    first_group,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEST: tl.constexpr,
    PARTIALS: tl.constexpr,
    LEAST_STRETCH: tl.constexpr,
    STRETCH: tl.constexpr,
    UNROLL: tl.constexpr,
    GROUPED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    FUSED: tl.constexpr,
    ALIGN: tl.constexpr,
    GRAD_ALIGN: tl.constexpr,
    STEP: tl.constexpr,
):
    """Grid: (programs, groups of this width). One stretch a program; with several groups, whose shares the
    host does not know, every group has the same programs, which take its stretches in turn. A group's partials
    start at PARTIALS elements a lookup before it, which no group exceeds, plus two of the WIDEST a group."""
    tensors = (weights_ptr, state1_ptr, state2_ptr, hyper_ptr, counter_ptr)
    update_share(
        tensors, grad_ptr, keys_ptr, values_ptr, counters_ptr, owners_ptr,
        partials_ptr, partials_ptr, groups_ptr, bounds_ptr, lookups, unit,
        tl.program_id(0), first_group + tl.program_id(1), programs,
        D, BLOCK_D, WIDEST, PARTIALS, LEAST_STRETCH, STRETCH, UNROLL, GROUPED, WEIGHTED, FUSED, ALIGN,
        GRAD_ALIGN, unordered, None, GROUPED, STEP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["programs"])
def tbe_combine_kernel(
    weights_ptr,
    state1_ptr,
    state2_ptr,
    hyper_ptr,
    counter_ptr,
    keys_ptr,
    counters_ptr,
    owners_ptr,
    partials_ptr,
    groups_ptr,
    programs,
    BLOCK_D: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
):
    """The split tier. Grid: programs, which take the listed long runs in turn, sum each one's partials in
    order, PIECES at a time, and step its row."""
    tensors = (weights_ptr, state1_ptr, state2_ptr, hyper_ptr, counter_ptr)
    cols = tl.arange(0, BLOCK_D)
    piece = tl.arange(0, PIECES)
    zero = tl.zeros([], tl.int64)
    for entry in range(tl.program_id(0), tl.load(counters_ptr), programs):
        record = owners_ptr + (zero + entry) * 4
        after = tl.load(record)
        first = tl.load(record + 1)
        high = tl.load(record + 2)
        meta = groups_ptr + tl.load(record + 3) * 6
        row_base = tl.load(meta)
        element_base = tl.load(meta + 2)
        dim = tl.load(meta + 3).to(tl.int32)
        stretch = tl.load(meta + 4)
        width = tl.load(meta + 5)
        mask = cols < dim
        key = tl.load(keys_ptr + after - 1)
        pieces = run_pieces(keys_ptr, key, after, high, stretch)
        total = tl.zeros([BLOCK_D], tl.float32)
        for i in range(0, pieces, PIECES):
            at = first + ((i + piece) * 2 + (i + piece == 0)) * width
            tile = tl.load(
                partials_ptr + at[:, None] + cols[None, :],
                mask=(i + piece < pieces)[:, None] & mask[None, :],
                other=0.0,
            )
            total += tl.sum(tile, axis=0)
        element = element_base + (key.to(tl.int64) - row_base) * dim
        load_and_step_row(tensors, element, key, total, cols, dim, STEP)
