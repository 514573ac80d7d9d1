"""The names and values of FBGEMM_GPU's enums. Its own members are taken in their place: only the value counts."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, TypeVar

import torch


@enum.unique
class OptimType(enum.Enum):
    """Which optimizer is fused into the backward."""

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    LAMB = "lamb"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    LARS_SGD = "lars_sgd"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    ROWWISE_ADAGRAD = "row_wise_adagrad"
    SHAMPOO = "shampoo"
    SHAMPOO_V2 = "shampoo_v2"
    MADGRAD = "madgrad"
    EXACT_ROWWISE_WEIGHTED_ADAGRAD = "exact_row_wise_weighted_adagrad"
    ENSEMBLE_ROWWISE_ADAGRAD = "ensemble_row_wise_adagrad"
    EMAINPLACE_ROWWISE_ADAGRAD = "ema_in_place_row_wise_adagrad"
    NONE = "none"

    def __str__(self) -> str:
        return self.value


EmbOptimType = OptimType
"""The name that FBGEMM_GPU's ``split_embedding_configs`` has for it."""

_TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@enum.unique
class SparseType(enum.Enum):
    """A number format. fp32, fp16 and bf16 are served."""

    FP32 = "fp32"
    FP16 = "fp16"
    FP8 = "fp8"
    NFP8 = "nfp8"
    INT8 = "int8"
    INT4 = "int4"
    INT2 = "int2"
    BF16 = "bf16"
    MX4 = "mx4"

    def __str__(self) -> str:
        return self.value

    @staticmethod
    def from_dtype(dtype: torch.dtype) -> SparseType:
        """Raises ``ValueError`` for a dtype that is not served."""
        for value, known in _TORCH.items():
            if known == dtype:
                return SparseType(value)
        raise ValueError(f"dtype={dtype}: expected one of {', '.join(map(str, _TORCH.values()))}")

    def as_dtype(self) -> torch.dtype:
        """Raises ``ValueError`` for a format that is not served."""
        if self.value not in _TORCH:
            raise ValueError(f"{self!r}: expected one of {', '.join(_TORCH)}")
        return _TORCH[self.value]

    def as_int(self) -> int:
        """The number under which FBGEMM_GPU's operators know the format."""
        order = ("fp32", "fp16", "int8", "int4", "int2", "bf16", "fp8", "mx4", "nfp8")
        return order.index(self.value)

    def bit_rate(self) -> int:
        """Bits an element."""
        return int("".join(c for c in self.value if c.isdigit()))

    def is_float(self) -> bool:
        return "fp" in self.value or self is SparseType.BF16


class EmbeddingLocation(enum.IntEnum):
    """Where a table lives: ``DEVICE`` on a GPU, ``HOST`` for tables of the CPU; the rest is refused."""

    DEVICE = 0
    MANAGED = 1
    MANAGED_CACHING = 2
    HOST = 3
    MTIA = 4


class ComputeDevice(enum.IntEnum):
    """Where lookups run."""

    CPU = 0
    CUDA = 1
    MTIA = 2


class PoolingMode(enum.IntEnum):
    """How the rows of a bag become one."""

    SUM = 0
    MEAN = 1
    NONE = 2

    def do_pooling(self) -> bool:
        return self is not PoolingMode.NONE


class BoundsCheckMode(enum.IntEnum):
    """What happens to bad ids and offsets; the ``V2_`` modes are their namesakes here."""

    FATAL = 0
    WARNING = 1
    IGNORE = 2
    NONE = 3
    V2_IGNORE = 4
    V2_WARNING = 5
    V2_FATAL = 6


class WeightDecayMode(enum.IntEnum):
    """Row-wise Adagrad's weight decay; ``COUNTER`` and after are refused."""

    NONE = 0
    L2 = 1
    DECOUPLE = 2
    COUNTER = 3
    COWCLIP = 4
    DECOUPLE_GLOBAL = 5


class CacheAlgorithm(enum.Enum):
    """No table is cached here: without effect."""

    LRU = 0
    LFU = 1


class RecordCacheMetrics(NamedTuple):
    """No table is cached here: both must be False."""

    record_cache_miss_counter: bool
    record_tablewise_cache_miss: bool


def get_available_compute_device() -> ComputeDevice:
    """``CUDA`` where torch sees a GPU, else ``CPU``."""
    return ComputeDevice.CUDA if torch.cuda.is_available() else ComputeDevice.CPU


Member = TypeVar("Member", bound=enum.Enum)


def member(kind: type[Member], name: str, given: Any) -> Member:
    """Our member for ours, FBGEMM_GPU's, or a bare value; raises ``ValueError`` naming the argument."""
    value = given.value if isinstance(given, enum.Enum) else given
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(m.name for m in kind)
        raise ValueError(f"{name}={given!r}: expected a {kind.__name__}, one of {known}") from None
