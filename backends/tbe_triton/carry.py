"""What a training forward hands to its backward: the lookups sorted by row, in one opaque buffer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tbe_core import DeviceConfig, Spec

from .launcher import INT32_MAX, Part
from .shapes import gradient_units


def _padded(size: int) -> int:
    """To 16 bytes, so that every part starts aligned. Plain arithmetic: sizes may be symbolic."""
    return (size + 15) // 16 * 16


def key_dtype(spec: Spec) -> torch.dtype:
    return torch.int32 if spec.layout.total_rows < INT32_MAX else torch.int64


def has_factors(spec: Spec, weighted: bool) -> bool:
    """Whether a lookup's gradient is scaled: a weight of its own, or a mean."""
    return weighted or spec.pooling == "mean"


def value_dtype(spec: Spec, lookups: int, batch: int, weighted: bool) -> torch.dtype:
    """int32 holds the place of a gradient; int64 when a factor sits beside it, or the places are many.

    Raises:
        ValueError: a factor and the place do not fit 64 bits together.
    """
    _, row_units = gradient_units(spec)
    factors = has_factors(spec, weighted)
    places = lookups if spec.pooling == "none" else batch * row_units
    if places <= INT32_MAX:
        return torch.int64 if factors else torch.int32
    if factors:
        raise ValueError(
            f"batch of {batch} bags a feature: expected at most {INT32_MAX // row_units} for weighted or mean "
            "lookups of these dims"
        )
    return torch.int64


@dataclass(frozen=True)
class CarryLayout:
    """Parts of the buffer: values, keys, and the update's counters, cleared."""

    lookups: int
    values: torch.dtype
    keys: torch.dtype
    counters: int

    @classmethod
    def of(cls, spec: Spec, config: DeviceConfig, lookups: int, batch: int, weighted: bool) -> CarryLayout:
        values = value_dtype(spec, lookups, batch, weighted)
        # The most stretches that any route cuts, plus one for every group's own remainder.
        counters = lookups // config.smallest_stretch + len(spec.layout.groups) + 2
        return cls(lookups, values, key_dtype(spec), counters)

    @property
    def _keys_at(self) -> int:
        return _padded(self.lookups * self.values.itemsize)

    @property
    def _counters_at(self) -> int:
        return self._keys_at + _padded(self.lookups * self.keys.itemsize)

    @property
    def nbytes(self) -> int:
        return self._counters_at + 4 * self.counters

    @property
    def padded(self) -> int:
        """``nbytes``, to 16: where a second one may begin in the same buffer."""
        return _padded(self.nbytes)

    def allocate(self, device: torch.device, more: int = 0) -> Carry:
        """An uninitialised one; with ``more`` bytes at its buffer's end."""
        return self.view(torch.empty(self.nbytes + more, dtype=torch.uint8, device=device))

    def view(self, buffer: torch.Tensor, at: int = 0) -> Carry:
        """The parts of ``buffer`` from byte ``at`` on."""
        return Carry(
            buffer,
            Part(buffer, at + self._keys_at, self.lookups, self.keys),
            Part(buffer, at, self.lookups, self.values),
            Part(buffer, at + self._counters_at, self.counters, torch.int32),
        )


@dataclass(frozen=True)
class Carry:
    """Parts of one buffer: keys ``[N]``, values ``[N]``, int32 counters."""

    buffer: torch.Tensor
    keys: Part
    values: Part
    counters: Part
