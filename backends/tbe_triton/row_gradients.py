"""Sparse gradients: the update's launches, with a buffer of touched rows in the tables' place. Imports Triton.

A touched row's number among the touched is its key here, and its place in the buffer follows from it: so the walk
over the sorted lookups, its tiers and its order of additions are those of a fused step.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from tbe_core import Lookup, Training
from tbe_core.layout import ROW_ALIGNMENT_ELEMENTS

from .carry import Carry
from .launcher import Part
from .tables import DeviceTables
from .update import Update


class _Touched:
    """The touched rows of a call: their keys, where each table's begin, each group's place in a buffer."""

    def __init__(self, lookup: Lookup, carry: Carry) -> None:
        layout, keys = lookup.spec.layout, carry.keys.tensor()
        self.rows, self.numbers = torch.unique_consecutive(keys, return_inverse=True)
        ends = [base for g in layout.groups for base in (g.row_base, g.row_base + g.rows)]
        of_tables = [b for t, base in enumerate(layout.row_bases) for b in (base, base + layout.tables[t].rows)]
        wanted = torch.tensor([*ends, *of_tables], dtype=keys.dtype, device=keys.device)
        found = torch.searchsorted(self.rows, wanted).tolist()  # waits for the device
        pairs = list(zip(found[::2], found[1::2], strict=True))
        self.groups, self.tables = pairs[: len(layout.groups)], pairs[len(layout.groups) :]
        self.bases, self.elements = list[int](), 0
        for group, (low, high) in zip(layout.groups, self.groups, strict=True):
            self.bases.append(self.elements)
            self.elements += (high - low) * group.dim
            self.elements += -self.elements % ROW_ALIGNMENT_ELEMENTS


class _Gradients(Update):
    """The launches of one call's update, into ``buffer``."""

    def __init__(
        self,
        lookup: Lookup,
        tables: DeviceTables,
        grad: torch.Tensor,
        carry: Carry,
        touched: _Touched,
        buffer: torch.Tensor,
    ) -> None:
        numbers = touched.numbers.to(carry.keys.dtype)
        super().__init__(
            replace(lookup, weights=buffer),
            tables,
            grad,
            Training((), buffer),  # no hyper-parameter is read
            replace(carry, keys=Part(numbers.view(torch.uint8), 0, carry.keys.count, carry.keys.dtype)),
        )
        places = [[*ends, base] for ends, base in zip(touched.groups, touched.bases, strict=True)]
        moved = torch.tensor(places, dtype=torch.int64, device=grad.device)
        self.cut = copy.copy(self.cut)
        # The rest of a group's numbers (dim, stretch, width) are as always.
        self.cut.groups = torch.cat([moved, self.cut.groups[:, 3:]], dim=1)


def row_gradients(
    lookup: Lookup, tables: DeviceTables, grad: torch.Tensor, carry: Carry
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Per trained table ``[U]`` its touched rows and ``[U, D]`` their gradients, views of one buffer."""
    spec, layout = lookup.spec, lookup.spec.layout
    if not lookup.indices.numel() or not spec.trained:
        empty = grad.new_zeros
        return {
            t: (empty(0, dtype=torch.int64), empty(0, layout.tables[t].dim, dtype=spec.weights_dtype))
            for t in sorted(spec.trained)
        }
    touched = _Touched(lookup, carry)
    buffer = torch.empty(max(touched.elements, 1), dtype=spec.weights_dtype, device=grad.device)
    if touched.elements:
        _Gradients(lookup, tables, grad, carry, touched, buffer).launch()
    group_of = {group.dim: number for number, group in enumerate(layout.groups)}
    found = {}
    for t in sorted(spec.trained):
        dim, (low, high) = layout.tables[t].dim, touched.tables[t]
        group = group_of[dim]
        at = touched.bases[group] + (low - touched.groups[group][0]) * dim
        values = buffer[at : at + (high - low) * dim].view(high - low, dim)
        found[t] = touched.rows[low:high].long() - layout.row_bases[t], values
    return found
