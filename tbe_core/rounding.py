"""Stochastic rounding of fp16 and bf16 tables: the random numbers and the rule, as every backend applies them.

The number for an element is a function of (seed, step, row, column) alone: Philox-4x32-10 of seed, row and step
(Salmon et al., SC'11) gives four words a row, and a finalizer of MurmurHash3's kind mixes the column into them.
So it depends neither on how work is cut nor on the backend.
"""

from __future__ import annotations

import torch

WORD = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
COLUMN = 0x9E3779B9
MIX = (0x85EBCA6B, 0xC2B2AE35)

Words = torch.Tensor
"""int64 tensors that hold unsigned 32-bit numbers."""


def _high_low(a: Words, b: int) -> tuple[Words, Words]:
    product = a * b  # wraps: the 64 bits are right, whatever their sign
    return (product >> 32) & WORD, product & WORD


def row_words(seed: torch.Tensor, step: torch.Tensor, rows: torch.Tensor) -> tuple[Words, Words, Words, Words]:
    """Four words ``[R]`` for each of int64 ``rows``; ``seed`` and ``step`` are 0-d int64."""
    c0, c1 = rows & WORD, (rows >> 32) & WORD
    c2, c3 = (step & WORD).expand_as(rows), ((step >> 32) & WORD).expand_as(rows)
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(_ROUNDS):
        high0, low0 = _high_low(c0, _MULTIPLIERS[0])
        high1, low1 = _high_low(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & WORD, (k1 + _WEYL[1]) & WORD
    return c0, c1, c2, c3


def random_words(seed: torch.Tensor, step: torch.Tensor, rows: torch.Tensor, dim: int) -> Words:
    """``[R, D]`` 32-bit random numbers, as int64."""
    c0, c1, c2, c3 = (word[:, None] for word in row_words(seed, step, rows))
    x = ((torch.arange(dim, device=rows.device)[None, :] * COLUMN) & WORD) ^ c0
    x = ((x ^ (x >> 16)) * MIX[0]) & WORD
    x = x ^ c1
    x = ((x ^ (x >> 13)) * MIX[1]) & WORD
    x = (x + c2) & WORD
    return (x ^ (x >> 16)) ^ c3


def round_stochastically(w: torch.Tensor, dtype: torch.dtype, words: Words) -> torch.Tensor:
    """``w`` (fp32, any shape) on ``dtype``'s own grid, subnormal numbers included: to one of the two neighbours,
    with the probability that leaves the mean unchanged. Infinite and NaN stay; beyond fp16's largest number the
    result is the nearest one, which may be infinite.

    Args:
        dtype: float16 or bfloat16.
        words: ``random_words``, of the shape of ``w``.
    """
    bits, magnitude = w.view(torch.int32), w.abs()
    dropped = 16 if dtype == torch.bfloat16 else 13
    noise = (words >> (32 - dropped)).to(torch.int32)
    rounded = ((bits + noise) & -(1 << dropped)).view(torch.float32)
    rounded = torch.where(magnitude < float("inf"), rounded, w)
    if dtype == torch.float16:
        quantum = 2.0**-24
        scaled = magnitude / quantum
        whole = scaled.floor()
        up = (words >> 8).to(torch.float32) * quantum < scaled - whole
        small = torch.copysign((whole + up) * quantum, w)
        rounded = torch.where(magnitude < 2.0**-14, small, rounded)
        rounded = torch.where(magnitude > torch.finfo(dtype).max, w, rounded)
    return rounded.to(dtype)
