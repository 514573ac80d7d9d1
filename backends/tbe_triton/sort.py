"""The stable sort of lookups by row, on only the bits that the row count needs."""

from __future__ import annotations

from typing import Any

import torch

from tbe_core import Capabilities


def radix_unavailable(caps: Capabilities) -> str | None:
    """Why NVIDIA's radix sort (``cuda.compute`` of the package cuda-cccl) cannot be used, or None."""
    if caps.vendor != "nvidia" or caps.triton_interpret:
        return "cuda-cccl sorts on NVIDIA GPUs only"
    if caps.cccl_version is None:
        return "cuda-cccl is not installed"
    try:
        from cuda.compute import SortOrder, make_radix_sort
    except ImportError as error:
        return f"cuda-cccl {caps.cccl_version} cannot be imported: {error}"
    del SortOrder, make_radix_sort
    return None


class _Stream:
    """The present stream, by the protocol that cuda.compute reads."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream().cuda_stream


class RadixSort:
    """A kept sorter for one pair of dtypes on one device; temporary storage comes from torch's allocator."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        from cuda.compute import SortOrder, make_radix_sort

        self._sorter: Any = make_radix_sort(
            d_in_keys=keys,
            d_out_keys=keys,
            d_in_values=values,
            d_out_values=values,
            order=SortOrder.ASCENDING,
        )
        self._stream = _Stream()
        self._temporary: dict[tuple[int, int], int] = {}

    def __call__(self, keys: torch.Tensor, values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys_out, values_out = torch.empty_like(keys), torch.empty_like(values)
        n = keys.numel()
        arguments: dict[str, Any] = {
            "d_in_keys": keys,
            "d_out_keys": keys_out,
            "d_in_values": values,
            "d_out_values": values_out,
            "num_items": n,
            "begin_bit": 0,
            "end_bit": bits,
            "stream": self._stream,
        }
        need = self._temporary.get((n, bits))
        if need is None:
            if len(self._temporary) > 4096:
                self._temporary.clear()
            need = self._temporary[(n, bits)] = self._sorter(temp_storage=None, **arguments)
        temporary = torch.empty(max(need, 1), dtype=torch.uint8, device=keys.device)
        self._sorter(temp_storage=temporary, **arguments)
        return keys_out, values_out


_sorters: dict[tuple[torch.device, torch.dtype, torch.dtype], RadixSort] = {}


def sort_pairs(
    keys: torch.Tensor, values: torch.Tensor, bits: int, radix: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ascending, with their values; equal keys keep their order. Keys are >= 0 and below 2**bits."""
    if radix:
        which = (keys.device, keys.dtype, values.dtype)
        if which not in _sorters:
            _sorters[which] = RadixSort(keys, values)
        return _sorters[which](keys, values, bits)
    keys, order = torch.sort(keys, stable=True)
    return keys, values[order]
