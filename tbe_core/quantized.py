"""The static description of read-only quantised tables, where their rows lie, and one call's tensors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch

from .dtypes import OUTPUT_DTYPES, names
from .layout import Layout
from .optimizers import NoOptimizer
from .plan import Plan
from .quantization import FORMATS, QUANTIZATIONS, Quantization, RowFormat
from .types import BOUNDS_CHECK_MODES, POOLING_MODES, BoundsCheck, Pooling, Problem


@dataclass(frozen=True)
class QuantizedSpec:
    """Tables, format, pooling and dtypes of one read-only operator. Hashable; no tensors, no batch sizes."""

    layout: Layout
    quantization: Quantization
    pooling: Pooling = "sum"
    output_dtype: torch.dtype = torch.float32
    bounds_check: BoundsCheck = "warn"

    def __post_init__(self) -> None:
        for name, modes in (
            ("quantization", QUANTIZATIONS),
            ("pooling", POOLING_MODES),
            ("bounds_check", BOUNDS_CHECK_MODES),
        ):
            if getattr(self, name) not in modes:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(modes)}")
        if self.output_dtype not in OUTPUT_DTYPES:
            raise ValueError(f"output_dtype={self.output_dtype!r}: expected one of {names(OUTPUT_DTYPES)}")
        if self.pooling == "none" and len(self.layout.dims) > 1:
            raise ValueError(
                f"pooling='none' with dims {list(self.layout.dims)}: expected one dim for all features"
            )

    def __hash__(self) -> int:
        return self.handle

    @cached_property
    def handle(self) -> int:
        """A 62-bit number that names this description, the same in every process, and no ``Spec``'s."""
        fields = (self.layout, self.quantization, self.pooling, self.output_dtype, self.bounds_check)
        digest = hashlib.blake2b(repr(("quantized", *fields)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2

    @property
    def form(self) -> RowFormat:
        return FORMATS[self.quantization]

    @cached_property
    def output_width(self) -> int:
        """Columns of the output: the sum of feature dims, or the dim with pooling ``none``."""
        return self.layout.dims[0] if self.pooling == "none" else self.layout.output_width

    @cached_property
    def group_bases(self) -> tuple[int, ...]:
        """Per group of ``layout``: its first byte in storage."""
        bases, at = [], 0
        for group in self.layout.groups:
            bases.append(at)
            at += group.rows * self.form.row_bytes(group.dim)
        return tuple(bases)

    @cached_property
    def table_bases(self) -> tuple[int, ...]:
        """Per table: its first byte in storage."""
        by_dim = {g.dim: (g, base) for g, base in zip(self.layout.groups, self.group_bases, strict=True)}
        found = []
        for table, row in zip(self.layout.tables, self.layout.row_bases, strict=True):
            group, base = by_dim[table.dim]
            found.append(base + (row - group.row_base) * self.form.row_bytes(table.dim))
        return tuple(found)

    @cached_property
    def total_bytes(self) -> int:
        """Length of the storage."""
        return sum(t.rows * self.form.row_bytes(t.dim) for t in self.layout.tables)

    def table(self, storage: torch.Tensor, number: int) -> torch.Tensor:
        """``[rows, row_bytes]`` view of one table's packed rows."""
        table, base = self.layout.tables[number], self.table_bases[number]
        width = self.form.row_bytes(table.dim)
        return storage[base : base + table.rows * width].view(table.rows, width)

    def problem(
        self,
        index_dtype: torch.dtype = torch.int64,
        offset_dtype: torch.dtype = torch.int64,
        weighted: bool = False,
    ) -> Problem:
        return Problem(
            dims=self.layout.dims,
            total_rows=self.layout.total_rows,
            total_elements=self.layout.total_elements,
            weights_dtype=self.form.code_dtype,
            output_dtype=self.output_dtype,
            index_dtype=index_dtype,
            offset_dtype=offset_dtype,
            pooling=self.pooling,
            bounds_check=self.bounds_check,
            weighted=weighted,
            optimizer=NoOptimizer.NAME,
            optimizer_flags=(),
            deterministic=True,
            quantization=self.quantization,
        )


@dataclass(frozen=True)
class QuantizedLookup:
    """One call's tensors, validated. N lookups, T features, B bags a feature."""

    spec: QuantizedSpec
    plan: Plan
    weights: torch.Tensor
    """Packed rows, uint8 ``[spec.total_bytes]``."""
    indices: torch.Tensor
    """``[N]`` int32 or int64."""
    offsets: torch.Tensor
    """``[T * B + 1]`` int32 or int64, feature-major."""
    per_sample_weights: torch.Tensor | None
    """``[N]`` or None."""

    @property
    def batch(self) -> int:
        """B: bags a feature."""
        return (self.offsets.numel() - 1) // self.spec.layout.features


@runtime_checkable
class QuantizedBackend(Protocol):
    """What a ``Backend`` has besides where it serves quantised tables; without it, it is passed over for them.

    Its ``unsupported`` and ``configure`` are asked with ``Problem.quantization`` set, its ``count_bad`` with a
    ``QuantizedLookup``. Bad ids and bad offsets are read as ``Backend`` says.
    """

    def forward_quantized(self, lookup: QuantizedLookup) -> torch.Tensor:
        """``[B, sum of feature dims]`` (``[N, D]`` with pooling none) in the output dtype; fp32 inside."""
