"""Stochastic rounding of a stepped row; ``tbe_core.rounding`` says which random number and which rule."""

import triton
import triton.language as tl


@triton.jit
def random_words(counter_ptr, key, cols):
    """A 32-bit random number a column: Philox of (seed, row, step), then the column mixed in."""
    step = tl.load(counter_ptr)
    seed = tl.load(counter_ptr + 1)
    row = key.to(tl.int64)
    c0, c1, c2, c3 = tl.philox(
        seed,
        (row & 0xFFFFFFFF).to(tl.uint32),
        (row >> 32).to(tl.uint32),
        (step & 0xFFFFFFFF).to(tl.uint32),
        (step >> 32).to(tl.uint32),
    )
    x = (cols.to(tl.uint32) * 0x9E3779B9) ^ c0
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = x ^ c1
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x + c2
    return (x ^ (x >> 16)) ^ c3


@triton.jit
def round_row(w, counter_ptr, key, cols, HALF: tl.constexpr):
    """``w`` (fp32) on fp16's grid if HALF, else on bf16's, still in fp32: to a neighbour, without bias."""
    words = random_words(counter_ptr, key, cols)
    DROPPED: tl.constexpr = 13 if HALF else 16
    noise = (words >> (32 - DROPPED)).to(tl.int32)
    bits = w.to(tl.int32, bitcast=True) + noise
    rounded = (bits & (-(1 << DROPPED))).to(tl.float32, bitcast=True)
    magnitude = tl.abs(w)
    rounded = tl.where(magnitude < float("inf"), rounded, w)
    if HALF:
        # Below 2^-14 the grid is that of 2^-24; above the largest number only the nearest is right.
        scaled = magnitude * 16777216.0
        whole = tl.floor(scaled)
        up = ((words >> 8).to(tl.float32) * (1.0 / 16777216.0) < scaled - whole).to(tl.float32)
        small = (whole + up) * (1.0 / 16777216.0)
        small = tl.where(w < 0, -small, small)
        rounded = tl.where(magnitude < 6.103515625e-05, small, rounded)
        rounded = tl.where(magnitude > 65504.0, w, rounded)
    return rounded
