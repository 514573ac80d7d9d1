"""The stable sort of lookups by row, on only the bits that the row count needs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from tbe_core import Capabilities

from .carry import Carry


@lru_cache(maxsize=64)
def radix_unavailable(caps: Capabilities) -> str | None:
    """Why NVIDIA's radix sort (``cuda.compute`` of the package cuda-cccl) cannot be used, or None."""
    if caps.vendor != "nvidia" or caps.triton_interpret:
        return "cuda-cccl sorts on NVIDIA GPUs only"
    if caps.cccl_version is None:
        return "cuda-cccl is not installed"
    try:
        from cuda.compute import DoubleBuffer, SortOrder, make_radix_sort
    except ImportError as error:
        return f"cuda-cccl {caps.cccl_version} cannot be imported: {error}"
    del DoubleBuffer, SortOrder, make_radix_sort
    return None


class _Stream:
    """A stream, by the protocol that cuda.compute reads."""

    def __init__(self) -> None:
        self.handle = 0

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class RadixSort:
    """A kept sorter for one pair of dtypes on one device. Two buffers; either may end up with the result."""

    def __init__(self, carry: Carry) -> None:
        from cuda.compute import DoubleBuffer, SortOrder, make_radix_sort

        self._double_buffer: Any = DoubleBuffer
        self._sorter: Any = make_radix_sort(
            d_in_keys=DoubleBuffer(carry.keys, carry.keys),
            d_out_keys=None,
            d_in_values=DoubleBuffer(carry.values, carry.values),
            d_out_values=None,
            order=SortOrder.ASCENDING,
        )
        self._stream = _Stream()
        self._temporary: dict[tuple[int, int], int] = {}

    def __call__(self, carry: Carry, spare: Carry, bits: int, stream: int) -> tuple[Carry, torch.Tensor]:
        n = carry.keys.numel()
        keys = self._double_buffer(carry.keys, spare.keys)
        self._stream.handle = stream
        arguments: dict[str, Any] = {
            "d_in_keys": keys,
            "d_out_keys": None,
            "d_in_values": self._double_buffer(carry.values, spare.values),
            "d_out_values": None,
            "begin_bit": 0,
            "end_bit": bits,
            "stream": self._stream,
        }
        temporary = torch.empty(self._need(n, bits, arguments), dtype=torch.uint8, device=carry.buffer.device)
        self._sorter(temp_storage=temporary, num_items=n, **arguments)
        return spare if keys.selector else carry, temporary

    def _need(self, n: int, bits: int, arguments: dict[str, Any]) -> int:
        """Temporary bytes; asked for a rounded-up n, so that batches of varying size ask once."""
        step = 1 << max(n.bit_length() - 4, 10)
        rounded = -(-n // step) * step
        need = self._temporary.get((rounded, bits))
        if need is None:
            need = max(self._sorter(temp_storage=None, num_items=rounded, **arguments), 1)
            self._temporary[(rounded, bits)] = need
        return need


_sorters: dict[tuple[torch.device, torch.dtype, torch.dtype], RadixSort] = {}


def radix_sort(carry: Carry, spare: Carry, bits: int, stream: int) -> tuple[Carry, torch.Tensor]:
    """Keys ascending with their values, equal keys in their order; keys are >= 0 and below 2**bits.

    Launched on ``stream``, a raw handle. Returns the one of the two that holds the
    result, and temporary storage that must live until the sort has run.
    """
    which = (carry.buffer.device, carry.keys.dtype, carry.values.dtype)
    found = _sorters.get(which)
    if found is None:
        found = _sorters[which] = RadixSort(carry)
    return found(carry, spare, bits, stream)


def torch_sort(carry: Carry, spare: Carry) -> Carry:
    """The same by torch, on its current stream."""
    torch.sort(
        carry.keys, stable=True, out=(spare.keys, order := torch.empty_like(carry.keys, dtype=torch.int64))
    )
    torch.index_select(carry.values, 0, order, out=spare.values)
    return spare
