"""Where a checkpoint's tensors lie: in memory, in a safetensors file, or in torch's distributed format.

Every source is read a bounded piece at a time, straight into the tensors that it is for.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from .pieces import overflows, slices


@dataclass(frozen=True)
class Found:
    """What a checkpoint holds under one name; ``dtype`` is None for what is no tensor, or none that we read."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    kind: str = "a tensor"


class Source(Protocol):
    """A checkpoint."""

    @property
    def entries(self) -> Mapping[str, Found]:
        """Everything that it holds, by name."""

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy into tensors of the same shapes, converting dtypes."""

    def overflowing(self, dtypes: Mapping[str, torch.dtype]) -> list[str]:
        """Names with a finite value that becomes infinite in the dtype given for it."""


class TensorSource:
    """A state dict."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self.entries = {
            name: Found(tuple(value.shape), value.dtype)
            if isinstance(value, torch.Tensor)
            else Found((), None, f"a {type(value).__name__}")
            for name, value in tensors.items()
        }

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        values = {name: self._tensors[name].detach() for name in targets}
        homes = {target.untyped_storage().data_ptr() for target in targets.values()}
        for name, value in values.items():
            # The module's own tables under other names: copied before one of them is overwritten.
            if value.untyped_storage().data_ptr() in homes and value.data_ptr() != targets[name].data_ptr():
                values[name] = value.clone()
        for name, target in targets.items():
            copy_pieces(target, values[name])

    def overflowing(self, dtypes: Mapping[str, torch.dtype]) -> list[str]:
        return [
            name
            for name, dtype in dtypes.items()
            if _may_overflow(self.entries[name].dtype, dtype)
            and _any_overflows(self._tensors[name].detach(), dtype)
        ]


def copy_pieces(target: torch.Tensor, value: torch.Tensor | StoredTensor) -> None:
    """``target.copy_(value)``, a bounded piece at a time."""
    if target.dim() == 0:
        target.copy_(value if isinstance(value, torch.Tensor) else value.whole())
        return
    for piece in slices(target):
        target[piece].copy_(value[piece])


def _overflowing(
    source: Source, tensors: Mapping[str, torch.Tensor | StoredTensor], dtypes: Mapping[str, torch.dtype]
) -> list[str]:
    return [
        name
        for name, dtype in dtypes.items()
        if _may_overflow(source.entries[name].dtype, dtype) and _any_overflows(tensors[name], dtype)
    ]


def _may_overflow(held: torch.dtype | None, dtype: torch.dtype) -> bool:
    if held is None or not (held.is_floating_point and dtype.is_floating_point):
        return False
    return torch.finfo(dtype).max < torch.finfo(held).max


def _any_overflows(value: torch.Tensor | StoredTensor, dtype: torch.dtype) -> bool:
    pieces = slices(torch.empty(value.shape, device="meta")) if value.shape else ()
    return any(overflows(value[piece], dtype) for piece in pieces)


def is_safetensors(path: str | os.PathLike[str]) -> bool:
    return Path(path).suffix == ".safetensors"


def open_file(path: Path) -> Source:
    """A file or directory, by its name; reads its list of contents."""
    return SafetensorsSource(path) if is_safetensors(path) else DistributedSource(path)


# --- safetensors --------------------------------------------------------------------------------------------

_DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Names of the format, wide ones first: written in this order every tensor is aligned."""


class StoredTensor:
    """One tensor of a file, read a slice of rows at a time."""

    def __init__(self, path: Path, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._path, self._at, self.shape, self._dtype = path, at, shape, dtype

    def __getitem__(self, rows: slice) -> torch.Tensor:
        one = math.prod(self.shape[1:]) * self._dtype.itemsize
        buffer = bytearray((rows.stop - rows.start) * one)
        with self._path.open("rb") as file:
            file.seek(self._at + rows.start * one)
            if file.readinto(buffer) != len(buffer):
                raise ValueError(f"{self._path} ends early: expected {self._at + rows.stop * one} bytes or more")
        found = torch.frombuffer(buffer, dtype=self._dtype) if buffer else torch.empty(0, dtype=self._dtype)
        return found.view(rows.stop - rows.start, *self.shape[1:])

    def whole(self) -> torch.Tensor:
        """Of a 0-d tensor: its value."""
        return StoredTensor(self._path, self._at, (1,), self._dtype)[slice(0, 1)].reshape(())


class SafetensorsSource:
    """A ``.safetensors`` file: eight bytes of length, a JSON header, the data.

    Read here, because the format's own library maps the whole file as memory of the process's own, which a
    machine that does not overcommit has to have.
    """

    def __init__(self, path: Path) -> None:
        header, start = _header(path)
        self._stored: dict[str, StoredTensor] = {}
        self.entries: dict[str, Found] = {}
        for name, value in header.items():
            try:
                shape, (first, last) = tuple(map(int, value["shape"])), map(int, value["data_offsets"])
                spelled = str(value["dtype"])
            except (KeyError, TypeError, ValueError) as error:
                found = f"the header's {name!r} is {value!r}"
                raise ValueError(f"{path}: {found}, expected a tensor's") from error
            dtype = _DTYPES.get(spelled)
            self.entries[name] = Found(shape, dtype, f"a tensor of {spelled}")
            if dtype is None:
                continue
            if first < 0 or last - first != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{path}: {name!r} has {last - first} bytes, expected {list(shape)} of {dtype}")
            self._stored[name] = StoredTensor(path, start + first, shape, dtype)
            if start + last > path.stat().st_size:
                raise ValueError(f"{path} has {path.stat().st_size} bytes: expected {start + last} or more")

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        for name, target in targets.items():
            copy_pieces(target, self._stored[name])

    def overflowing(self, dtypes: Mapping[str, torch.dtype]) -> list[str]:
        return _overflowing(self, self._stored, dtypes)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header without its metadata, and where the data starts."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path} has {size} bytes, {length} for its header: expected a safetensors file")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path}: the header is no JSON, expected a safetensors file") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header is a {type(header).__name__}, expected a JSON object")
    return {name: value for name, value in header.items() if name != "__metadata__"}, 8 + length


def write_safetensors(views: Mapping[str, torch.Tensor], path: Path) -> None:
    """What ``SafetensorsSource`` reads; the format's own writer wants a copy of all data at once."""
    order, spelled = list(_DTYPES.values()), {dtype: name for name, dtype in _DTYPES.items()}
    names = sorted(views, key=lambda name: order.index(views[name].dtype))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        view = views[name]
        end = at + view.numel() * view.element_size()
        header[name] = {"dtype": spelled[view.dtype], "shape": list(view.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for name in names:
                flat = views[name].reshape(1) if views[name].dim() == 0 else views[name]
                for piece in slices(flat):
                    file.write(flat[piece].cpu().contiguous().view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


# --- torch.distributed.checkpoint ---------------------------------------------------------------------------


def write_pieces(views: Mapping[str, torch.Tensor], path: Path) -> None:
    """A directory that ``torch.distributed.checkpoint`` reads as whole tensors; each is stored in row pieces."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from .distributed_planners import PiecewiseSaving

    if (path / ".metadata").exists():
        raise FileExistsError(f"{path} holds a checkpoint: expected a new directory")
    with _one_process():
        save(dict(views), storage_writer=FileSystemWriter(path), planner=PiecewiseSaving(), no_dist=True)


@contextmanager
def _one_process() -> Iterator[None]:
    """Without torch's warning that it takes this for one process: that is what is asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class DistributedSource:
    """A directory of ``torch.distributed.checkpoint``, whoever wrote it and in however many shards."""

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        if not (path / ".metadata").is_file():
            raise FileNotFoundError(f"{path}: expected a .safetensors file or a directory with a .metadata file")
        self._path = path
        self.entries = {}
        for name, held in FileSystemReader(path).read_metadata().state_dict_metadata.items():
            if isinstance(held, TensorStorageMetadata):
                self.entries[name] = Found(tuple(held.size), held.properties.dtype)
            else:
                self.entries[name] = Found((), None, "no tensor")

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        from .distributed_planners import Loading

        self._run(Loading(targets))

    def overflowing(self, dtypes: Mapping[str, torch.dtype]) -> list[str]:
        from .distributed_planners import Checking

        narrow = {n: d for n, d in dtypes.items() if _may_overflow(self.entries[n].dtype, d)}
        if not narrow:
            return []
        planner = Checking(narrow)
        self._run(planner)
        return sorted(planner.overflowing)

    def _run(self, planner: Any) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        with _one_process():
            load({}, storage_reader=FileSystemReader(self._path), planner=planner, no_dist=True)
