"""Tier routing by run length: pure functions of counts and thresholds.

A *run* is one row's lookups after the sort; a *stretch* is the block of consecutive sorted lookups that one
update program owns. The kernels decide run by run, on the device, by the rule of ``tier_of_run``; the host
decides per launch, from the number of lookups alone, by ``route``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .config import DeviceConfig
from .spec import Spec
from .types import Capabilities


class Tier(enum.Enum):
    """How a run's gradient sum is completed."""

    SHORT = "short"
    """One program sums the run and steps the row."""
    SPLIT = "split"
    """Programs leave partial sums; a second launch combines them in order and steps the row."""
    FUSED = "fused"
    """Programs leave partial sums; the last to arrive combines them in order, in the same launch."""
    DENSE = "dense"
    """A table of few rows: counts transposed times gradient, without a sort."""


@dataclass(frozen=True)
class Route:
    """What one backward launches."""

    stretch: int
    programs: int
    long_runs: Tier
    """``FUSED`` or ``SPLIT``: what happens to runs that are not short."""


def route(lookups: int, config: DeviceConfig, caps: Capabilities, warps: int = 1) -> Route:
    """The stretch, the number of programs of ``warps`` and the tier of long runs for sorted lookups."""
    full = max(caps.processors * config.warps_per_processor // warps, 1)
    stretch = config.stretch
    while stretch > config.stretch_small and lookups < stretch * full:
        stretch //= 2
    programs = -(-lookups // stretch)
    return Route(stretch, programs, Tier.FUSED if programs <= config.fused_programs else Tier.SPLIT)


def small_tables(spec: Spec, config: DeviceConfig) -> frozenset[int]:
    """The tables that a step may change and that are small enough for the dense tier, which steps: none where a
    sparse gradient is asked for."""
    if not spec.optimizer.STEPS:
        return frozenset()
    return frozenset(t for t in spec.trained if spec.layout.tables[t].rows <= config.dense_rows)


def takes_dense_tier(spec: Spec, lookups: int, batch: int, weighted: bool, config: DeviceConfig) -> bool:
    """Whether the small tables of a call take the dense tier: its bags repeat rows, and nothing is weighted,
    since only counts are exact in the tensor cores' number formats."""
    if weighted or spec.pooling == "none" or batch < config.dense_batch:
        return False
    return lookups >= config.dense_length * batch * spec.layout.features


def is_long(start: int, length: int, stretch: int) -> bool:
    """Whether a run is cut: it covers a whole stretch and lookups on both sides of it.

    A run that merely crosses into the next stretch stays with the program where it starts, which walks on;
    so no program walks more than twice its stretch and short runs never need a partial.
    """
    first_full = (start // stretch + 1) * stretch
    return start + length > first_full + stretch


def tier_of_run(start: int, length: int, chosen: Route) -> Tier:
    """The tier that completes the run of ``length`` lookups which starts at sorted position ``start``."""
    return chosen.long_runs if is_long(start, length, chosen.stretch) else Tier.SHORT
