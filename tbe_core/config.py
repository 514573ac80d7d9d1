"""Thresholds of a device: data, never written into kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class DeviceConfig:
    """The numbers that shape launches on one device. Units in the names."""

    source: str = "untuned defaults"
    """Where the numbers come from: ``tuned on <device>, <date>`` or ``untuned ...``."""
    forward_bags: int = 2
    """Neighbouring bags that one forward program pools side by side."""
    forward_unroll: int = 8
    """Lookups a bag that are loaded before the first is added."""
    forward_short_length: int = 12
    """Bags of fewer lookups on average count as short."""
    forward_short_lookups: int = 1 << 25
    """And so do the bags of a batch of at least so many lookups."""
    forward_short_bags: int = 4
    """``forward_bags`` where bags are short."""
    forward_short_unroll: int = 4
    """``forward_unroll`` where bags are short."""
    forward_columns: int = 512
    """Widest slice of a row that one forward program holds."""
    forward_streams: bool = False
    """The forward writes its output past the caches, which are left to rows."""
    stretch: int = 128
    """Sorted lookups that one update program owns, when there is work for every processor."""
    stretch_small: int = 16
    """The same when lookups are few: fill the device first."""
    unroll: int = 4
    """Gradient rows in flight in the update."""
    warps_per_processor: int = 64
    """Warps of the update a processor that count as a full device."""
    fused_programs: int = 64
    """Up to this many update programs the last arriver combines a long run (one launch fewer); a run that
    spans more is combined by a launch of its own, which adds many partials side by side."""
    persistent_warps: int = 32
    """Where a backend's update can stay on a processor: warps a processor that take stretches in turn; 0: each
    program owns one stretch."""
    steal_stretches: int = 4
    """Where a running program can take the place of one that has not started: it does from so many stretches a
    processor; 0: never."""
    reduce_programs: int = 64
    """Where the memory itself can add up the partials of long runs, and results need not repeat bit for bit: it
    does from so many update programs; 0: never."""
    rank_sort_lookups: int = 16384
    """Up to so many lookups each one's place is counted, in one launch, instead of a radix sort."""
    overlap_lookups: int = 65536
    """From this many lookups the sort runs on a stream of its own, beside the forward that precedes it."""
    dense_rows: int = 128
    """Tables of up to so many rows can take the dense tier: counts times gradients on tensor cores."""
    dense_length: int = 16
    """They do when bags hold at least so many lookups on average: it reads each gradient once."""
    dense_batch: int = 1024
    """And a feature has at least so many bags."""
    dense_warps: int = 8
    """Warps of a program of the dense tier."""
    elements_per_lane: int = 8
    """Elements of a row that one lane holds before another warp is added."""

    @property
    def smallest_stretch(self) -> int:
        return min(self.stretch, self.stretch_small)

    def __post_init__(self) -> None:
        for field in (
            "forward_bags",
            "forward_unroll",
            "forward_short_bags",
            "forward_short_unroll",
            "forward_columns",
            "stretch",
            "stretch_small",
            "unroll",
        ):
            value = getattr(self, field)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{field}={value!r}: expected a power of two")
        if self.stretch % self.unroll or self.stretch_small % self.unroll:
            raise ValueError(f"unroll={self.unroll!r}: expected a divisor of both stretches")
        if self.elements_per_lane < 1:
            raise ValueError(f"elements_per_lane={self.elements_per_lane!r}: expected 1 or more")

    def to_dict(self) -> dict[str, str | int | bool]:
        """Every field by name, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> DeviceConfig:
        """The inverse of ``to_dict``. ``source`` is required; a number left out takes its default, so that
        what was written before a field existed stays valid.

        Raises:
            ValueError: a key is unknown or missing, or its value is wrong; the message names it.
        """
        known = {f.name: type(f.default) for f in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"unknown key {name!r}: expected some of {', '.join(known)}")
            if type(value) is not known[name]:
                raise ValueError(f"{name}={value!r}: expected {_KINDS[known[name]]}")
            if known[name] is int and value < 0:  # type: ignore[operator]
                raise ValueError(f"{name}={value!r}: expected 0 or more")
        if not values.get("source"):
            raise ValueError("missing key 'source': expected where the numbers come from")
        return cls(**values)  # type: ignore[arg-type]


_KINDS: dict[type, str] = {int: "an integer", bool: "true or false", str: "text"}
