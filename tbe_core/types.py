"""The central types: what a table, a problem and a device are. No tensors here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from .dtypes import short_name

Pooling = Literal["sum", "mean", "none"]
POOLING_MODES: tuple[str, ...] = get_args(Pooling)

BoundsCheck = Literal["error", "warn", "ignore", "none"]
BOUNDS_CHECK_MODES: tuple[str, ...] = get_args(BoundsCheck)

PRUNED_ID = -1
"""An id that means "no such row": contributes nothing and trains nothing, in every mode."""


@dataclass(frozen=True)
class Table:
    """One embedding table of ``rows`` x ``dim``."""

    name: str
    rows: int
    dim: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or "." in self.name:
            raise ValueError(f"name={self.name!r}: expected a non-empty string without dots")
        for field in ("rows", "dim"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field}={value!r} of table {self.name!r}: expected an integer >= 1")


@dataclass(frozen=True)
class Problem:
    """Everything that decides *which kernel* runs; never raw batch sizes. Hashable."""

    dims: tuple[int, ...]
    """Distinct dims of the tables that are looked up, ascending."""
    total_rows: int
    total_elements: int
    weights_dtype: torch.dtype
    output_dtype: torch.dtype
    index_dtype: torch.dtype
    offset_dtype: torch.dtype
    pooling: Pooling
    bounds_check: BoundsCheck
    weighted: bool
    optimizer: str
    optimizer_flags: tuple[tuple[str, str | bool], ...]
    deterministic: bool
    stochastic_rounding: bool = False
    quantization: str | None = None
    """Of read-only tables, by name of ``tbe_core.quantization.FORMATS``; no optimizer then."""

    @property
    def max_dim(self) -> int:
        return self.dims[-1]

    def __str__(self) -> str:
        dims = ",".join(map(str, self.dims)) if len(self.dims) <= 6 else f"{self.dims[0]}..{self.dims[-1]}"
        rows = self.quantization or short_name(self.weights_dtype)
        return (
            f"{self.pooling} D={dims} {rows}->{short_name(self.output_dtype)} "
            f"ids {short_name(self.index_dtype)}/{short_name(self.offset_dtype)}"
            f"{' weighted' if self.weighted else ''} {'read-only' if self.quantization else self.optimizer}"
            f"{' stochastic rounding' if self.stochastic_rounding else ''}"
            f"{'' if self.deterministic else ' non-deterministic'}"
        )


@dataclass(frozen=True)
class Capabilities:
    """Facts about one device, constructible by hand so that routing is tested without the device."""

    device_type: str
    """torch's device type. A ROCm device presents as ``cuda``: ask ``vendor`` instead."""
    vendor: str
    """``cpu``, ``nvidia`` or ``amd``."""
    arch: str
    """``sm_90``, ``gfx942``, or the processor's name."""
    name: str = ""
    processors: int = 1
    """Streaming multiprocessors, compute units or cores."""
    memory_bytes: int = 0
    l2_bytes: int = 0
    warp_size: int = 1
    torch_version: str = ""
    triton_version: str | None = None
    triton_interpret: bool = False
    """Triton kernels run in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors."""
    tlx_provider: str | None = None
    """Package and version that provides TLX, where it could serve the device."""
    tlx_features: frozenset[str] = frozenset()
    """Names of ``tbe_core.assist`` that the provider was seen to compile for this architecture."""
    cccl_version: str | None = None
    """Version of the ``cuda-cccl`` package (radix sort), when installed."""
    config_dir: str | None = None
    """Directory of the user's own device files (TBE_CONFIG_DIR), which come before a backend's."""

    def __str__(self) -> str:
        return f"{self.name or self.arch} ({self.vendor} {self.arch}, {self.processors} processors)"
