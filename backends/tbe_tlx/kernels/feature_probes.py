"""One tiny kernel a feature, compiled only to see its instruction. Imports Triton and a provider's language."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

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

BUILTINS = tl.constexpr(FINGERPRINT)
WIDTH = tl.constexpr(128)


@triton.jit
def tbe_probe_gpu_fence_kernel(data_ptr):
    """Grid: any. Store, fence, count."""
    cols = tl.arange(0, WIDTH)
    tl.store(data_ptr + cols, cols)
    gpu_fence()
    tl.debug_barrier()
    tl.atomic_add(data_ptr + WIDTH, 1, sem="relaxed", scope="gpu")


@triton.jit
def tbe_probe_clc_kernel(data_ptr):
    """Grid: (any, any). Every program's place, and those that it takes, are written once."""
    queue = clc_open()
    x = tl.program_id(0)
    y = tl.program_id(1)
    phase = x - x
    live = x >= 0
    while live:
        clc_request(queue)
        tl.store(data_ptr + x * 2 + y, 1)
        response = clc_wait(queue, phase)
        phase = phase ^ 1
        live = clc_found(response)
        if live:
            x = clc_place(response, 0)
            y = clc_place(response, 1)


@triton.jit
def tbe_probe_store_reduce_kernel(desc, data_ptr):
    """Grid: any. Adds a row."""
    row = tl.load(data_ptr + tl.arange(0, WIDTH))
    store_reduce_add(desc, [tl.program_id(0), 0], tl.reshape(row, [1, WIDTH]))


@triton.jit
def tbe_probe_mbarrier_kernel(data_ptr):
    """Grid: any. Arrives at a barrier and waits for it."""
    barriers = tlx.alloc_barriers(1)
    barrier = tlx.local_view(barriers, 0)
    tlx.barrier_arrive(barrier)
    tlx.barrier_wait(barrier, tl.constexpr(0))
    tl.store(data_ptr, 1)


@triton.jit
def tbe_probe_async_load_kernel(data_ptr):
    """Grid: any. A row to shared memory and back."""
    cols = tl.arange(0, WIDTH)
    buffers = tlx.local_alloc((WIDTH,), tl.int32, 1)
    buffer = tlx.local_view(buffers, 0)
    token = tlx.async_load(data_ptr + cols, buffer)
    tlx.async_load_commit_group([token])
    tlx.async_load_wait_group(0)
    tl.store(data_ptr + WIDTH + cols, tlx.local_load(buffer))
