"""Portable table-batched embeddings: lookup, pooling and a fused exact optimizer behind one contract."""

from tbe_core import BackendError, Capabilities, Plan, Table
from tbe_core.optimizers import (
    LAMB,
    LARS,
    SGD,
    Adagrad,
    Adam,
    NoOptimizer,
    Optimizer,
    PartialRowwiseAdam,
    PartialRowwiseLAMB,
    RowwiseAdagrad,
)

from . import init
from .bounds import BadLookupWarning
from .checkpoint import load_checkpoint, save_checkpoint
from .fused_optimizer import FusedOptimizer
from .module import TableBatchedEmbeddingBags, plan
from .policy import BackendStatus, backends, settle, use_backend
from .probe import capabilities
from .quantized import QuantizedTableBatchedEmbeddingBags, quantize
from .rows import initialise, resized

__version__ = "0.1.0"

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adagrad",
    "Adam",
    "BackendError",
    "BackendStatus",
    "BadLookupWarning",
    "Capabilities",
    "FusedOptimizer",
    "NoOptimizer",
    "Optimizer",
    "PartialRowwiseAdam",
    "PartialRowwiseLAMB",
    "Plan",
    "QuantizedTableBatchedEmbeddingBags",
    "RowwiseAdagrad",
    "Table",
    "TableBatchedEmbeddingBags",
    "backends",
    "capabilities",
    "init",
    "initialise",
    "load_checkpoint",
    "plan",
    "quantize",
    "resized",
    "save_checkpoint",
    "settle",
    "use_backend",
]
