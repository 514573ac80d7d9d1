"""Row-wise quantisation in fp64, from its definition: loops over elements, shared with nothing that it judges."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tbe_core import Table

LEVELS = {"int8": 255, "int4": 15}
E4M3 = sorted(
    {m * 2.0**-9 for m in range(8)}
    | {(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
)
"""Every number of e4m3 that is not negative: subnormal ones, then 1.m * 2^(e-7); the last pattern is NaN."""


def value_of(codes: torch.Tensor, column: int, quantization: str) -> float:
    """The number that a row's codes (bytes) hold for a column."""
    if quantization == "int8":
        return float(codes[column])
    if quantization == "int4":
        return float((int(codes[column // 2]) >> (4 * (column % 2))) & 15)
    byte = int(codes[column])
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


@dataclass(frozen=True)
class Rows:
    """One table, dequantised in fp64."""

    values: torch.Tensor
    """``[rows, dim]``."""
    magnitudes: torch.Tensor
    """``[rows, dim]``: scale * |code| + |bias|, what fp32 arithmetic on them errs by a share of."""
    scales: torch.Tensor
    """``[rows]``."""


def rows_of(state: dict[str, torch.Tensor], table: Table, quantization: str) -> Rows:
    """From what a module's ``state_dict`` holds."""
    codes = state[f"{table.name}.{quantization}"].cpu().contiguous().view(torch.uint8)
    scales = state[f"{table.name}.scale"].cpu().double()
    biases = torch.zeros_like(scales) if quantization == "fp8" else state[f"{table.name}.bias"].cpu().double()
    numbers = torch.tensor(
        [[value_of(row, c, quantization) for c in range(table.dim)] for row in codes], dtype=torch.float64
    ).view(table.rows, table.dim)
    scaled = numbers * scales[:, None]
    return Rows(scaled + biases[:, None], scaled.abs() + biases.abs()[:, None], scales)


def element_bound(x: torch.Tensor, scale: torch.Tensor, quantization: str) -> torch.Tensor:
    """``[rows, dim]``: the documented bound of |x - scale * code - bias|, of exact arithmetic."""
    if quantization == "fp8":
        step = torch.maximum(x.abs() / 16, scale[:, None] / 1024)
        return step * (1 + 2.0**-20) + 448 * 2.0**-149
    return (scale[:, None] / 2).expand_as(x) * (1 + 2.0**-20) + LEVELS[quantization] * 2.0**-149


def nearest_e4m3(y: float) -> float:
    """The value of e4m3 nearest to ``y``; of two as near, the one with an even mantissa."""
    size = min(abs(y), 448.0)
    best = min(range(len(E4M3)), key=lambda k: (abs(E4M3[k] - size), k % 2))
    return math.copysign(E4M3[best], y)
