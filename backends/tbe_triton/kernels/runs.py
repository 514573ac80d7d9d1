"""Runs that more than one program touches: where one starts, how many stretches it covers, and the last program's
arrival at it."""

import triton
import triton.language as tl

from .row_updates import load_and_step_row


@triton.jit
def run_pieces(keys_ptr, key, after, high, stretch):
    """How many stretches a run touches, that of its start included; ``after`` is where the next one begins."""
    step = (high - high + 1).to(tl.int32)
    while (after + (step - 1) * stretch < high) & (
        tl.load(keys_ptr + tl.minimum(after + (step - 1) * stretch, high - 1)) == key
    ):
        step = step * 2
    pieces = step // 2
    step = step // 4
    while step > 0:
        at = after + (pieces + step - 1) * stretch
        inside = at < high
        same = tl.load(keys_ptr + tl.minimum(at, high - 1)) == key
        pieces = tl.where(inside & same, pieces + step, pieces)
        step = step // 2
    return pieces + 1


@triton.jit
def run_start(keys_ptr, key, stretch, low, STRETCH: tl.constexpr):
    """The stretch where a run of ``key`` starts that comes into ``stretch``: the first whose next boundary is
    inside the run."""
    left = stretch - stretch
    right = stretch
    while left < right:
        middle = (left + right) // 2
        if tl.load(keys_ptr + low + middle * STRETCH) < key:
            left = middle + 1
        else:
            right = middle
    inside_before = tl.load(keys_ptr + low + left * STRETCH - 1, mask=left > 0, other=-1)
    if inside_before == key:
        left = left - 1
    return left


@triton.jit
def unordered():
    """What the portable kernels put between a partial and its counter beside the barrier: nothing."""


@triton.jit
def arrive(
    tensors,
    counters_ptr,
    partials_ptr,
    keys_ptr,
    key,
    slot,
    stretch,
    pieces,
    element,
    cols,
    dim,
    BLOCK_D: tl.constexpr,
    ORDER: tl.constexpr,
    STEP: tl.constexpr,
):
    """The fused tier: count this program in; the last sums every partial in order and steps the row. The
    barrier puts all lanes' partial before the count (scalar atomics run on one lane). ``slot`` and ``stretch``
    are those where the run starts. ORDER is a device function that every lane calls before the barrier and, in
    the last program, after it: a fence, where a backend has one."""
    ORDER()
    tl.debug_barrier()
    arrived = tl.atomic_add(counters_ptr + 1 + slot, 1, sem="acq_rel", scope="gpu")
    if arrived == pieces - 1:
        tl.debug_barrier()
        ORDER()
        mask = cols < dim
        total = tl.load(partials_ptr + (stretch * 2 + 1).to(tl.int64) * BLOCK_D + cols, mask=mask, other=0.0)
        for piece in range(1, pieces):
            at = ((stretch + piece) * 2).to(tl.int64) * BLOCK_D
            total += tl.load(partials_ptr + at + cols, mask=mask, other=0.0)
        load_and_step_row(tensors, element, key, total, cols, dim, STEP)
