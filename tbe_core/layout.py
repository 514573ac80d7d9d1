"""Where every table, feature and row lies in the flat storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .types import Table

ROW_ALIGNMENT_ELEMENTS = 64
"""Every group of tables starts at a multiple of this many elements, so that rows load in 16-byte pieces."""


@dataclass(frozen=True)
class Group:
    """Tables of one dim, contiguous in storage: row ``r`` of the group is ``element_base + r * dim``."""

    dim: int
    row_base: int
    rows: int
    element_base: int


@dataclass(frozen=True)
class Layout:
    """Tables, features and their places. Storage orders tables by dim, so that equal dims are contiguous."""

    tables: tuple[Table, ...]
    feature_table_map: tuple[int, ...]

    @classmethod
    def make(cls, tables: Sequence[Table], feature_table_map: Sequence[int] | None) -> Layout:
        """Check tables and map; raises ``ValueError`` naming the argument, the value and what was expected."""
        if isinstance(tables, Table) or not isinstance(tables, Sequence) or not tables:
            raise ValueError(f"tables={tables!r}: expected a non-empty sequence of Table")
        for i, table in enumerate(tables):
            if not isinstance(table, Table):
                raise ValueError(f"tables[{i}]={table!r}: expected a Table(name, rows, dim)")
        names = [t.name for t in tables]
        twice = sorted({n for n in names if names.count(n) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(f"tables: the name {twice[0]!r} is used twice, expected distinct names")
        if feature_table_map is None:
            feature_table_map = range(len(tables))
        if not isinstance(feature_table_map, Sequence):
            raise ValueError(
                f"feature_table_map={feature_table_map!r}: expected a sequence of table numbers, one a feature"
            )
        features = tuple(feature_table_map)
        if not features:
            raise ValueError("feature_table_map is empty: expected a table number for every feature")
        for f, t in enumerate(features):
            if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < len(tables):
                raise ValueError(f"feature_table_map[{f}]={t!r}: expected a table number in [0, {len(tables)})")
        return cls(tuple(tables), features)

    @cached_property
    def storage_order(self) -> tuple[int, ...]:
        """Table numbers in the order of storage: ascending dim, then as given."""
        return tuple(sorted(range(len(self.tables)), key=lambda t: self.tables[t].dim))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        groups: list[Group] = []
        row, element = 0, 0
        for t in self.storage_order:
            table = self.tables[t]
            if groups and groups[-1].dim == table.dim:
                last = groups[-1]
                groups[-1] = Group(last.dim, last.row_base, last.rows + table.rows, last.element_base)
            else:
                element = -(-element // ROW_ALIGNMENT_ELEMENTS) * ROW_ALIGNMENT_ELEMENTS
                groups.append(Group(table.dim, row, table.rows, element))
            row += table.rows
            element += table.rows * table.dim
        return tuple(groups)

    @cached_property
    def row_bases(self) -> tuple[int, ...]:
        """Per table: its first row among all rows."""
        bases, row = [0] * len(self.tables), 0
        for t in self.storage_order:
            bases[t] = row
            row += self.tables[t].rows
        return tuple(bases)

    @cached_property
    def element_bases(self) -> tuple[int, ...]:
        """Per table: its first element in storage."""
        by_dim = {g.dim: g for g in self.groups}
        return tuple(
            by_dim[t.dim].element_base + (base - by_dim[t.dim].row_base) * t.dim
            for t, base in zip(self.tables, self.row_bases, strict=True)
        )

    @cached_property
    def total_rows(self) -> int:
        return sum(t.rows for t in self.tables)

    @cached_property
    def total_elements(self) -> int:
        """Length of the flat storage, padding included."""
        last = self.groups[-1]
        return last.element_base + last.rows * last.dim

    @cached_property
    def feature_dims(self) -> tuple[int, ...]:
        return tuple(self.tables[t].dim for t in self.feature_table_map)

    @cached_property
    def feature_columns(self) -> tuple[int, ...]:
        """Per feature: its first column in the output."""
        columns, at = [], 0
        for dim in self.feature_dims:
            columns.append(at)
            at += dim
        return tuple(columns)

    @cached_property
    def output_width(self) -> int:
        return sum(self.feature_dims)

    @property
    def features(self) -> int:
        return len(self.feature_table_map)

    @cached_property
    def dims(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.feature_dims)))

    def feature_table(self, feature: int) -> Table:
        return self.tables[self.feature_table_map[feature]]
