"""Launch shapes: which features and tables share a launch, block widths, warps, alignment. No Triton here."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from tbe_core import DeviceConfig, Layout, Lookup, Spec

from .launcher import INT32_MAX

MAX_DIM = 8192
"""Widest row that one update program holds."""


def next_power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def alignment(*values: int) -> int:
    """The largest power of two, at most 16, that divides every value: elements, for 16-byte loads."""
    return math.gcd(16, *values)


@dataclass(frozen=True)
class ForwardShape:
    """One launch of the forward: features whose dims share a block width."""

    features: tuple[int, ...]
    dim: int
    """The dim when all share it, else 0."""
    block: int
    column_blocks: int
    bags: int
    unroll: int
    align: int
    wide: bool
    """Row offsets within a table need 64 bits."""


@dataclass(frozen=True)
class UpdateShape:
    """One launch of the update: groups of tables whose dims share a block width."""

    first_group: int
    groups: int
    dim: int
    block: int
    align: int
    unroll: int
    warps: int


def warps_for(block: int, config: DeviceConfig, warp_size: int) -> int:
    """Warps that hold one row of ``block`` elements."""
    return min(max(block // (warp_size * config.elements_per_lane), 1), 16)


def _by_block(dims: dict[int, int]) -> dict[int, list[int]]:
    """Block width to the keys whose dim needs it, ascending."""
    found: dict[int, list[int]] = {}
    for key, dim in sorted(dims.items(), key=lambda item: next_power_of_two(item[1])):
        found.setdefault(next_power_of_two(dim), []).append(key)
    return found


def forward_shapes(layout: Layout, config: DeviceConfig) -> tuple[ForwardShape, ...]:
    shapes = []
    for width, features in _by_block(dict(enumerate(layout.feature_dims))).items():
        block = min(width, config.forward_columns)
        dims = {layout.feature_dims[f] for f in features}
        bases = [layout.element_bases[layout.feature_table_map[f]] for f in features]
        columns = [layout.feature_columns[f] for f in features]
        bags = 1 if block >= 512 else max(config.forward_bags, min(256 // block, 32))
        shapes.append(
            ForwardShape(
                features=tuple(features),
                dim=dims.pop() if len(dims) == 1 else 0,
                block=block,
                column_blocks=-(-max(layout.feature_dims[f] for f in features) // block),
                bags=bags,
                unroll=max(min(config.forward_unroll, 4096 // (bags * block)), 1),
                align=alignment(*(layout.feature_dims[f] for f in features), *bases, *columns),
                wide=any(_elements(layout, f) > INT32_MAX for f in features),
            )
        )
    return tuple(shapes)


def _elements(layout: Layout, feature: int) -> int:
    table = layout.feature_table(feature)
    return table.rows * table.dim


def update_shapes(layout: Layout, config: DeviceConfig, warp_size: int) -> tuple[UpdateShape, ...]:
    shapes = []
    for block, groups in _by_block({i: g.dim for i, g in enumerate(layout.groups)}).items():
        dims = {layout.groups[g].dim for g in groups}
        shapes.append(
            UpdateShape(
                first_group=groups[0],
                groups=len(groups),
                align=alignment(*dims),
                dim=dims.pop() if len(dims) == 1 else 0,
                block=block,
                unroll=config.unroll if block <= 2048 else 1,
                warps=warps_for(block, config, warp_size),
            )
        )
    return tuple(shapes)


@lru_cache(maxsize=256)
def gradient_units(spec: Spec) -> tuple[int, int]:
    """Elements of the gradient that one step of a value means, and how many such steps make one of its rows."""
    pooled = spec.pooling != "none"
    unit = math.gcd(spec.layout.output_width, *spec.layout.feature_columns) if pooled else spec.layout.dims[0]
    return unit, spec.output_width // unit


_numbers = itertools.count()


class DeviceTables:
    """The layout's numbers as tensors on one device, and the launch shapes; made once for a spec."""

    def __init__(self, spec: Spec, config: DeviceConfig, warp_size: int, device: torch.device) -> None:
        layout = spec.layout
        self.number = next(_numbers)
        """Tells these tables from every other: compiled kernels are kept by it."""
        self.unit, self.row_units = gradient_units(spec)
        self.forward_shapes = forward_shapes(layout, config)
        self.update_shapes = update_shapes(layout, config, warp_size)
        self.linearise = torch.tensor(
            [
                [table.rows, layout.row_bases[t], layout.feature_columns[f] // self.unit]
                for f, t in enumerate(layout.feature_table_map)
                for table in (layout.tables[t],)
            ],
            dtype=torch.int64,
            device=device,
        )
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
        self.groups = torch.tensor(
            [[g.row_base, g.row_base + g.rows, g.element_base, g.dim] for g in layout.groups],
            dtype=torch.int64,
            device=device,
        )


_tables: dict[tuple[int, DeviceConfig, int, torch.device], DeviceTables] = {}


def device_tables(lookup: Lookup) -> DeviceTables:
    plan, device = lookup.plan, lookup.weights.device
    key = (lookup.spec.handle, plan.config, plan.caps.warp_size, device)
    found = _tables.get(key)
    if found is None:
        found = _tables[key] = DeviceTables(lookup.spec, plan.config, plan.caps.warp_size, device)
    return found
