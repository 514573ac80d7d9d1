"""The sort, launched by the forward for its backward: it depends on the ids alone, so it runs beside the gather.

On NVIDIA GPUs it takes a stream of its own, forked from the current one and joined at the end of the forward, so
that memory and CUDA graphs see one stream's order.
"""

from __future__ import annotations

import threading

import torch

from tbe_core import Lookup

from . import launch, sort
from .carry import Carry, CarryLayout
from .shapes import DeviceTables


class _Side:
    """A stream beside the current one, and the two events that order them."""

    def __init__(self, device: torch.device) -> None:
        # The sort is a chain of small kernels: with priority it is not queued behind the whole gather.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.forked, self.joined = torch.cuda.Event(), torch.cuda.Event()

    def fork(self) -> None:
        self.forked.record(torch.cuda.current_stream())
        self.stream.wait_event(self.forked)

    def join(self) -> None:
        self.joined.record(self.stream)
        torch.cuda.current_stream().wait_event(self.joined)


class _Sides(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[torch.device, _Side] = {}


_sides = _Sides()


class SortAhead:
    """The sort of one call, launched. ``finish`` joins it; until then every buffer is held."""

    def __init__(self, lookup: Lookup, tables: DeviceTables) -> None:
        spec, config, n = lookup.spec, lookup.plan.config, lookup.indices.numel()
        device = lookup.indices.device
        radix = sort.radix_unavailable(lookup.plan.caps) is None
        layout = CarryLayout.of(spec, config, n, lookup.batch, lookup.per_sample_weights is not None)
        given, spare = layout.allocate(device), layout.allocate(device)
        self._side: _Side | None = None
        self._held: list[object] = [given, spare]
        if not radix:
            launch.linearise(lookup, tables, given, spare, None)
            self._result: Carry = sort.torch_sort(given, spare)
            return
        if n >= config.overlap_lookups:
            if device not in _sides.by_device:
                _sides.by_device[device] = _Side(device)
            self._side = _sides.by_device[device]
            self._side.fork()
        stream = (self._side.stream if self._side else torch.cuda.current_stream()).cuda_stream
        launch.linearise(lookup, tables, given, spare, stream)
        self._result, temporary = sort.radix_sort(given, spare, spec.layout.total_rows.bit_length(), stream)
        self._held.append(temporary)

    def finish(self) -> torch.Tensor:
        """The carry's buffer, ordered on the current stream."""
        if self._side is not None:
            self._side.join()
        self._held.clear()
        return self._result.buffer
