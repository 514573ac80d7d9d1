"""The targets that kernels can be compiled for: an example device of each, made by hand. No Triton here."""

from __future__ import annotations

from dataclasses import replace

from tbe_core import Capabilities, packages
from tbe_core.devices import DEVICES

_MORE = (
    Capabilities("cuda", "nvidia", "sm_103", "NVIDIA B300", processors=148, warp_size=32),
    Capabilities("cuda", "amd", "gfx1100", "AMD Radeon RX 7900 XTX", processors=48, warp_size=32),
    Capabilities("cuda", "amd", "gfx1201", "AMD Radeon RX 9070 XT", processors=32, warp_size=32),
)
"""Beside those of ``tbe_core.devices``. Processors as torch counts them: a Radeon's are pairs of units."""


def _by_arch() -> dict[str, Capabilities]:
    found: dict[str, Capabilities] = {}
    for caps in (*DEVICES.values(), *_MORE):
        found.setdefault(caps.arch, caps)
    nvidia = sorted((a for a in found if a.startswith("sm_")), key=lambda a: int(a[3:]))
    amd = sorted((a for a in found if a.startswith("gfx")), key=lambda a: int(a[3:], 16))
    return {arch: found[arch] for arch in (*nvidia, *amd)}


TARGETS: dict[str, Capabilities] = _by_arch()
"""Target name to the facts of a device of it, ``triton_version`` left out."""


def capabilities(target: str) -> Capabilities:
    """The target's facts with the Triton of this installation."""
    return replace(TARGETS[target], triton_version=packages.version(*packages.TRITON))
