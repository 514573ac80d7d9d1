"""The stable sort of lookups by row, on only the bits that the row count needs.

NVIDIA's radix sort (``cuda.compute`` of the package cuda-cccl) is compiled for a pair of dtypes in some seconds,
once a machine: in the background, and kept on disk beside Triton's own cache. Until it is there torch sorts; both
sorts are stable, so that results are the same bit for bit.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tbe_core import Capabilities
from tbe_core.dtypes import short_name

from .carry import Carry, CarryLayout
from .launcher import Part

logger = logging.getLogger("tbe")


@lru_cache(maxsize=64)
def radix_unavailable(caps: Capabilities) -> str | None:
    """Why the radix sort cannot be used, or None."""
    if caps.vendor != "nvidia" or caps.triton_interpret:
        return "cuda-cccl sorts on NVIDIA GPUs only"
    if caps.cccl_version is None:
        return "cuda-cccl is not installed"
    try:
        import cuda.compute
    except ImportError as error:
        return f"cuda-cccl {caps.cccl_version} cannot be imported: {error}"
    missing = [
        n for n in ("DoubleBuffer", "make_radix_sort", "serialize", "deserialize") if not hasattr(cuda.compute, n)
    ]
    return f"cuda-cccl {caps.cccl_version} has no {', '.join(missing)}" if missing else None


class _Stream:
    """A stream, by the protocol that cuda.compute reads."""

    def __init__(self) -> None:
        self.handle = 0

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class _Bytes:
    """Temporary storage, as cuda.compute reads it."""

    def __init__(self, part: Part) -> None:
        self._part, self.nbytes = part, part.count

    def data_ptr(self) -> int:
        return self._part.data_ptr()


class RadixSort:
    """A compiled sorter of one thread. Two buffers; either may end up with the result."""

    def __init__(self, blob: bytes) -> None:
        from cuda.compute import DoubleBuffer, deserialize

        self._double_buffer: Any = DoubleBuffer
        self._sorter: Any = deserialize(blob)
        self._stream = _Stream()
        self._temporary: dict[tuple[int, int], int] = {}

    def __call__(self, carry: Carry, spare: Carry, temporary: Part, bits: int, stream: int) -> Carry:
        """Keys ascending, equal keys in their order; keys are >= 0 and below 2**bits. Returns the one of the
        two that holds the result."""
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


_Which = tuple[str, torch.dtype, torch.dtype]


class _Builds:
    """Compiled sorters as bytes: those on disk at once, others from a thread of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[_Which, Future[bytes]] = {}
        self._executor: ThreadPoolExecutor | None = None

    def get(self, which: _Which, caps: Capabilities, device: torch.device) -> bytes | None:
        """The bytes, or None while they are being built or when they cannot be."""
        future = self._futures.get(which)
        if future is None:
            with self._lock:
                future = self._futures.get(which) or self._start(which, caps, device)
        return future.result() if future.done() and future.exception() is None else None

    def wait(self) -> None:
        wait(list(self._futures.values()))

    def _start(self, which: _Which, caps: Capabilities, device: torch.device) -> Future[bytes]:
        path = _path(which, caps)
        if path.exists():
            future: Future[bytes] = Future()
            future.set_result(path.read_bytes())
        else:
            # Allocated here: in the other thread it could disturb the capture of a CUDA graph in this one.
            examples = tuple(torch.empty(1, dtype=dtype, device=device) for dtype in which[1:])
            self._executor = self._executor or ThreadPoolExecutor(1, "tbe-sort")
            future = self._executor.submit(_build, path, caps, *examples)
            future.add_done_callback(_report)
        self._futures[which] = future
        return future

    def rebuild(self, which: _Which, caps: Capabilities, device: torch.device) -> None:
        """Forget bytes that cannot be loaded."""
        _path(which, caps).unlink(missing_ok=True)
        with self._lock:
            self._futures.pop(which, None)


def _path(which: _Which, caps: Capabilities) -> Path:
    from triton import knobs

    arch, keys, values = which
    name = f"tbe-radix-sort-{caps.cccl_version}-{arch}-{short_name(keys)}-{short_name(values)}.bin"
    return Path(knobs.cache.dir) / name


def _report(future: Future[bytes]) -> None:
    error = future.exception()
    if error is not None:
        logger.warning("the radix sort of cuda-cccl cannot be built, torch sorts instead: %r", error)


def _build(path: Path, caps: Capabilities, keys: torch.Tensor, values: torch.Tensor) -> bytes:
    from cuda.compute import DoubleBuffer, SortOrder, make_radix_sort, serialize

    sorter = make_radix_sort(
        d_in_keys=DoubleBuffer(keys, keys),
        d_out_keys=None,
        d_in_values=DoubleBuffer(values, values),
        d_out_values=None,
        order=SortOrder.ASCENDING,
        # Compiled without being loaded: only the thread that sorts touches the device.
        compute_capability=int(caps.arch.removeprefix("sm_")),
    )
    blob: bytes = serialize(sorter)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(blob)
    os.replace(part, path)
    return blob


class _Sorters(threading.local):
    """A sorter writes its arguments into itself before it launches: each thread has its own."""

    def __init__(self) -> None:
        self.kept: dict[tuple[_Which, torch.device], RadixSort] = {}


_builds = _Builds()
_sorters = _Sorters()


def radix_sorter(layout: CarryLayout, caps: Capabilities, device: torch.device) -> RadixSort | None:
    """The sorter for these dtypes; None while it is being built, and in a graph's capture before it is loaded."""
    which = (caps.arch, layout.keys, layout.values)
    found = _sorters.kept.get((which, device))
    if found is not None:
        return found
    blob = _builds.get(which, caps, device)
    if blob is None or torch.cuda.is_current_stream_capturing():
        return None
    try:
        found = _sorters.kept[(which, device)] = RadixSort(blob)
    except ValueError as error:
        logger.warning("the kept radix sort cannot be loaded (%s): building it anew", error)
        _builds.rebuild(which, caps, device)
    return found


def settle() -> None:
    """Wait until every sorter that was asked for is built."""
    _builds.wait()


def torch_sort(carry: Carry, spare: Carry) -> Carry:
    """The same by torch, on its current stream."""
    keys, values = carry.keys.tensor(), carry.values.tensor()
    order = torch.empty_like(keys, dtype=torch.int64)
    torch.sort(keys, stable=True, out=(spare.keys.tensor(), order))
    torch.index_select(values, 0, order, out=spare.values.tensor())
    return spare
