"""Planners for ``torch.distributed.checkpoint`` that move a bounded piece of a table at a time.

Left alone, it stores a table as one item and clones it for that when the table shares its storage with others.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from .pieces import overflows, slices


class PiecewiseSaving(DefaultSavePlanner):
    """Every tensor of a flat state dict as shards of whole rows."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for name, value in self.state_dict.items() for item in _pieces(name, value)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value: torch.Tensor = self.state_dict[write_item.index.fqn]
        chunk = write_item.tensor_data.chunk  # type: ignore[union-attr]
        if not value.dim():
            return value
        return value.narrow(0, chunk.offsets[0], chunk.sizes[0])


def _pieces(name: str, value: torch.Tensor) -> list[WriteItem]:
    rest = torch.Size([0] * max(0, value.dim() - 1))
    rows = [(piece.start, piece.stop) for piece in slices(value)] if value.dim() else [(0, 0)]
    items = []
    for number, (start, stop) in enumerate(rows):
        offsets = torch.Size([start, *rest]) if value.dim() else torch.Size([])
        sizes = torch.Size([stop - start, *value.shape[1:]]) if value.dim() else torch.Size([])
        items.append(
            WriteItem(
                MetadataIndex(name, offsets, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(offsets, sizes), TensorProperties.create_from_tensor(value), value.size()
                ),
            )
        )
    return items


class _Reading(LoadPlanner):
    """Asks for every stored chunk of ``names``."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if metadata is None:
            raise ValueError("metadata=None: expected that of a checkpoint")
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name in self._names:
            held: Any = self._metadata.state_dict_metadata[name]
            for number, chunk in enumerate(held.chunks):
                index, nothing = MetadataIndex(name, chunk.offsets, number), torch.Size([0] * len(chunk.sizes))
                items.append(ReadItem(LoadItemType.TENSOR, index, nothing, index, nothing, chunk.sizes))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise TypeError(f"{read_item.dest_index.fqn} is stored as bytes, expected a tensor")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is left to do."""


class Loading(_Reading):
    """Into the tensors themselves."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target: torch.Tensor = self._names[read_item.dest_index.fqn].detach()
        offsets = read_item.dest_index.offset or ()
        for dim, (start, length) in enumerate(zip(offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target


class Checking(_Reading):
    """Into memory of its own, to see what would overflow."""

    def __init__(self, names: Mapping[str, torch.dtype]) -> None:
        super().__init__(names)
        self.overflowing: set[str] = set()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        held: Any = self._metadata.state_dict_metadata[read_item.dest_index.fqn]
        return torch.empty(read_item.lengths, dtype=held.properties.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        name = read_item.dest_index.fqn
        if tensor.dim() and any(overflows(tensor[piece], self._names[name]) for piece in slices(tensor)):
            self.overflowing.add(name)
