"""The contract between the front door and a backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from .config import DeviceConfig
from .plan import Plan
from .spec import Spec
from .types import Capabilities, Problem

BAD_LOOKUPS, BAD_OFFSETS = 0, 1
"""Places in the ``bad`` counters."""


@dataclass(frozen=True)
class Lookup:
    """One call's tensors, validated. N lookups, T features, B bags a feature."""

    spec: Spec
    plan: Plan
    weights: torch.Tensor
    """Flat storage ``[spec.layout.total_elements]``."""
    indices: torch.Tensor
    """``[N]`` int32 or int64."""
    offsets: torch.Tensor
    """``[T * B + 1]`` int32 or int64, feature-major."""
    per_sample_weights: torch.Tensor | None
    """``[N]`` or None."""

    @property
    def batch(self) -> int:
        """B: bags a feature."""
        return (self.offsets.numel() - 1) // self.spec.layout.features


@dataclass(frozen=True)
class Training:
    """What the update needs beyond the lookup."""

    states: tuple[torch.Tensor, ...]
    """Optimizer states in the order of ``Optimizer.STATE``: ``[total_rows]`` or ``[total_elements]``, fp32."""
    hyper: torch.Tensor
    """fp32 ``[len(HYPER)]`` on the tables' device, in the order of ``Optimizer.HYPER``."""
    counter: torch.Tensor | None = None
    """int64 ``[2]``: the steps so far, the one under way included; the seed of stochastic rounding. None where
    ``Spec.counts_steps`` is false."""

    def advance(self) -> None:
        """Count a step: called once before each ``backward_update``."""
        if self.counter is not None:
            self.counter.select(0, 0).add_(1)


@runtime_checkable
class Backend(Protocol):
    """What a backend package provides: an object ``backend`` in its top-level module.

    Bad ids (below 0, or not below the table's rows) contribute nothing and train nothing. Bags whose offsets
    are out of order or out of range are read as empty. Neither the caller's tensors nor anything but the
    touched rows and their state may change. No host synchronisation.
    """

    name: str

    def unavailable(self, caps: Capabilities) -> str | None:
        """Why nothing can run on this device, in a sentence that says what to do; None: it can."""

    def preference(self, caps: Capabilities) -> int:
        """The higher is tried first. Below 0: only on explicit request."""

    def unsupported(self, problem: Problem, caps: Capabilities) -> tuple[str, ...]:
        """Every reason why this problem cannot be served; empty: it can."""

    def configure(self, problem: Problem, caps: Capabilities) -> tuple[DeviceConfig, tuple[str, ...]]:
        """The device's thresholds, and notes for the plan (which sort, which tiers, and why)."""

    def settle(self) -> None:
        """Wait for what is being built in the background; steps before that are right, only slower."""

    def count_bad(self, lookup: Lookup, bad: torch.Tensor) -> None:
        """Add to int64 ``bad[2]`` the ids outside [-1, rows) and the offsets out of order or range."""

    def carry_bytes(self, spec: Spec, config: DeviceConfig, lookups: int, batch: int, weighted: bool) -> int:
        """Bytes that a training forward hands to its backward, such as the sorted lookups; may be 0.

        Arithmetic on sizes alone, which torch.compile passes as symbols.
        """

    def forward(self, lookup: Lookup, carry: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up and pool.

        Returns:
            ``[B, sum of feature dims]`` (``[N, D]`` with pooling none) in the output dtype; and uint8
            ``[carry_bytes(...)]`` for the backward when ``carry`` is set, else ``[0]``.
        """

    def prepare(self, lookup: Lookup) -> torch.Tensor:
        """What ``forward(lookup, True)`` returns for the backward, without the forward."""

    def backward_update(
        self, lookup: Lookup, grad: torch.Tensor, training: Training, carry: torch.Tensor
    ) -> None:
        """One exact optimizer step of every touched row, in place.

        ``grad``: like the output. ``carry``: what the forward of the same lookup returned.
        """

    def row_gradients(
        self, lookup: Lookup, grad: torch.Tensor, carry: torch.Tensor
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """With ``NoOptimizer``, in place of ``backward_update``: the completed gradient of every touched row.

        Waits for a GPU: only the device knows how many rows were touched.

        Returns:
            Per table of ``spec.trained``: ``[U]`` int64 rows of the table, ascending and distinct, and ``[U, D]``
            their gradients in the tables' dtype, rounded once from the fp32 sum.
        """

    def per_sample_weight_grad(self, lookup: Lookup, grad: torch.Tensor) -> torch.Tensor:
        """``[N]`` fp32: <row before the update, its bag's output gradient>, over the length for mean."""
