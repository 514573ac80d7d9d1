"""FBGEMM_GPU's optimizers and their arguments as this library's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tbe_core.optimizers as ours

from .arguments import refuse
from .enums import OptimType, WeightDecayMode, member

DECAY_MODES = {
    WeightDecayMode.NONE: "none",
    WeightDecayMode.L2: "l2",
    WeightDecayMode.DECOUPLE: "decoupled",
}
CLASSES: dict[OptimType, type[ours.Optimizer]] = {
    OptimType.EXACT_SGD: ours.SGD,
    OptimType.EXACT_ADAGRAD: ours.Adagrad,
    OptimType.EXACT_ROWWISE_ADAGRAD: ours.RowwiseAdagrad,
    OptimType.ADAM: ours.Adam,
    OptimType.PARTIAL_ROWWISE_ADAM: ours.PartialRowwiseAdam,
    OptimType.LAMB: ours.LAMB,
    OptimType.PARTIAL_ROWWISE_LAMB: ours.PartialRowwiseLAMB,
    OptimType.LARS_SGD: ours.LARS,
}
UPDATABLE = ("lr", "eps", "beta1", "beta2", "weight_decay")
"""What ``update_hyper_parameters`` takes."""


class OptimizerArgs(NamedTuple):
    """The optimizer's arguments as given, those that it does not read included; the learning rate is apart."""

    stochastic_rounding: bool
    gradient_clipping: bool
    max_gradient: float
    max_norm: float
    eps: float
    beta1: float
    beta2: float
    weight_decay: float
    weight_decay_mode: int
    eta: float
    momentum: float


def optimizer_class(optimizer: Any) -> type[ours.Optimizer]:
    """Raises ``NotImplementedError`` for one that is not provided."""
    kind = member(OptimType, "optimizer", optimizer)
    if kind not in CLASSES:
        provided = ", ".join(k.name for k in CLASSES)
        raise refuse("optimizer", optimizer, "this optimizer is not provided", f"one of {provided}")
    return CLASSES[kind]


def make(optimizer: Any, learning_rate: float, args: OptimizerArgs) -> ours.Optimizer:
    """The fused optimizer. Arguments that FBGEMM_GPU's optimizer does not read have no effect here either.

    Raises:
        NotImplementedError: an optimizer or a weight decay mode that is not provided.
        ValueError: a value that the optimizer refuses.
    """
    cls = optimizer_class(optimizer)
    values: dict[str, Any] = {name: getattr(args, name) for name in cls.HYPER if name != "lr"}
    if cls is ours.RowwiseAdagrad:
        mode = member(WeightDecayMode, "weight_decay_mode", args.weight_decay_mode)
        if mode not in DECAY_MODES:
            raise refuse("weight_decay_mode", mode, "this mode is not provided", "NONE, L2 or DECOUPLE")
        values["weight_decay_mode"] = DECAY_MODES[mode]
        if mode is WeightDecayMode.NONE:
            values["weight_decay"] = 0.0
    return cls(lr=learning_rate, **values)


def effective(optimizer: ours.Optimizer, values: Mapping[str, float]) -> dict[str, float]:
    """Those of ``values`` that the optimizer reads."""
    read = {*optimizer.HYPER}
    if isinstance(optimizer, ours.RowwiseAdagrad) and optimizer.weight_decay_mode == "none":
        read -= {"weight_decay"}
    return {name: value for name, value in values.items() if name in read}
