"""Capabilities of well-known devices, made by hand: for ``tbe doctor --as NAME`` and for tests of routing.

The hardware's numbers are its vendor's specification, of one device as torch presents it: an MI250X is one of
its two dies, and the L2 of an MI300X or MI350X is that of one die. Software is left out: it belongs to an
installation, not to a device. Nothing chooses a kernel by these names; a real device is probed.
"""

from __future__ import annotations

from .types import Capabilities

GIB = 1 << 30
MIB = 1 << 20


def _nvidia(name: str, arch: str, processors: int, memory: int, l2: int) -> Capabilities:
    return Capabilities(
        device_type="cuda",
        vendor="nvidia",
        arch=arch,
        name=f"NVIDIA {name}",
        processors=processors,
        memory_bytes=memory * GIB,
        l2_bytes=l2 * MIB,
        warp_size=32,
    )


def _amd(name: str, arch: str, processors: int, memory: int, l2: int) -> Capabilities:
    return Capabilities(
        device_type="cuda",
        vendor="amd",
        arch=arch,
        name=f"AMD Instinct {name}",
        processors=processors,
        memory_bytes=memory * GIB,
        l2_bytes=l2 * MIB,
        warp_size=64,
    )


DEVICES: dict[str, Capabilities] = {
    "A100": _nvidia("A100", "sm_80", 108, 80, 40),
    "H200": _nvidia("H200", "sm_90", 132, 141, 60),
    "B200": _nvidia("B200", "sm_100", 148, 180, 126),
    "GB200": _nvidia("GB200", "sm_100", 148, 186, 126),
    "RTX5090": _nvidia("GeForce RTX 5090", "sm_120", 170, 32, 96),
    "MI250X": _amd("MI250X", "gfx90a", 110, 64, 8),
    "MI300X": _amd("MI300X", "gfx942", 304, 192, 4),
    "MI350X": _amd("MI350X", "gfx950", 256, 288, 4),
}
"""Name to facts."""
