"""The one place where a kernel is launched: kept compiled kernels, on a given stream. Imports no Triton.

Triton's own launch binds and specialises every argument on every call, which costs the host several times what
the launch itself does. Here the variant that fits the arguments is looked up and handed to its launcher directly;
through Triton's own call only where a profiler has hooked itself into launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

INT32_MAX = 2**31 - 1

AS_THEY_ARE: set[type] = {int}
"""Types of arguments that a compiled kernel takes as they are, not by their address."""

_variants: dict[tuple[Any, ...], _Compiled] = {}

Record = Callable[[Any, tuple[Any, ...], int, dict[str, Any]], None]
"""Takes a launch's kernel, arguments, warps and constants."""

_record: Record | None = None


@contextmanager
def recording(record: Record) -> Iterator[None]:
    """Hand every launch of this process to ``record`` instead of launching it: how kernels are cross-compiled."""
    global _record
    _record, before = record, _record
    try:
        yield
    finally:
        _record = before


class Part:
    """A piece of a byte buffer as a kernel's argument; cheaper than a tensor's view."""

    __slots__ = ("buffer", "count", "dtype", "offset")

    def __init__(self, buffer: torch.Tensor, offset: int, count: int, dtype: torch.dtype) -> None:
        self.buffer, self.offset, self.count, self.dtype = buffer, offset, count, dtype

    def data_ptr(self) -> int:
        return self.buffer.data_ptr() + self.offset

    def tensor(self) -> torch.Tensor:
        """``[count]`` view."""
        return self.buffer.narrow(0, self.offset, self.count * self.dtype.itemsize).view(self.dtype)


def _kind(argument: Any) -> Any:
    """What Triton specialises on: a tensor's dtype and alignment, an integer's size and divisibility."""
    if isinstance(argument, int):
        return argument > INT32_MAX, argument % 16 == 0, argument == 1
    return argument.dtype, argument.data_ptr() % 16 == 0


def current_stream() -> int:
    """The raw handle of torch's current stream on the current device."""
    handle: int = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    return handle


def run(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int,
    stream: int | None = None,
    variant: Any = None,
    **constants: Any,
) -> None:
    """Launch ``kernel`` over ``grid`` with ``args`` in the order of its parameters, constants after them.

    Args:
        args: tensors, ``Part`` or integers.
        stream: a raw stream of the current device; None for torch's current one.
        variant: hashable; equal only where the constants, and the kinds of all arguments, are equal. It saves
            the look at each of them; None where the caller cannot promise that.
    """
    if _record is not None:
        _record(kernel, args, num_warps, constants)
        return
    device_type = (args[0].buffer if isinstance(args[0], Part) else args[0]).device.type
    if device_type == "cpu":  # the interpreter
        tensors = [a.tensor() if isinstance(a, Part) else a for a in args]
        kernel[grid](*tensors, num_warps=num_warps, **constants)
        return
    device = torch.cuda.current_device()
    if variant is None:
        variant = (*constants.values(), *map(_kind, args))
    key = (id(kernel), device, num_warps, variant)
    found = _variants.get(key)
    if found is None:
        compiled = kernel.warmup(*args, grid=grid, num_warps=num_warps, **constants)
        found = _variants[key] = _Compiled(compiled, tuple(constants.values()))
    if stream is None:
        stream = current_stream()
    rows = 1 if len(grid) == 1 else grid[1]
    found.launch(grid[0], rows, stream, [a if a.__class__ in AS_THEY_ARE else a.data_ptr() for a in args])


class _Compiled:
    """A compiled kernel on the device, and the constants that its launcher wants after the arguments."""

    __slots__ = ("_constants", "_function", "_hooks", "_kernel", "_metadata", "_run")

    def __init__(self, kernel: Any, constants: tuple[Any, ...]) -> None:
        from triton import knobs

        kernel[(1, 1, 1)]  # loads it onto the device
        self._kernel, self._constants, self._hooks = kernel, constants, knobs.runtime
        self._run, self._function, self._metadata = kernel.run, kernel.function, kernel.packed_metadata

    def launch(self, columns: int, rows: int, stream: int, arguments: list[Any]) -> None:
        hooks = self._hooks
        if _hooked(hooks.launch_enter_hook) or _hooked(hooks.launch_exit_hook):
            self._kernel[(columns, rows, 1)](*arguments, *self._constants, stream=stream)
            return
        self._run(
            columns, rows, 1, stream, self._function, self._metadata, None, None, None,
            *arguments, *self._constants,
        )  # fmt: skip


def _hooked(hook: Any) -> bool:
    """Whether anything listens: a hook is None, a callable, or a chain of callables, which may be empty."""
    return hook is not None and bool(getattr(hook, "calls", True))
