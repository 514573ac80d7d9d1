"""No fused optimizer: the backward gives every table a sparse gradient, for an optimizer of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .base import Optimizer


@dataclass(frozen=True)
class NoOptimizer(Optimizer):
    """The backward steps nothing: ``<table>.weight`` is a parameter, and its ``grad`` a sparse COO tensor.

    One entry a touched row, in order: the fp32 sum over the row's lookups, rounded once to the table's dtype. For
    ``torch.optim.SGD``, ``Adagrad``, ``SparseAdam`` and whatever else takes sparse gradients, which have the
    hyper-parameters and the state. Not in ``REGISTRY``, whose optimizers have a step.
    """

    lr: float = field(default=0.0, init=False, repr=False)

    NAME: ClassVar[str] = "none"
    HYPER: ClassVar[tuple[str, ...]] = ()
    STEPS: ClassVar[bool] = False
