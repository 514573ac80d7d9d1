"""The optimizers that are fused into the backward."""

from .base import REGISTRY, Hyper, Optimizer, RowState, StateKind, StateSpec
from .rowwise_adagrad import WEIGHT_DECAY_MODES, RowwiseAdagrad
from .sgd import SGD

__all__ = [
    "REGISTRY",
    "SGD",
    "WEIGHT_DECAY_MODES",
    "Hyper",
    "Optimizer",
    "RowState",
    "RowwiseAdagrad",
    "StateKind",
    "StateSpec",
]
