"""Where the fused tier may run: one rule, pure. No Triton here.

The last program to arrive sums partials that other programs stored. That is right only if a program's stores have
reached memory before it is counted in. The count is an atomic with release order, which covers the stores of the
wave that executes it; those of the program's other waves it covers only if the barrier before it waits for them.
"""

from __future__ import annotations

from dataclasses import replace

from tbe_core import Capabilities, DeviceConfig


def fused_tier_hazard(caps: Capabilities) -> str | None:
    """Why long runs must not be fused on this device, or None: they may.

    On gfx90a, gfx942 and gfx950 Triton 3.8 compiles the barrier to an ``s_barrier`` that waits for LDS, not for
    stores to global memory. On gfx1100 it waits for stores too, but nothing ran there: all of AMD counts as
    hazardous until it has. docs/amd.md has the argument.
    """
    if caps.vendor == "amd":
        return "a barrier of Triton may not wait for other waves' stores on AMD"
    return None


def without_hazard(config: DeviceConfig, caps: Capabilities) -> DeviceConfig:
    """``config`` with the fused tier off where it is hazardous, whatever a device file says."""
    return config if fused_tier_hazard(caps) is None else replace(config, fused_programs=0)
