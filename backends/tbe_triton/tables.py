"""The layout's numbers as tensors on one device, made once for a spec. No Triton here."""

from __future__ import annotations

import itertools

import torch

from tbe_core import Capabilities, DeviceConfig, Group, Layout, Lookup, Route, Spec, route, small_tables

from .shapes import ForwardShape, alignment, forward_shapes, gradient_units, next_power_of_two, update_shapes

_numbers = itertools.count()


def next_number() -> int:
    """Tells the tables of one description and device from every other's: compiled kernels are kept by it."""
    return next(_numbers)


class DenseTables:
    """Features and rows of the small tables, as tensors on one device; features ordered by table."""

    def __init__(self, layout: Layout, small: frozenset[int], device: torch.device) -> None:
        order = sorted(
            (f for f, t in enumerate(layout.feature_table_map) if t in small),
            key=lambda f: layout.feature_table_map[f],
        )
        of_table: dict[int, list[int]] = {}
        for place, f in enumerate(order):
            of_table.setdefault(layout.feature_table_map[f], []).append(place)
        self.rows = max(next_power_of_two(layout.tables[t].rows) for t in of_table)
        self.width = max(next_power_of_two(layout.tables[t].dim) for t in of_table)
        self.align = alignment(*(layout.feature_columns[f] for f in order))
        self.features = torch.tensor(
            [[f, layout.feature_columns[f], layout.feature_dims[f]] for f in order], device=device
        )
        self.row_list = torch.tensor(
            [
                [r, layout.row_bases[t] + r, layout.element_bases[t] + r * table.dim, table.dim, p[0], len(p)]
                for t, p in of_table.items()
                for table in (layout.tables[t],)
                for r in range(table.rows)
            ],
            device=device,
        )


class DeviceTables:
    """The layout's numbers as tensors on one device, and the launch shapes; made once for a spec."""

    def __init__(self, spec: Spec, config: DeviceConfig, caps: Capabilities, device: torch.device) -> None:
        layout = spec.layout
        self.number = next(_numbers)
        """Tells these tables from every other: compiled kernels are kept by it."""
        self.unit, self.row_units = gradient_units(spec)
        row = (layout, config, caps.warp_size, spec.weights_dtype.itemsize)
        self.forward_shapes = forward_shapes(*row)
        self.forward_short_shapes = forward_shapes(*row, short=True)
        self.update_shapes = update_shapes(spec, config, caps.warp_size)
        self.linearise = torch.tensor(
            [
                [table.rows, layout.row_bases[t], layout.feature_columns[f] // self.unit]
                for f, t in enumerate(layout.feature_table_map)
                for table in (layout.tables[t],)
            ],
            dtype=torch.int64,
            device=device,
        )
        small = small_tables(spec, config)
        self.dense = DenseTables(layout, small, device) if small else None
        """The small tables, which may take the dense tier."""
        self.all_dense = small == spec.trained
        self._all_small = all(layout.tables[t].rows <= config.dense_rows for t in layout.feature_table_map)
        self.trained = self._without_rows(layout, frozenset(spec.frozen))
        """``linearise`` where frozen tables have no rows: the update leaves their lookups out."""
        self.sorted_features = self._without_rows(layout, small.union(spec.frozen))
        """``trained`` where the small tables have no rows either: the dense tier steps them."""
        self.forward = [
            torch.tensor(
                [
                    [
                        f,
                        layout.feature_table(f).rows,
                        layout.element_bases[layout.feature_table_map[f]],
                        layout.feature_columns[f],
                        layout.feature_dims[f],
                    ]
                    for f in shape.features
                ],
                dtype=torch.int64,
                device=device,
            )
            for shape in self.forward_shapes
        ]
        self._config, self._caps, self._groups = config, caps, layout.groups
        self._shares = [sum(d in s.dims for d in layout.feature_dims) for s in self.update_shapes]
        self._features = layout.features
        self._cuts: dict[tuple[int, ...], _Cut] = {}

    def _without_rows(self, layout: Layout, tables: frozenset[int]) -> torch.Tensor:
        """``linearise`` in which no id of ``tables`` is valid."""
        keep = [[int(t not in tables), 1, 1] for t in layout.feature_table_map]
        return self.linearise * torch.tensor(keep, device=self.linearise.device)

    def forward_for(self, lookups: int, batch: int) -> tuple[ForwardShape, ...]:
        """The launches of a forward, by the average length and the number of its bags.

        Rows of small tables stay in the first-level cache: they too are better fetched for more bags at once.
        """
        config = self._config
        short = lookups < config.forward_short_length * batch * self._features
        short |= self._all_small or lookups >= config.forward_short_lookups
        return self.forward_short_shapes if short else self.forward_shapes

    def cut(self, lookups: int) -> tuple[_Cut, list[Route]]:
        """How sorted lookups are cut into stretches, and the route of every launch.

        With one group its share is everything; with several the host knows only how many features each has.
        """
        routes = [
            route(-(-lookups * share // self._features), self._config, self._caps, shape.warps)
            for share, shape in zip(self._shares, self.update_shapes, strict=True)
        ]
        fused = sum(r.programs for r in routes) <= self._config.fused_programs
        key = (fused, *(r.stretch for r in routes))
        found = self._cuts.get(key)
        if found is None:
            found = self._cuts[key] = _Cut(self, key, self._groups)
        return found, routes


class _Cut:
    """The stretches of every group's launch, and where partials lie."""

    def __init__(self, tables: DeviceTables, key: tuple[int, ...], groups: tuple[Group, ...]) -> None:
        self.fused, stretches, shapes = bool(key[0]), key[1:], tables.update_shapes
        self.number = next(_numbers)
        self.least_stretch = min(stretches)
        self.widest = max(s.block for s in shapes)
        self.partials = max(-(-2 * s.block // stretch) for s, stretch in zip(shapes, stretches, strict=True))
        """Elements of partials a lookup: the most that any group needs."""
        by_group = {
            g: (stretch, s.block)
            for s, stretch in zip(shapes, stretches, strict=True)
            for g in range(s.first_group, s.first_group + s.groups)
        }
        self.groups = torch.tensor(
            [
                [g.row_base, g.row_base + g.rows, g.element_base, g.dim, *by_group[i]]
                for i, g in enumerate(groups)
            ],
            dtype=torch.int64,
            device=tables.linearise.device,
        )


_tables: dict[tuple[int, DeviceConfig, Capabilities, torch.device], DeviceTables] = {}


def device_tables(lookup: Lookup) -> DeviceTables:
    plan, device = lookup.plan, lookup.weights.device
    key = (lookup.spec.handle, plan.config, plan.caps, device)
    found = _tables.get(key)
    if found is None:
        found = _tables[key] = DeviceTables(lookup.spec, plan.config, plan.caps, device)
    return found
