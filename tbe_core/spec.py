"""The static description of one operator: what a module is, without its tensors."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import torch

from .dtypes import OUTPUT_DTYPES, WEIGHT_DTYPES, names
from .layout import Layout
from .optimizers import Optimizer
from .types import BOUNDS_CHECK_MODES, POOLING_MODES, BoundsCheck, Pooling, Problem


@dataclass(frozen=True)
class Spec:
    """Tables, pooling, optimizer and dtypes of one operator. Hashable; no tensors, no batch sizes."""

    layout: Layout
    optimizer: Optimizer
    pooling: Pooling = "sum"
    weights_dtype: torch.dtype = torch.float32
    output_dtype: torch.dtype = torch.float32
    bounds_check: BoundsCheck = "warn"
    deterministic: bool = True
    stochastic_rounding: bool = False
    gradient_clipping: float | None = None
    """Elements of the output's gradient are clamped to [-x, x] before anything is made of them."""
    frozen: tuple[int, ...] = ()
    """Numbers of the tables that are looked up and never stepped, ascending."""

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, Optimizer):
            raise ValueError(f"optimizer={self.optimizer!r}: expected an optimizer such as tbe.SGD(lr=0.01)")
        for name, modes in (("pooling", POOLING_MODES), ("bounds_check", BOUNDS_CHECK_MODES)):
            if getattr(self, name) not in modes:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(modes)}")
        for name, dtypes in (("weights_dtype", WEIGHT_DTYPES), ("output_dtype", OUTPUT_DTYPES)):
            if getattr(self, name) not in dtypes:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {names(dtypes)}")
        if self.stochastic_rounding and self.weights_dtype == torch.float32:
            raise ValueError(
                "stochastic_rounding=True with weights_dtype float32: expected float16 or bfloat16, or "
                "stochastic_rounding=False; fp32 tables are never rounded"
            )
        if self.stochastic_rounding and not self.optimizer.STEPS:
            raise ValueError(
                "stochastic_rounding=True with NoOptimizer: expected False, rows are stepped by a torch optimizer"
            )
        if self.pooling == "none" and len(self.layout.dims) > 1:
            raise ValueError(
                f"pooling='none' with dims {list(self.layout.dims)}: expected one dim for all features"
            )
        limit = self.gradient_clipping
        if limit is not None and not (type(limit) is float and 0 < limit < math.inf):
            raise ValueError(f"gradient_clipping={limit!r}: expected a finite float > 0, or None")
        if list(self.frozen) != sorted({*self.frozen} & {*range(len(self.layout.tables))}):
            raise ValueError(f"frozen={self.frozen!r}: expected distinct table numbers, ascending")

    def __hash__(self) -> int:
        # Kept: hashing every table on every call would cost the host more than a launch.
        return self.handle

    @cached_property
    def handle(self) -> int:
        """A 62-bit number that names this description, the same in every process."""
        text = repr((self.layout, self.optimizer, self.pooling, self.weights_dtype, self.output_dtype,
                     self.bounds_check, self.deterministic, self.stochastic_rounding, self.gradient_clipping,
                     self.frozen))  # fmt: skip
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2

    @property
    def counts_steps(self) -> bool:
        """Whether a step depends on how many came before."""
        return self.optimizer.COUNTS_STEPS or self.stochastic_rounding

    @cached_property
    def trained(self) -> frozenset[int]:
        """The tables that a step may change: looked up and not frozen."""
        return frozenset(self.layout.feature_table_map) - {*self.frozen}

    @cached_property
    def output_width(self) -> int:
        """Columns of the output: the sum of feature dims, or the dim with pooling ``none``."""
        return self.layout.dims[0] if self.pooling == "none" else self.layout.output_width

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
            weights_dtype=self.weights_dtype,
            output_dtype=self.output_dtype,
            index_dtype=index_dtype,
            offset_dtype=offset_dtype,
            pooling=self.pooling,
            bounds_check=self.bounds_check,
            weighted=weighted,
            optimizer=self.optimizer.NAME,
            optimizer_flags=tuple(self.optimizer.flags.items()),
            deterministic=self.deterministic,
            stochastic_rounding=self.stochastic_rounding,
        )
