"""The thresholds of each device: data. A device without an entry gets untuned defaults, marked so."""

from __future__ import annotations

from tbe_core import Capabilities, DeviceConfig


def config_for(caps: Capabilities) -> DeviceConfig:
    """The configuration of a device."""
    return DeviceConfig()
