"""The optimizers that are fused into the backward."""

from .adagrad import Adagrad
from .adam import Adam, PartialRowwiseAdam
from .base import REGISTRY, Hyper, Optimizer, RowState, StateKind, StateSpec
from .lamb import LAMB, PartialRowwiseLAMB
from .lars import LARS
from .none import NoOptimizer
from .rowwise_adagrad import WEIGHT_DECAY_MODES, RowwiseAdagrad
from .sgd import SGD

__all__ = [
    "LAMB",
    "LARS",
    "REGISTRY",
    "SGD",
    "WEIGHT_DECAY_MODES",
    "Adagrad",
    "Adam",
    "Hyper",
    "NoOptimizer",
    "Optimizer",
    "PartialRowwiseAdam",
    "PartialRowwiseLAMB",
    "RowState",
    "RowwiseAdagrad",
    "StateKind",
    "StateSpec",
]
