"""The one place where a kernel is launched. Imports no Triton: kernels are passed in."""

from __future__ import annotations

from typing import Any


def run(kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, **constants: Any) -> None:
    """Launch ``kernel`` over ``grid`` with ``args`` in the order of its parameters, constants by name."""
    kernel[grid](*args, num_warps=num_warps, **constants)
