"""Knobs, and times with a planted optimum: what the tests of ``tbe tune`` search."""

from __future__ import annotations

import math
from dataclasses import replace

from tbe.tune import Times
from tbe_core import DeviceConfig
from tbe_core.tuning import Knob, Pass

START = DeviceConfig()
BAGS = Knob("forward_bags", (1, 2, 4, 8), "forward")
UNROLL = Knob("forward_unroll", (2, 4, 8, 16), "forward")
STRETCH = Knob("stretch", (32, 64, 128, 256), "backward")
STREAMS = Knob("forward_streams", (False, True), "together")
KNOBS = (BAGS, UNROLL, STRETCH, STREAMS)


def distance(value: int, best: int) -> float:
    return abs(math.log2(value / best))


def planted(config: DeviceConfig, which: Pass) -> Times:
    """Fastest at 4 bags, unroll 16, stretch 64, streams on. On one workload all is ten times as slow."""
    seconds = {
        "forward": {1: 3.0, 2: 2.0, 4: 1.0, 8: 1.5}[config.forward_bags] + distance(config.forward_unroll, 16),
        "backward": 1 + distance(config.stretch, 64),
        "together": 1.0 if config.forward_streams else 2.0,
    }[which]
    return {"small": seconds, "large": 10 * seconds}


BEST = replace(START, forward_bags=4, forward_unroll=16, stretch=64, forward_streams=True)
