"""FBGEMM_GPU's table-batched embedding modules under their own names: replace the import, keep the script.

``docs/fbgemm.md`` says what is served, what is refused and what differs.
"""

from .dense import DenseTableBatchedEmbeddingBagsCodegen
from .enums import (
    BoundsCheckMode,
    CacheAlgorithm,
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    OptimType,
    PoolingMode,
    RecordCacheMetrics,
    SparseType,
    WeightDecayMode,
    get_available_compute_device,
)
from .split import SplitTableBatchedEmbeddingBagsCodegen

__all__ = [
    "BoundsCheckMode",
    "CacheAlgorithm",
    "ComputeDevice",
    "DenseTableBatchedEmbeddingBagsCodegen",
    "EmbOptimType",
    "EmbeddingLocation",
    "OptimType",
    "PoolingMode",
    "RecordCacheMetrics",
    "SparseType",
    "SplitTableBatchedEmbeddingBagsCodegen",
    "WeightDecayMode",
    "get_available_compute_device",
]
