"""Row-wise quantisation: the formats, how a row is packed, and how it is read back.

A packed row is its codes, then from the next multiple of 4 bytes its scale and, for integers, its bias, both
fp32; it is padded with zeros to a multiple of 16 bytes, so that every row's codes load in 16-byte pieces. Element
j has the value ``scale * q[j] + bias``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

Quantization = Literal["int8", "int4", "fp8"]
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)

ROW_ALIGNMENT_BYTES = 16
WORD = 4
"""Bytes of a scale, and of a bias."""


@dataclass(frozen=True)
class RowFormat:
    """How the elements of a row become codes."""

    name: str
    per_byte: int
    """Codes in a byte; the first of two is in the low half."""
    largest: int
    """The largest code, as a number."""
    has_bias: bool
    code_dtype: torch.dtype
    """Of the codes in a checkpoint; uint8 where a byte holds several."""

    def code_bytes(self, dim: int) -> int:
        return -(-dim // self.per_byte)

    def scale_at(self, dim: int) -> int:
        """Byte of a row where its scale lies; the bias, if any, follows."""
        return -(-self.code_bytes(dim) // WORD) * WORD

    def row_bytes(self, dim: int) -> int:
        """Of a packed row, padding included."""
        size = self.scale_at(dim) + WORD * (2 if self.has_bias else 1)
        return -(-size // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES

    def codes(self, packed: torch.Tensor, dim: int) -> torch.Tensor:
        """``[rows, code_bytes(dim)]`` view of packed rows, in ``code_dtype``."""
        return packed[:, : self.code_bytes(dim)].view(self.code_dtype)

    def scales(self, packed: torch.Tensor, dim: int) -> torch.Tensor:
        """``[rows]`` fp32 view of packed rows."""
        return packed.view(torch.float32)[:, self.scale_at(dim) // WORD]

    def biases(self, packed: torch.Tensor, dim: int) -> torch.Tensor:
        """``[rows]`` fp32 view of packed rows; of a format that has them."""
        return packed.view(torch.float32)[:, self.scale_at(dim) // WORD + 1]


FORMATS: dict[str, RowFormat] = {
    "int8": RowFormat("int8", 1, 255, True, torch.uint8),
    "int4": RowFormat("int4", 2, 15, True, torch.uint8),
    "fp8": RowFormat("fp8", 1, 448, False, torch.float8_e4m3fn),
}


def pack(rows: torch.Tensor, form: RowFormat) -> torch.Tensor:
    """``[n, row_bytes]`` uint8 from finite ``[n, dim]`` of any floating dtype. Every step is in fp64.

    Integers: ``bias`` is the row's minimum, ``scale`` = (maximum - minimum) / ``largest`` rounded to fp32, and
    the code (x - bias) / scale rounded half to even. fp8: ``scale`` = max|x| / 448 rounded to fp32, and the code
    x / scale rounded half to even on e4m3's grid. A scale of 0, which rows of one value have, gives codes 0.
    """
    x = rows.double()
    n, dim = x.shape
    packed = torch.zeros(n, form.row_bytes(dim), dtype=torch.uint8, device=x.device)
    low, high = x.aminmax(dim=1)
    if not form.has_bias:
        low, high = torch.zeros_like(low), x.abs().amax(dim=1)
    scale = ((high - low) / form.largest).float()
    divisor = torch.where(scale > 0, scale, torch.inf).double()
    y = (x - low[:, None]) / divisor[:, None]
    # A scale among the subnormal numbers is coarse: the largest element may then lie beyond the largest code.
    if form.has_bias:
        codes = y.round().clamp(0, form.largest).to(torch.uint8)
        form.biases(packed, dim).copy_(low)
    else:
        codes = y.clamp(-form.largest, form.largest).float().to(form.code_dtype).view(torch.uint8)
    if form.per_byte == 2:
        if dim % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    packed[:, : form.code_bytes(dim)] = codes
    form.scales(packed, dim).copy_(scale)
    return packed


def unpack(packed: torch.Tensor, form: RowFormat, dim: int) -> torch.Tensor:
    """``[n, dim]`` fp32 from packed rows ``[n, row_bytes]``."""
    codes = form.codes(packed, dim)
    if form.per_byte == 2:
        codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)[:, :dim]
    values = codes.float() * form.scales(packed, dim)[:, None]
    return values + form.biases(packed, dim)[:, None] if form.has_bias else values
