"""The update with TLX: the portable walk over stretches, with a gpu fence before a run's counter, programs that
stay on their processor, and partials that the memory adds up. See ``tbe_triton.kernels.update`` for the rest."""

import triton
import triton.language as tl

from tbe_tlx.builtins import (
    FINGERPRINT,
    clc_found,
    clc_open,
    clc_place,
    clc_request,
    clc_wait,
    gpu_fence,
    store_reduce_add,
)
from tbe_triton.kernels.row_updates import load_and_step_row
from tbe_triton.kernels.update import update_share

BUILTINS = tl.constexpr(FINGERPRINT)


@triton.jit
def fenced():
    """Every lane: its partial is there for the whole GPU before the program is counted in, and what the last
    program reads then is not from before."""
    tl.static_assert(BUILTINS != "", "compiled kernels are kept by what they refer to")
    gpu_fence()


@triton.jit
def add_to_sum(sums, slot, acc, BLOCK_D: tl.constexpr):
    """Add a partial to the row of ``slot``."""
    tl.static_assert(BUILTINS != "", "compiled kernels are kept by what they refer to")
    store_reduce_add(sums, [slot.to(tl.int32), 0], tl.reshape(acc, [1, BLOCK_D]))


@triton.jit(do_not_specialize=["lookups", "programs", "first_group"])
def tbe_update_tlx_kernel(
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
    sums,
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
    WORK: tl.constexpr,
    REDUCES: tl.constexpr,
    STEP: tl.constexpr,
):
    """Grid: (programs, groups of this width). WORK is one of ``tbe_core.assist.Work``: a program takes its
    stretches in turn; or, as in the portable kernel, there is a program for every stretch, and one that has
    finished takes the place of one that has not started. ``sums`` is, with REDUCES, a descriptor of rows of
    BLOCK_D, a slot each, all zero."""
    REDUCE: tl.constexpr = add_to_sum if REDUCES else None
    TURNS: tl.constexpr = GROUPED or WORK == "static"
    tensors = (weights_ptr, state1_ptr, state2_ptr, hyper_ptr, counter_ptr)
    x = tl.program_id(0)
    y = tl.program_id(1)
    if WORK == "stolen":
        queue = clc_open()
        phase = x - x
        live = x >= 0
        while live:
            clc_request(queue)
            update_share(
                tensors, grad_ptr, keys_ptr, values_ptr, counters_ptr, owners_ptr,
                partials_ptr, sums, groups_ptr, bounds_ptr, lookups, unit, x, first_group + y, programs,
                D, BLOCK_D, WIDEST, PARTIALS, LEAST_STRETCH, STRETCH, UNROLL, GROUPED, WEIGHTED, FUSED, ALIGN,
                GRAD_ALIGN, fenced, REDUCE, TURNS, STEP,
            )  # fmt: skip
            response = clc_wait(queue, phase)
            phase = phase ^ 1
            live = clc_found(response)
            if live:
                x = clc_place(response, 0)
                y = clc_place(response, 1)
    else:
        update_share(
            tensors, grad_ptr, keys_ptr, values_ptr, counters_ptr, owners_ptr,
            partials_ptr, sums, groups_ptr, bounds_ptr, lookups, unit, x, first_group + y, programs,
            D, BLOCK_D, WIDEST, PARTIALS, LEAST_STRETCH, STRETCH, UNROLL, GROUPED, WEIGHTED, FUSED, ALIGN,
            GRAD_ALIGN, fenced, REDUCE, TURNS, STEP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["programs"])
def tbe_combine_tlx_kernel(
    weights_ptr,
    state1_ptr,
    state2_ptr,
    hyper_ptr,
    counter_ptr,
    keys_ptr,
    counters_ptr,
    owners_ptr,
    sums_ptr,
    groups_ptr,
    programs,
    BLOCK_D: tl.constexpr,
    STEP: tl.constexpr,
):
    """Grid: programs, which take the listed long runs in turn: each has its whole sum in one row of ``sums_ptr``,
    of BLOCK_D elements a slot, and only its row is left to step."""
    tensors = (weights_ptr, state1_ptr, state2_ptr, hyper_ptr, counter_ptr)
    cols = tl.arange(0, BLOCK_D)
    zero = tl.zeros([], tl.int64)
    for entry in range(tl.program_id(0), tl.load(counters_ptr), programs):
        record = owners_ptr + (zero + entry) * 4
        after = tl.load(record)
        slot = tl.load(record + 1)
        meta = groups_ptr + tl.load(record + 3) * 6
        row_base = tl.load(meta)
        element_base = tl.load(meta + 2)
        dim = tl.load(meta + 3).to(tl.int32)
        key = tl.load(keys_ptr + after - 1)
        total = tl.load(sums_ptr + slot * BLOCK_D + cols, mask=cols < dim, other=0.0)
        element = element_base + (key.to(tl.int64) - row_base) * dim
        load_and_step_row(tensors, element, key, total, cols, dim, STEP)
