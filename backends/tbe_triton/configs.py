"""The thresholds of each device: data, in configs_data/*.json. A device without a file gets untuned defaults,
marked so."""

from __future__ import annotations

from pathlib import Path

from tbe_core import Capabilities, DeviceConfig
from tbe_core.device_files import find
from tbe_core.tuning import Knob

PACKAGED = Path(__file__).parent / "configs_data"


def config_for(caps: Capabilities, backend: str = "triton", packaged: Path = PACKAGED) -> DeviceConfig:
    """The configuration of a device: the user's file, else one of ``packaged``, else the defaults."""
    return find(backend, caps, packaged) or DeviceConfig()


def search_space(caps: Capabilities) -> tuple[Knob, ...]:
    """What ``tbe tune`` tries. Each range brackets the default."""
    return (
        Knob("forward_bags", (1, 2, 4, 8), "forward"),
        Knob("forward_unroll", (2, 4, 8, 16), "forward"),
        Knob("forward_short_bags", (1, 2, 4, 8), "forward"),
        Knob("forward_short_unroll", (1, 2, 4, 8), "forward"),
        Knob("forward_short_length", (0, 6, 12, 24), "forward"),
        Knob("forward_short_lookups", (0, 1 << 22, 1 << 25, 1 << 62), "forward"),
        Knob("forward_columns", (256, 512, 1024), "forward"),
        Knob("stretch", (32, 64, 128, 256), "backward"),
        Knob("stretch_small", (8, 16, 32), "backward"),
        Knob("unroll", (2, 4, 8), "backward"),
        Knob("warps_per_processor", (16, 32, 64, 128), "backward"),
        Knob("elements_per_lane", (4, 8, 16), "backward"),
        Knob("fused_programs", (0, 16, 64, 256), "backward"),
        Knob("dense_rows", (0, 64, 128, 256), "backward"),
        Knob("dense_length", (8, 16, 32), "backward"),
        Knob("dense_warps", (4, 8), "backward"),
        Knob("dense_batch", (256, 1024, 4096), "backward"),
        # The sort is part of the training forward, and the forward's stores decide what the caches hold after.
        Knob("forward_streams", (False, True), "together"),
        Knob("rank_sort_lookups", (0, 4096, 8192, 16384, 32768), "together"),
        Knob("overlap_lookups", (16384, 65536, 262144, 1 << 62), "together"),
    )
