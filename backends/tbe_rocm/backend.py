"""The portable kernels with AMD's numbers: waves of 64 lanes walk more bags side by side. No Triton here.

It has never run on an AMD GPU: see docs/amd.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tbe_core import Capabilities, other_vendor
from tbe_core.tuning import Knob
from tbe_triton import TritonBackend

VENDORS = frozenset({"amd"})
WAVE64_RANGES: dict[str, tuple[int, ...]] = {"forward_short_bags": (2, 4, 8, 16)}
"""What ``tbe tune`` tries where the portable range does not reach beyond the numbers of configs_data."""


class RocmBackend(TritonBackend):
    """``tbe_triton``'s kernels, shaped for AMD by device files of backend "rocm"."""

    name = "rocm"
    packaged = Path(__file__).parent / "configs_data"

    def unavailable(self, caps: Capabilities) -> str | None:
        return other_vendor(VENDORS, caps) or super().unavailable(caps)

    def preference(self, caps: Capabilities) -> int:
        """Just above the portable kernels on an AMD GPU; on request only elsewhere."""
        portable = super().preference(caps)
        return portable + 5 if caps.vendor in VENDORS and portable >= 0 else -1

    def search_space(self, caps: Capabilities) -> tuple[Knob, ...]:
        knobs = super().search_space(caps)
        return tuple(replace(k, values=WAVE64_RANGES.get(k.field, k.values)) for k in knobs)
