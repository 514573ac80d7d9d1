"""Launch shapes: which features and tables share a launch, block widths, warps, alignment. No Triton here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from tbe_core import DeviceConfig, Layout, Lookup, Spec, Training

from .launcher import INT32_MAX

MOST_STATES = 2
"""State tensors of an optimizer that a kernel takes."""
MAX_DIM = 8192
"""Widest row that one update program holds."""
LEAST_LANES = 32
"""Of a GPU's warp; a CPU, which interprets kernels, has none and takes the shapes of 32."""


def next_power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def alignment(*values: int) -> int:
    """The largest power of two, at most 16, that divides every value: elements, for 16-byte loads."""
    return math.gcd(16, *values)


def step_constant(spec: Spec) -> tuple[str | bool, ...]:
    """The step of a row as a kernel's constant ``STEP``; kernels/row_updates.py names its places."""
    optimizer = spec.optimizer
    kinds = [state.kind for state in optimizer.STATE] + ["none"] * (MOST_STATES - len(optimizer.STATE))
    return (
        optimizer.NAME,
        *kinds,
        str(optimizer.flags.get("weight_decay_mode", "none")),
        bool(optimizer.flags.get("limits_norm", False)),
        spec.stochastic_rounding,
    )


def step_tensors(lookup: Lookup, training: Training) -> tuple[torch.Tensor, ...]:
    """What a step reads and writes: weights, two states, hyper, counter; hyper stands where there is none."""
    spare = [training.hyper] * (MOST_STATES - len(training.states))
    counter = training.hyper if training.counter is None else training.counter
    return (lookup.weights, *training.states, *spare, training.hyper, counter)


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
    """Of rows: what every row's first element is a multiple of."""
    column_align: int
    """The same of the features' first columns in the output."""
    wide: bool
    """Row offsets within a table need 64 bits."""


@dataclass(frozen=True)
class UpdateShape:
    """One launch of the update: groups of tables whose dims share a block width."""

    first_group: int
    groups: int
    dims: frozenset[int]
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


def rows_abreast(block: int, warp_size: int) -> int:
    """Rows of ``block`` 2-byte elements that fill a warp's 16-byte loads: lanes x 16 bytes over a row's bytes."""
    lanes = max(warp_size, LEAST_LANES)
    return min(lanes * 8 // block, lanes)


def forward_shapes(
    layout: Layout, config: DeviceConfig, warp_size: int, itemsize: int, short: bool = False
) -> tuple[ForwardShape, ...]:
    """One launch a block width; ``short`` where bags hold few lookups. ``itemsize``: bytes of a weight."""
    side_by_side = config.forward_short_bags if short else config.forward_bags
    # The numbers are those of 2-byte rows: of wider ones fewer are held at once.
    unroll = max((config.forward_short_unroll if short else config.forward_unroll) * 2 // itemsize, 1)
    shapes = []
    for width, features in _by_block(dict(enumerate(layout.feature_dims))).items():
        block = min(width, config.forward_columns)
        dims = {layout.feature_dims[f] for f in features}
        bases = [layout.element_bases[layout.feature_table_map[f]] for f in features]
        columns = [layout.feature_columns[f] for f in features]
        bags = 1 if block >= 512 else max(side_by_side, rows_abreast(block, warp_size))
        shapes.append(
            ForwardShape(
                features=tuple(features),
                dim=dims.pop() if len(dims) == 1 else 0,
                block=block,
                column_blocks=-(-max(layout.feature_dims[f] for f in features) // block),
                bags=bags,
                unroll=max(min(unroll, 4096 // (bags * block)), 1),
                align=alignment(*(layout.feature_dims[f] for f in features), *bases),
                column_align=alignment(*columns),
                wide=any(_elements(layout, f) > INT32_MAX for f in features),
            )
        )
    return tuple(shapes)


def _elements(layout: Layout, feature: int) -> int:
    table = layout.feature_table(feature)
    return table.rows * table.dim


def update_shapes(spec: Spec, config: DeviceConfig, warp_size: int) -> tuple[UpdateShape, ...]:
    layout, shapes = spec.layout, []
    # Two states are loaded ahead, too: of such rows fewer are held at once, or they spill.
    unroll = max(config.unroll // 2, 1) if len(spec.optimizer.STATE) > 1 else config.unroll
    for block, groups in _by_block({i: g.dim for i, g in enumerate(layout.groups)}).items():
        dims = {layout.groups[g].dim for g in groups}
        shapes.append(
            UpdateShape(
                first_group=groups[0],
                groups=len(groups),
                dims=frozenset(dims),
                align=alignment(*dims),
                dim=next(iter(dims)) if len(dims) == 1 else 0,
                block=block,
                unroll=unroll if block <= 2048 else 1,
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
