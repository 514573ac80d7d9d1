"""The stable sort of lookups by row, on only the bits that the row count needs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from tbe_core import Capabilities

from .carry import Carry, CarryLayout
from .launcher import Part


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

    def __init__(self, keys: torch.dtype, values: torch.dtype, device: torch.device) -> None:
        from cuda.compute import DoubleBuffer, SortOrder, make_radix_sort

        def example(dtype: torch.dtype) -> Any:
            some = torch.empty(1, dtype=dtype, device=device)
            return DoubleBuffer(some, some)

        self._double_buffer: Any = DoubleBuffer
        self._sorter: Any = make_radix_sort(
            d_in_keys=example(keys),
            d_out_keys=None,
            d_in_values=example(values),
            d_out_values=None,
            order=SortOrder.ASCENDING,
        )
        self._stream = _Stream()
        self._temporary: dict[tuple[int, int], int] = {}

    def __call__(self, carry: Carry, spare: Carry, temporary: Part, bits: int, stream: int) -> Carry:
        keys = self._double_buffer(carry.keys, spare.keys)
        self._stream.handle = stream
        self._sorter(
            temp_storage=_Bytes(temporary),
            d_in_keys=keys,
            d_out_keys=None,
            d_in_values=self._double_buffer(carry.values, spare.values),
            d_out_values=None,
            num_items=carry.keys.count,
            begin_bit=0,
            end_bit=bits,
            stream=self._stream,
        )
        return spare if keys.selector else carry

    def temporary_bytes(self, carry: Carry, bits: int) -> int:
        """What a sort needs beside the two buffers; asked for a rounded-up size, so that batches whose sizes
        vary ask rarely."""
        n = carry.keys.count
        step = 1 << max(n.bit_length() - 4, 10)
        rounded = -(-n // step) * step
        need = self._temporary.get((rounded, bits))
        if need is None:
            need = self._sorter(
                temp_storage=None,
                d_in_keys=self._double_buffer(carry.keys, carry.keys),
                d_out_keys=None,
                d_in_values=self._double_buffer(carry.values, carry.values),
                d_out_values=None,
                num_items=rounded,
                begin_bit=0,
                end_bit=bits,
            )
            need = self._temporary[(rounded, bits)] = max(need, 1)
        return need


class _Bytes:
    """Temporary storage, as cuda.compute reads it."""

    def __init__(self, part: Part) -> None:
        self._part, self.nbytes = part, part.count

    def data_ptr(self) -> int:
        return self._part.data_ptr()


_sorters: dict[tuple[torch.device, torch.dtype, torch.dtype], RadixSort] = {}


def radix_sorter(carry: CarryLayout, device: torch.device) -> RadixSort:
    """The sorter for these dtypes; built at the first call."""
    which = (device, carry.keys, carry.values)
    found = _sorters.get(which)
    if found is None:
        found = _sorters[which] = RadixSort(carry.keys, carry.values, device)
    return found


def torch_sort(carry: Carry, spare: Carry) -> Carry:
    """The same by torch, on its current stream: keys ascending, equal keys in their order."""
    keys, values = carry.keys.tensor(), carry.values.tensor()
    order = torch.empty_like(keys, dtype=torch.int64)
    torch.sort(keys, stable=True, out=(spare.keys.tensor(), order))
    torch.index_select(values, 0, order, out=spare.values.tensor())
    return spare
