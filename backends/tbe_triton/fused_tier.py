"""Where the fused tier may run: one rule, pure, and the portable backend that obeys it. No Triton here.

The last program to arrive sums partials that other programs stored. That is right only if a program's stores have
reached memory before it is counted in. The count is an atomic with release order, which covers the stores of the
wave that executes it; those of the program's other waves it covers only if the barrier before it waits for them.
"""

from __future__ import annotations

from dataclasses import replace

from tbe_core import Capabilities, DeviceConfig, Problem
from tbe_core.tuning import Knob

from .backend import TritonBackend


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


class GatedTritonBackend(TritonBackend):
    """The portable backend; long runs are always split where fusing them is hazardous."""

    def device_config(self, problem: Problem, caps: Capabilities) -> DeviceConfig:
        """The device's numbers before the rule; raises ``DeviceFileError``."""
        return super().configure(problem, caps)[0]

    def configure(self, problem: Problem, caps: Capabilities) -> tuple[DeviceConfig, tuple[str, ...]]:
        hazard = fused_tier_hazard(caps)
        if hazard is None:
            return super().configure(problem, caps)
        config = without_hazard(self.device_config(problem, caps), caps)
        notes = (
            f"tiers: short runs in one program, long runs split, never fused, since {hazard}; tables of up to "
            f"{config.dense_rows} rows dense where unweighted bags repeat them",
            f"sort: by rank up to {config.rank_sort_lookups} lookups, else torch.sort, since the radix sort is "
            "for NVIDIA",
        )
        return config, notes

    def search_space(self, caps: Capabilities) -> tuple[Knob, ...]:
        """A search must not try what ``configure`` would refuse."""
        knobs = super().search_space(caps)
        return tuple(k for k in knobs if k.field != "fused_programs" or fused_tier_hazard(caps) is None)
