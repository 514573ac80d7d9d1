"""A call's lookups, split by dim: which row each valid lookup reads and which bag it feeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from tbe_core import Group, Layout, Lookup, QuantizedLookup
from tbe_core.types import PRUNED_ID

AnyLookup = Lookup | QuantizedLookup

PIECE = 256
"""Lookups that are added one after another in fp32. A longer sum is made of such pieces: added in one chain,
5000 terms of one sign lose 2e-5 of the sum, more than the contract allows."""


def _pieces(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ends of the pieces among all lookups ``[P + 1]``, and of the segments among the pieces ``[S + 1]``."""
    ends = F.pad(lengths.cumsum(0), (1, 0))
    counts = (lengths + PIECE - 1) // PIECE
    of_segments = F.pad(counts.cumsum(0), (1, 0))
    segment = torch.repeat_interleave(counts)
    nth = torch.arange(segment.numel()) - of_segments[segment]
    return torch.cat([ends[segment] + nth * PIECE, ends[-1:]]), of_segments


def sum_segments(
    source: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor:
    """``[S, D]`` fp32: the sums of ``lengths[s]`` consecutive entries of ``source[rows] * scale``.

    ``source`` is ``[R, D]`` fp32, ``rows`` and ``scale`` are ``[n]``. The order of additions is fixed.
    """
    if not lengths.numel() or int(lengths.max()) <= PIECE:
        ends = F.pad(lengths.cumsum(0), (1, 0))
        return F.embedding_bag(rows, source, ends, mode="sum", include_last_offset=True, per_sample_weights=scale)
    ends, of_segments = _pieces(lengths)
    partial = F.embedding_bag(rows, source, ends, mode="sum", include_last_offset=True, per_sample_weights=scale)
    return sum_segments(partial, torch.arange(len(partial)), of_segments.diff(), None)


@dataclass(frozen=True)
class GroupLookup:
    """The lookups of the features of one dim. n valid lookups, T_g features, B bags a feature."""

    group: Group
    features: tuple[int, ...]
    columns: tuple[int, ...]
    batch: int
    pooled: bool
    positions: torch.Tensor
    """``[n]`` place of each valid lookup in ``indices``, ascending."""
    rows: torch.Tensor
    """``[n]`` row within the group's storage."""
    bags: torch.Tensor
    """``[n]`` bag among the group's T_g * B; the lookup's own position with pooling none."""
    lengths: torch.Tensor
    """``[T_g * B]`` bag lengths, ids that contribute nothing included."""

    @property
    def dim(self) -> int:
        return self.group.dim

    @property
    def bag_count(self) -> int:
        return len(self.features) * self.batch

    def table(self, flat: torch.Tensor) -> torch.Tensor:
        """``[rows, D]`` view of the group in flat storage."""
        base, rows = self.group.element_base, self.group.rows
        return flat[base : base + rows * self.dim].view(rows, self.dim)

    def row_state(self, state: torch.Tensor) -> torch.Tensor:
        """``[rows]`` view of the group in a per-row state."""
        return state[self.group.row_base : self.group.row_base + self.group.rows]

    def inverse_lengths(self) -> torch.Tensor:
        return self.lengths.clamp(min=1).float().reciprocal()

    def scale(self, lookup: AnyLookup) -> torch.Tensor | None:
        """``[n]`` fp32 factor of each lookup, or None when every factor is 1."""
        scale = None
        if lookup.per_sample_weights is not None:
            scale = lookup.per_sample_weights[self.positions].float()
        if lookup.spec.pooling == "mean":
            inverse = self.inverse_lengths()[self.bags]
            scale = inverse if scale is None else scale * inverse
        return scale

    def scatter_columns(self, out: torch.Tensor, pooled: torch.Tensor) -> None:
        """Write ``[T_g * B, D]`` into the features' columns of ``[B, sum D]``."""
        if not self.pooled:
            out.copy_(pooled)
            return
        parts = pooled.view(len(self.features), self.batch, self.dim)
        for part, column in zip(parts, self.columns, strict=True):
            out[:, column : column + self.dim] = part

    def gather_columns(self, grad: torch.Tensor) -> torch.Tensor:
        """``[T_g * B, D]`` fp32 from the features' columns of ``[B, sum D]``."""
        if not self.pooled:
            return grad.float().contiguous()
        parts = [grad[:, c : c + self.dim] for c in self.columns]
        return torch.stack(parts).view(self.bag_count, self.dim).float()


@lru_cache(maxsize=64)
def _features_by_group(layout: Layout) -> tuple[tuple[Group, tuple[int, ...]], ...]:
    by_group = []
    for group in layout.groups:
        features = tuple(f for f, dim in enumerate(layout.feature_dims) if dim == group.dim)
        if features:
            by_group.append((group, features))
    return tuple(by_group)


def _limits(lookup: AnyLookup, frozen: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per lookup: its bag, its feature and its table's number of rows (0 if ``frozen``), ``[N]`` each."""
    layout = lookup.spec.layout
    bags = torch.repeat_interleave(lookup.offsets.long().diff())
    features = bags // max(lookup.batch, 1)
    rows = torch.tensor([0 if t in frozen else layout.tables[t].rows for t in layout.feature_table_map])
    return bags, features, rows[features]


def bad_ids(lookup: AnyLookup) -> torch.Tensor:
    """``[N]`` bool: ids outside [-1, rows of their table)."""
    _, _, limits = _limits(lookup)
    indices = lookup.indices[: limits.numel()]
    return (indices < PRUNED_ID) | (indices >= limits)


def group_lookups(lookup: AnyLookup, frozen: tuple[int, ...] = ()) -> Iterator[GroupLookup]:
    """One ``GroupLookup`` a dim, ascending; the lookups of ``frozen`` tables are left out."""
    layout, batch = lookup.spec.layout, lookup.batch
    lengths = lookup.offsets.long().diff()
    bags, features_of, limits = _limits(lookup, frozen)
    indices = lookup.indices[: bags.numel()].long()
    valid = (indices >= 0) & (indices < limits)
    for group, features in _features_by_group(layout):
        # Number of each feature within its group; -1 for features of other groups.
        place = torch.full((layout.features,), -1)
        place[list(features)] = torch.arange(len(features))
        base = torch.tensor([layout.row_bases[t] - group.row_base for t in layout.feature_table_map])
        inside = place[features_of] >= 0
        positions = (valid & inside).nonzero().squeeze(1)
        feature = features_of[positions]
        pooled = lookup.spec.pooling != "none"
        yield GroupLookup(
            group=group,
            features=features,
            columns=tuple(layout.feature_columns[f] for f in features),
            batch=batch,
            pooled=pooled,
            positions=positions,
            rows=indices[positions] + base[feature],
            bags=place[feature] * batch + bags[positions] % max(batch, 1) if pooled else positions,
            lengths=lengths.view(layout.features, batch)[list(features)].flatten(),
        )
