"""What a device does for the update beyond portable kernels: a pure rule over features, sizes and thresholds.

A feature is a name in ``Capabilities.tlx_features``, there only where it was proven for that architecture.
Nothing here asks for a vendor or an architecture, and nothing that decides is a number of this file: thresholds
are fields of ``DeviceConfig``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .config import DeviceConfig
from .tiers import Route, Tier
from .types import Capabilities

GPU_FENCE = "gpu_fence"
"""A fence orders a thread's memory accesses for the whole GPU."""
CLC = "clc"
"""A running program takes the place of one that has not started (cluster launch control)."""
STORE_REDUCE = "store_reduce"
"""A row in shared memory is added to one in global memory by the memory's own unit, in no fixed order."""
MBARRIER = "mbarrier"
"""Barriers in shared memory that asynchronous copies complete."""
ASYNC_LOAD = "async_load"
"""Copies from global to shared memory beside the program."""
FEATURES = (GPU_FENCE, CLC, STORE_REDUCE, MBARRIER, ASYNC_LOAD)


class Work(enum.Enum):
    """How programs of the update come to their stretches."""

    STATIC = "static"
    """The programs that fit, at most one a stretch, take stretches in turn: each as many as any other, or one
    fewer."""
    STOLEN = "stolen"
    """One program a stretch is launched; a running one takes the places of those that have not started."""


@dataclass(frozen=True)
class Assist:
    """What one launch of the update uses."""

    work: Work
    programs: int
    """Programs of the launch."""
    long_runs: Tier
    """``FUSED`` or ``SPLIT``."""
    reduces: bool
    """Partials of a long run are added up in memory as they come, so that its combine reads one row."""


def fused_programs(caps: Capabilities, config: DeviceConfig) -> int:
    """Up to how many programs the fused tier may run: none without a fence between partial and counter."""
    return config.fused_programs if GPU_FENCE in caps.tlx_features else 0


def may_steal(caps: Capabilities, config: DeviceConfig) -> bool:
    """Whether any launch takes work by launch control."""
    return CLC in caps.tlx_features and config.steal_stretches > 0


def may_reduce(caps: Capabilities, config: DeviceConfig, deterministic: bool) -> bool:
    """Whether any launch adds partials up in memory: its order of additions depends on timing."""
    return STORE_REDUCE in caps.tlx_features and not deterministic and config.reduce_programs > 0


def assist(
    chosen: Route, caps: Capabilities, config: DeviceConfig, deterministic: bool, warps: int = 1
) -> Assist:
    """What a launch with ``chosen``'s stretches and programs, of ``warps`` each, uses on a device."""
    programs = chosen.programs
    fused = chosen.long_runs is Tier.FUSED and programs <= fused_programs(caps, config)
    long_runs = Tier.FUSED if fused else Tier.SPLIT
    work = Work.STATIC
    if may_steal(caps, config) and programs >= config.steal_stretches * caps.processors:
        work = Work.STOLEN
    elif config.persistent_warps:
        programs = balanced(programs, max(caps.processors * config.persistent_warps // warps, 1))
    reduces = not fused and may_reduce(caps, config, deterministic) and chosen.programs >= config.reduce_programs
    return Assist(work, programs, long_runs, reduces)


def balanced(stretches: int, most: int) -> int:
    """The fewest programs, ``most`` at most, of which none takes more turns than ``most`` would need.

    Fewer programs than ``most`` where those would not all have the same number of turns: the last turn is then
    taken by nearly all, not by a few while the others idle.
    """
    turns = max(-(-stretches // most), 1)
    return -(-stretches // turns)


def notes(caps: Capabilities, config: DeviceConfig, deterministic: bool) -> tuple[str, ...]:
    """For a plan: what is used, and why the rest is not."""
    told = []
    if GPU_FENCE in caps.tlx_features:
        told.append(f"long runs are fused up to {config.fused_programs} programs, with a gpu fence")
    else:
        told.append("long runs are never fused: no gpu fence")
    if may_steal(caps, config):
        told.append(f"launch control from {config.steal_stretches} stretches a processor")
    else:
        why = "is off: steal_stretches is 0" if CLC in caps.tlx_features else "does not exist here"
        static = f"a static grid of {config.persistent_warps} warps a processor"
        told.append(f"launch control {why}; {static if config.persistent_warps else 'one stretch a program'}")
    if STORE_REDUCE not in caps.tlx_features:
        told.append("no store-reduce")
    elif deterministic:
        told.append("no store-reduce, since results must repeat bit for bit")
    elif not config.reduce_programs:
        told.append("store-reduce is off: reduce_programs is 0")
    else:
        told.append(f"store-reduce of long runs from {config.reduce_programs} programs")
    return tuple(told)
