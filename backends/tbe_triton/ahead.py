"""The sort, launched by the forward for its backward: it depends on the ids alone, so it runs beside the gather.

On NVIDIA GPUs it takes a stream of its own, forked from the current one and joined at the end of the forward, so
that memory and CUDA graphs see one stream's order.
"""

from __future__ import annotations

from typing import Any

import torch

from tbe_core import Lookup

from . import launch, sort
from .carry import CarryLayout
from .launcher import Part, current_stream
from .streams import Side, side_of
from .tables import DeviceTables


class SortAhead:
    """The sort of one call, launched. ``finish`` joins it; until then every buffer is held."""

    def __init__(
        self, lookup: Lookup, tables: DeviceTables, features: torch.Tensor, variant: tuple[Any, ...]
    ) -> None:
        spec, config, n = lookup.spec, lookup.plan.config, lookup.indices.numel()
        device, bits = lookup.indices.device, spec.layout.total_rows.bit_length()
        layout = CarryLayout.of(spec, config, n, lookup.batch, lookup.per_sample_weights is not None)
        self._nbytes = layout.nbytes
        self._side: Side | None = None
        if n and n <= config.rank_sort_lookups:
            # Small: one allocation for both costs the host less, and little memory until the backward.
            self._held = self._result = layout.allocate(device, layout.padded)
            given = layout.view(self._result.buffer, layout.padded)
            launch.linearise(lookup, tables, features, given, self._result, variant)
            launch.rank_sort(given, self._result, variant)
            return
        given = self._held = self._result = layout.allocate(device)
        if not n:
            return
        caps = lookup.plan.caps
        radix = sort.radix_unavailable(caps) is None
        sorter = sort.radix_sorter(layout, caps, device) if radix else None
        if sorter is None:
            self._held = layout.allocate(device)
            launch.linearise(lookup, tables, features, given, self._held, variant)
            self._result = sort.torch_sort(given, self._held)
            return
        need = sorter.temporary_bytes(given, bits)
        self._held = spare = layout.allocate(device, need + 16)
        temporary = Part(spare.buffer, layout.nbytes + -layout.nbytes % 16, need, torch.uint8)
        if n >= config.overlap_lookups:
            self._side = side_of(device, "sort")
            self._side.fork()
        stream = current_stream() if self._side is None else self._side.stream.cuda_stream
        launch.linearise(lookup, tables, features, given, spare, variant, stream)
        self._result = sorter(given, spare, temporary, bits, stream)

    def finish(self) -> torch.Tensor:
        """The carry's buffer, ordered on the current stream."""
        if self._side is not None:
            self._side.join()
        return self._result.buffer.narrow(0, 0, self._nbytes)
