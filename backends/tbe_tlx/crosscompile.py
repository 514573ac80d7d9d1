"""Cross-compiling this backend: the portable problems and some whose results need not repeat, each as it is
launched with launch control and without."""

from __future__ import annotations

from dataclasses import replace

from tbe_core import Capabilities, Tier
from tbe_core.assist import CLC
from tbe_triton import TritonCrossCompiler
from tbe_triton.crosscompile import Launch
from tbe_triton.targets import TARGETS
from tbe_triton.variants import UPDATE, VARIANTS, Variant

from .backend import TlxBackend
from .providers import facts, out_of_question

REDUCED = tuple(
    Variant(dims, passes=(UPDATE,), tiers=(Tier.SPLIT,), deterministic=False)
    for dims in ((4,), (128,), (1024,), (4096,), (3, 16, 128, 512))
)
"""Problems whose long runs are added up in memory."""


class TlxCrossCompiler(TritonCrossCompiler):
    """Every kernel of ``TlxBackend`` for the targets that TLX knows."""

    def __init__(self, backend: TlxBackend) -> None:
        targets = tuple(arch for arch, caps in TARGETS.items() if out_of_question(caps) is None)
        super().__init__(backend, targets, (*VARIANTS, *REDUCED), facts)

    def launches(self, caps: Capabilities) -> list[Launch]:
        """Those of a device, and those of its small batches, which use no launch control."""
        found = super().launches(caps)
        if CLC in caps.tlx_features:
            small = super().launches(replace(caps, tlx_features=caps.tlx_features - {CLC}))
            known = {(launch.name, launch.call, *map(str, launch.constants.values())) for launch in found}
            found += [
                launch
                for launch in small
                if (launch.name, launch.call, *map(str, launch.constants.values())) not in known
            ]
        return found
