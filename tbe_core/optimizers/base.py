"""What an optimizer is: hyper-parameters, state layout and a reference step; one file each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch

StateKind = Literal["row", "element"]


@dataclass(frozen=True)
class StateSpec:
    """One state tensor: its checkpoint name and whether it holds a scalar a row or a value an element."""

    name: str
    kind: StateKind


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters as 0-d tensors, in the order of ``Optimizer.HYPER``.

    Tensor-valued so that a scheduler's change, or a captured graph's replay, sees the present value.
    """

    values: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    step: torch.Tensor
    """0-d int64: steps of the operator, this one included. Read only where ``COUNTS_STEPS``."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.values[self.names.index(name)]


RowState = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Optimizer:
    """Base of the fused optimizers.

    A subclass declares ``NAME``, ``STATE``, ``HYPER`` (names of its tensor-valued hyper-parameters, ``lr``
    first) and ``step_rows``. Structural options, which choose code and not values, are listed in ``FLAGS``.
    ``COUNTS_STEPS``: the step depends on how many came before. ``STEPS``: False only for ``NoOptimizer``.
    """

    lr: float = 0.01

    NAME: ClassVar[str] = ""
    STATE: ClassVar[tuple[StateSpec, ...]] = ()
    HYPER: ClassVar[tuple[str, ...]] = ("lr",)
    FLAGS: ClassVar[tuple[str, ...]] = ()
    COUNTS_STEPS: ClassVar[bool] = False
    STEPS: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in self.HYPER:
                continue  # a structural option: the subclass checks it
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{field.name}={value!r}: expected a finite number")
            if value < 0:
                raise ValueError(f"{field.name}={value!r}: expected a number >= 0")

    @property
    def flags(self) -> dict[str, str | bool]:
        """Structural options: part of the problem that decides which kernel runs."""
        return {name: getattr(self, name) for name in self.FLAGS}

    def hyper_values(self) -> list[float]:
        """The tensor-valued hyper-parameters, in the order of ``HYPER``."""
        return [float(getattr(self, name)) for name in self.HYPER]

    def step_rows(self, w: torch.Tensor, g: torch.Tensor, state: RowState, hyper: Hyper) -> torch.Tensor:
        """One exact step.

        Args:
            w: ``[R, D]`` rows, fp32 or fp64.
            g: ``[R, D]`` completed gradient sums of those rows, same dtype.
            state: name to ``[R]`` (per row) or ``[R, D]`` (per element); updated in place.
            hyper: present hyper-parameters.

        Returns:
            ``[R, D]`` new rows.
        """
        raise TypeError(f"{type(self).__name__} does not define step_rows")


REGISTRY: dict[str, type[Optimizer]] = {}


def register(name: str) -> Callable[[type[Optimizer]], type[Optimizer]]:
    """Enter an optimizer class under ``name``; refuses a second class of the same name."""

    def enter(cls: type[Optimizer]) -> type[Optimizer]:
        if name in REGISTRY:
            raise ValueError(f"optimizer {name!r} is registered twice")
        cls.NAME = name
        REGISTRY[name] = cls
        return cls

    return enter
