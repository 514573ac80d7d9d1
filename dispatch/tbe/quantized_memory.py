"""Bytes of quantised tables beside those of the tables that they stand for."""

from __future__ import annotations

from dataclasses import dataclass

from tbe_core import QuantizedSpec

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def shown(size: float) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    unit = 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if not unit else f"{size:.1f} {UNITS[unit]}"


@dataclass(frozen=True)
class TableMemory:
    """One table's rows, in bytes. Optimizer state, which a quantised module has none of, is not counted."""

    name: str
    rows: int
    dim: int
    row_bytes: int
    """Of a packed row: codes, scale, bias, padding."""

    @property
    def packed(self) -> int:
        return self.rows * self.row_bytes

    @property
    def fp32(self) -> int:
        """What the table takes in float32; half of it in float16 or bfloat16."""
        return self.rows * self.dim * 4


@dataclass(frozen=True)
class QuantizedMemory:
    """``str()`` is a table of all tables."""

    quantization: str
    tables: tuple[TableMemory, ...]

    @classmethod
    def of(cls, spec: QuantizedSpec) -> QuantizedMemory:
        """By arithmetic: nothing is allocated."""
        tables = spec.layout.tables
        return cls(
            spec.quantization,
            tuple(TableMemory(t.name, t.rows, t.dim, spec.form.row_bytes(t.dim)) for t in tables),
        )

    @property
    def packed(self) -> int:
        """Bytes of all rows as they are: the length of the module's storage."""
        return sum(t.packed for t in self.tables)

    @property
    def fp32(self) -> int:
        """Bytes of all rows in float32."""
        return sum(t.fp32 for t in self.tables)

    @property
    def fp16(self) -> int:
        """Bytes of all rows in float16 or bfloat16."""
        return self.fp32 // 2

    def line(self) -> str:
        """The totals, in a line."""
        return f"{self.quantization} {shown(self.packed)} (fp32 {shown(self.fp32)}, fp16 {shown(self.fp16)})"

    def __str__(self) -> str:
        lines = [
            f"{t.name}: {t.rows} rows, D={t.dim}, {t.row_bytes} B a row, {shown(t.packed)} "
            f"(fp32 {shown(t.fp32)}, fp16 {shown(t.fp32 // 2)})"
            for t in self.tables
        ]
        return "\n".join([*lines, f"all: {self.line()}"])
