"""What FBGEMM_GPU's checkpoints hold: names, and every table one after another in table order.

This library stores tables by dim, each group of a dim aligned; where both orders agree, a checkpoint's tensors
are views of the storage, else copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from tbe_core import Layout
from tbe_core.optimizers import Optimizer, StateKind

from .arguments import LOCATIONS
from .enums import EmbeddingLocation

MOMENTS = ("momentum1", "momentum2")
"""Names of the optimizer's states, in the order of ``Optimizer.STATE``."""


def moments(optimizer: Optimizer) -> dict[str, StateKind]:
    """FBGEMM_GPU's name of each state, and whether it has a value a row or an element."""
    return {name: spec.kind for name, spec in zip(MOMENTS, optimizer.STATE, strict=False)}


def starts(layout: Layout, kind: StateKind) -> list[int]:
    """Per table: where it begins in a checkpoint's tensor; one more for the length."""
    sizes = [t.rows if kind == "row" else t.rows * t.dim for t in layout.tables]
    return list(accumulate(sizes, initial=0))


def in_order(layout: Layout, kind: StateKind) -> bool:
    """Whether the storage has the tables where a checkpoint has them."""
    bases = layout.row_bases if kind == "row" else layout.element_bases
    return list(bases) == starts(layout, kind)[:-1]


def flat(layout: Layout, kind: StateKind, storage: torch.Tensor, views: Sequence[torch.Tensor]) -> torch.Tensor:
    """``[total]``, the tables one after another: a view of the storage, or a copy where the orders differ."""
    if in_order(layout, kind):
        return storage.detach()[: starts(layout, kind)[-1]]
    return torch.cat([view.detach().flatten() for view in views])


def unflatten(layout: Layout, kind: StateKind, value: torch.Tensor) -> list[torch.Tensor]:
    """Per table: a view of a checkpoint's tensor, ``[rows]`` or ``[rows, dim]``."""
    begin = starts(layout, kind)
    pieces = [value[a:b] for a, b in pairwise(begin)]
    if kind == "row":
        return pieces
    return [piece.view(t.rows, t.dim) for piece, t in zip(pieces, layout.tables, strict=True)]


def structure(
    layout: Layout, optimizer: Optimizer, dtype: torch.dtype, location: EmbeddingLocation
) -> dict[str, torch.Tensor]:
    """The entries of a checkpoint that describe the tables, on the CPU; and its empty ones."""
    of = layout.feature_table_map
    rows, dims = [t.rows for t in layout.tables], layout.feature_dims
    row_starts = starts(layout, "row")
    found = {
        "D_offsets": torch.tensor([0, *accumulate(dims)], dtype=torch.int32),
        "hash_size_cumsum": torch.tensor([*(row_starts[t] for t in of), row_starts[-1]]),
        "rows_per_table": torch.tensor([rows[t] for t in of]),
        "feature_dims": torch.tensor(dims),
        "table_wise_cache_miss": torch.empty(0, dtype=torch.int64),
        "lxu_cache_weights": torch.empty(0, 0, dtype=dtype),
    }
    kinds: dict[str, StateKind] = {"weights": "element", **moments(optimizer)}
    for name, kind in kinds.items():
        begin = starts(layout, kind)
        found[f"{name}_offsets"] = torch.tensor([begin[t] for t in of])
        found[f"{name}_placements"] = torch.full((len(of),), location.value, dtype=torch.int32)
        for empty in {"dev", "host", "uvm"} - {LOCATIONS[location]}:
            found[f"{name}_{empty}"] = torch.empty(0, dtype=dtype if name == "weights" else torch.float32)
    return found
