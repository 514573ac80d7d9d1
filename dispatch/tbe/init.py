"""What rows start from: ``tbe.init.uniform``, ``normal``, ``truncated_normal``, ``from_tensor``.

Values are drawn in fp32, a bounded number at a time, and rounded to the table's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from tbe_core import Table

from .pieces import overflows, slices

DEFAULT_STD = 0.01


class Initialiser(Protocol):
    """Makes rows of a table."""

    @property
    def repeatable(self) -> bool:
        """Whether a module keeps it for ``reset_rows``; a tensor of table size it does not."""

    def check(self, table: Table, dtype: torch.dtype) -> None:
        """Raise ``ValueError`` where it cannot make rows of this table."""

    def rows(self, ids: torch.Tensor, dim: int, generator: torch.Generator | None) -> torch.Tensor:
        """``[len(ids), dim]`` values for the rows ``ids`` (``[n]`` int64), fp32 on their device."""


@dataclass(frozen=True)
class _Random:
    """Fills one fp32 tensor at a time."""

    repeatable = True

    def check(self, table: Table, dtype: torch.dtype) -> None:
        """Any table will do."""

    def rows(self, ids: torch.Tensor, dim: int, generator: torch.Generator | None) -> torch.Tensor:
        out = torch.empty(len(ids), dim, dtype=torch.float32, device=ids.device)
        self._fill(out, generator)
        return out

    def _fill(self, out: torch.Tensor, generator: torch.Generator | None) -> None:
        raise TypeError(f"{type(self).__name__} does not define _fill")


@dataclass(frozen=True)
class _Uniform(_Random):
    low: float
    high: float

    def _fill(self, out: torch.Tensor, generator: torch.Generator | None) -> None:
        out.uniform_(self.low, self.high, generator=generator)


@dataclass(frozen=True)
class _Normal(_Random):
    std: float
    mean: float

    def _fill(self, out: torch.Tensor, generator: torch.Generator | None) -> None:
        out.normal_(self.mean, self.std, generator=generator)


@dataclass(frozen=True)
class _TruncatedNormal(_Random):
    std: float
    mean: float
    low: float
    high: float

    def _fill(self, out: torch.Tensor, generator: torch.Generator | None) -> None:
        if out.numel():
            nn.init.trunc_normal_(out, self.mean, self.std, self.low, self.high, generator=generator)


@dataclass(frozen=True, eq=False)
class _FromTensor:
    tensor: torch.Tensor
    repeatable = False

    def check(self, table: Table, dtype: torch.dtype) -> None:
        if tuple(self.tensor.shape) != (table.rows, table.dim):
            raise ValueError(
                f"init of table {table.name!r} is a tensor of shape {list(self.tensor.shape)}: expected "
                f"[{table.rows}, {table.dim}]"
            )
        for piece in slices(self.tensor):
            if overflows(self.tensor[piece], dtype):
                raise ValueError(
                    f"init of table {table.name!r} has values beyond the range of {dtype}: expected smaller "
                    "ones, or another weights_dtype"
                )

    def rows(self, ids: torch.Tensor, dim: int, generator: torch.Generator | None) -> torch.Tensor:
        return self.tensor[ids.to(self.tensor.device)].to(ids.device)


def _finite(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name}={value!r}: expected a finite number")


def uniform(low: float, high: float) -> Initialiser:
    """Uniform in [low, high); ``ValueError`` unless ``low <= high``."""
    _finite(low=low, high=high)
    if low > high:
        raise ValueError(f"low={low!r} above high={high!r}: expected low <= high")
    return _Uniform(low, high)


def normal(std: float = DEFAULT_STD, mean: float = 0.0) -> Initialiser:
    """Normal with standard deviation ``std >= 0``."""
    _finite(std=std, mean=mean)
    if std < 0:
        raise ValueError(f"std={std!r}: expected a number >= 0")
    return _Normal(std, mean)


def truncated_normal(
    std: float = DEFAULT_STD, mean: float = 0.0, low: float | None = None, high: float | None = None
) -> Initialiser:
    """Normal conditioned on [low, high]; by default two standard deviations around the mean."""
    _finite(std=std, mean=mean)
    if std <= 0:
        raise ValueError(f"std={std!r}: expected a number > 0")
    low = mean - 2 * std if low is None else low
    high = mean + 2 * std if high is None else high
    _finite(low=low, high=high)
    if not low < high:
        raise ValueError(f"low={low!r}, high={high!r}: expected low < high")
    if low > mean + 2 * std or high < mean - 2 * std:
        raise ValueError(
            f"low={low!r}, high={high!r}: expected an interval that meets [{mean - 2 * std}, {mean + 2 * std}]"
        )
    return _TruncatedNormal(std, mean, low, high)


def from_tensor(values: torch.Tensor) -> Initialiser:
    """Row r from ``values[r]``: ``[rows, dim]`` of a floating dtype, on any device. Read, not kept."""
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        kind = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
        raise ValueError(f"values is {kind}: expected a floating-point tensor")
    return _FromTensor(values.detach())


Init = Initialiser | Mapping[str, Initialiser]
"""One for every table, or by table name."""

UNWRITTEN: Init = {}
"""Given to a module (this object, no other mapping) whose maker writes every row."""


def per_table(init: Init, tables: tuple[Table, ...], dtype: torch.dtype) -> dict[str, Initialiser]:
    """Table name to its initialiser, for the tables that ``init`` names.

    Raises:
        ValueError: an unknown table, no initialiser, or one that does not fit its table.
    """
    by_name = {t.name: t for t in tables}
    given = dict(init) if isinstance(init, Mapping) else dict.fromkeys(by_name, init)
    for name, initialiser in given.items():
        if name not in by_name:
            raise ValueError(f"init names table {name!r}: expected one of {', '.join(map(repr, by_name))}")
        if not (hasattr(initialiser, "rows") and hasattr(initialiser, "check")):
            raise ValueError(
                f"init of table {name!r} is {initialiser!r}: expected one of tbe.init, such as normal()"
            )
        initialiser.check(by_name[name], dtype)
    return given


def fill(
    view: torch.Tensor, initialiser: Initialiser, ids: torch.Tensor, generator: torch.Generator | None
) -> None:
    """Write the rows ``ids`` of ``view`` (``[rows, dim]``), a bounded number at a time."""
    for piece in slices(ids, view.shape[1]):
        view[ids[piece]] = initialiser.rows(ids[piece], view.shape[1], generator).to(view)


def fill_from(
    view: torch.Tensor, initialiser: Initialiser, first: int, generator: torch.Generator | None
) -> None:
    """Write the rows of ``view`` from ``first`` on."""
    rest = view[first:]
    for piece in slices(rest):
        ids = torch.arange(first + piece.start, first + piece.stop, device=view.device)
        rest[piece].copy_(initialiser.rows(ids, view.shape[1], generator))
