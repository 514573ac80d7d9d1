"""FBGEMM_GPU's constructor arguments: what they mean here, and which are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tbe_core import Table
from tbe_core.types import Pooling

from .enums import BoundsCheckMode, ComputeDevice, EmbeddingLocation, PoolingMode, SparseType, member

POOLING: dict[PoolingMode, Pooling] = {
    PoolingMode.SUM: "sum",
    PoolingMode.MEAN: "mean",
    PoolingMode.NONE: "none",
}
LOCATIONS = {EmbeddingLocation.HOST: "host", EmbeddingLocation.DEVICE: "dev"}
"""Suffixes of the state's names in a checkpoint."""

REFUSED: Mapping[str, str] = {
    "gather_uvm_cache_stats": "no table is cached, there are no cache statistics",
    "uvm_non_rowwise_momentum": "optimizer state stays in the memory of its tables",
    "stats_reporter_config": "no statistics are reported",
    "multipass_prefetch_config": "no table is cached, there is nothing to prefetch",
    "tbe_input_multiplexer_config": "inputs are not copied to a multiplexer",
    "enable_raw_embedding_streaming": "rows are not streamed to another service",
    "is_qr_tbe": "the quotient-remainder module is not provided",
    "preallocated_host_buffers": "the module allocates its tables itself",
    "ensemble_mode": "ensemble row-wise Adagrad is not provided",
    "emainplace_mode": "EMA row-wise Adagrad is not provided",
    "counter_based_regularization": "row-wise Adagrad with counters is not provided",
    "cowclip_regularization": "CowClip is not provided",
    "global_weight_decay": "global weight decay is not provided",
}
"""Arguments that must keep their default (None or False), and why."""


def refuse(name: str, value: object, why: str, instead: str = "its default") -> NotImplementedError:
    """The error for what FBGEMM_GPU has and this drop-in has not."""
    return NotImplementedError(f"{name}={value!r} is not supported: {why}; expected {instead}")


def refuse_unsupported(arguments: Mapping[str, Any]) -> None:
    """Raises ``NotImplementedError`` for the first argument that asks for what is not here."""
    for name, why in REFUSED.items():
        value = arguments[name]
        if value is not None and value is not False:
            raise refuse(name, value, why)
    for name in ("record_cache_metrics", "extra_optimizer_config"):
        value = arguments[name]
        fields = value._asdict() if hasattr(value, "_asdict") else vars(value) if value is not None else {}
        asked = [field for field, on in fields.items() if on]
        if asked:
            why = "no table is cached" if name == "record_cache_metrics" else "this mode is not provided"
            raise refuse(f"{name}.{asked[0]}", fields[asked[0]], why)
    for name, given in (arguments["optimizer_state_dtypes"] or {}).items():
        if member(SparseType, f"optimizer_state_dtypes[{name!r}]", given) is not SparseType.FP32:
            raise refuse(f"optimizer_state_dtypes[{name!r}]", given, "optimizer state is fp32", "SparseType.FP32")


@dataclass(frozen=True)
class Placed:
    """The tables of ``embedding_specs`` and where they are."""

    tables: tuple[Table, ...]
    location: EmbeddingLocation
    device: torch.device


def dtype_of(name: str, given: Any) -> torch.dtype:
    """Of a ``SparseType``; raises ``NotImplementedError`` for a format that is not served."""
    kind = member(SparseType, name, given)
    if kind not in (SparseType.FP32, SparseType.FP16, SparseType.BF16):
        raise refuse(name, given, "tables and outputs are not quantised", "FP32, FP16 or BF16")
    return kind.as_dtype()


def bounds_mode(given: Any) -> BoundsCheckMode:
    """One of FATAL, WARNING, IGNORE and NONE."""
    mode = member(BoundsCheckMode, "bounds_check_mode", given)
    return BoundsCheckMode[mode.name.removeprefix("V2_")]


def table_names(names: Sequence[str] | None, count: int) -> list[str]:
    """Distinct names: those given, numbered where several shards of one table share a name."""
    if names is None:
        return [f"table_{t}" for t in range(count)]
    if len(names) != count:
        raise ValueError(f"table_names has {len(names)} names: expected {count}, one for each of embedding_specs")
    if len({*names}) == count:
        return list(names)
    return [f"{name}_{t}" for t, name in enumerate(names)]


def sized(names: Sequence[str] | None, sizes: Sequence[tuple[int, int]]) -> tuple[Table, ...]:
    """Tables of ``(rows, dim)``; raises ``ValueError`` where there is none."""
    if not sizes:
        raise ValueError("embedding_specs is empty: expected at least one table")
    named = zip(table_names(names, len(sizes)), sizes, strict=True)
    return tuple(Table(name, int(rows), int(dim)) for name, (rows, dim) in named)


def checked_map(feature_table_map: Sequence[int] | None, tables: int) -> list[int]:
    """One table number a feature; FBGEMM_GPU wants every table to have a feature."""
    found = list(range(tables)) if feature_table_map is None else list(feature_table_map)
    unused = sorted({*range(tables)} - {*found})
    if unused:
        raise ValueError(f"feature_table_map={found}: expected a feature for every table, {unused} have none")
    return found


def placed(specs: Sequence[tuple[int, int, Any, Any]], names: Sequence[str] | None, device: Any) -> Placed:
    """Check ``embedding_specs``.

    Raises:
        NotImplementedError: a location or device that is not served.
        ValueError: a spec contradicts itself or another.
    """
    tables = sized(names, [(spec[0], spec[1]) for spec in specs])
    locations = [member(EmbeddingLocation, f"embedding_specs[{t}][2]", s[2]) for t, s in enumerate(specs)]
    computes = [member(ComputeDevice, f"embedding_specs[{t}][3]", s[3]) for t, s in enumerate(specs)]
    for t, (location, compute) in enumerate(zip(locations, computes, strict=True)):
        if compute is ComputeDevice.MTIA:
            raise refuse(f"embedding_specs[{t}][3]", compute, "there are no kernels for it", "CPU or CUDA")
        if location not in LOCATIONS:
            why = "tables live whole in the memory of the device that looks them up"
            raise refuse(f"embedding_specs[{t}][2]", location, why, "DEVICE, or HOST with ComputeDevice.CPU")
        if compute is not computes[0]:
            raise ValueError(f"embedding_specs[{t}][3]={compute!r}: expected {computes[0]!r}, as table 0 has")
        if (location is EmbeddingLocation.HOST) != (compute is ComputeDevice.CPU):
            raise ValueError(
                f"embedding_specs[{t}]: {location!r} with {compute!r}, expected HOST with CPU or DEVICE with CUDA"
            )
    kind = "cpu" if computes[0] is ComputeDevice.CPU else "cuda"
    where = torch.device(kind if device is None else device)
    if where.type != kind:
        raise ValueError(
            f"device={device!r}: expected a {kind} device, as embedding_specs ask for {computes[0]!r}"
        )
    return Placed(tables, locations[0], where)
