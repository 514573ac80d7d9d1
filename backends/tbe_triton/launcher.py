"""The one place where a kernel is launched: kept compiled kernels, on a given stream. Imports no Triton.

Triton's own launch binds and specialises every argument on every call, which costs the host twice what the
launch itself does. Here the variant that fits the arguments is looked up and launched directly.
"""

from __future__ import annotations

from typing import Any

import torch

INT32_MAX = 2**31 - 1

_variants: dict[tuple[Any, ...], Any] = {}


def _kind(argument: Any) -> Any:
    """What Triton specialises on: a tensor's dtype and alignment, an integer's size and divisibility."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument > INT32_MAX, argument % 16 == 0, argument == 1


def run(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, stream: int | None = None, **constants: Any
) -> None:
    """Launch ``kernel`` over ``grid`` with ``args`` in the order of its parameters, constants after them.

    ``stream``: a raw stream of the current device; None for torch's current one.
    """
    if args[0].device.type == "cpu":  # the interpreter
        kernel[grid](*args, num_warps=num_warps, **constants)
        return
    device = torch.cuda.current_device()
    key = (kernel, device, num_warps, *constants.values(), *map(_kind, args))
    found = _variants.get(key)
    if found is None:
        found = _variants[key] = kernel.warmup(*args, grid=grid, num_warps=num_warps, **constants)
    if stream is None:
        stream = torch.cuda.current_stream().cuda_stream
    found[(*grid, 1, 1)[:3]](*args, *constants.values(), stream=stream)
