"""The host side of quantised lookups: launch shapes, the layout's numbers on the device, launches. Imports no
Triton before the first launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tbe_core import Capabilities, DeviceConfig, QuantizedLookup, QuantizedSpec

from .launcher import INT32_MAX, Part, run
from .shapes import LEAST_LANES, alignment, gradient_units, next_power_of_two
from .streams import NARROW, side_for_narrow
from .tables import next_number

LOAD_BYTES = 16
"""Of one lane's load."""
ROWS = 16
ROWS_BLOCK = 256
"""Bytes of a row that a program of pooling none decodes at most."""


@dataclass(frozen=True)
class QuantizedShape:
    """One launch of the forward: features whose packed codes share a block width."""

    features: tuple[int, ...]
    dim: int
    """The dim when all share it, else 0."""
    block: int
    """Bytes of a row that a program holds."""
    column_blocks: int
    bags: int
    unroll: int
    column_align: int
    wide: bool
    """Row offsets within a table need 64 bits."""


def quantized_shapes(
    spec: QuantizedSpec, config: DeviceConfig, warp_size: int, short: bool
) -> tuple[QuantizedShape, ...]:
    """One launch a block width, by the same numbers as ``shapes.forward_shapes``, counted in bytes."""
    layout, form = spec.layout, spec.form
    lanes = max(warp_size, LEAST_LANES)
    side_by_side = config.forward_short_bags if short else config.forward_bags
    unroll = config.forward_short_unroll if short else config.forward_unroll
    by_block: dict[int, list[int]] = {}
    for feature, dim in sorted(enumerate(layout.feature_dims), key=lambda item: item[1]):
        by_block.setdefault(next_power_of_two(form.code_bytes(dim)), []).append(feature)
    found = []
    for width, features in by_block.items():
        block = min(width, max(config.forward_columns // form.per_byte, 1))
        dims = {layout.feature_dims[f] for f in features}
        tables = [layout.feature_table(f) for f in features]
        bags = max(side_by_side, min(lanes * LOAD_BYTES // block, lanes)) if block < 512 else 1
        # Rows of a warp's 16-byte loads that are in flight; their decoded values take registers, too.
        most = max(4096 // (bags * block * form.per_byte), 1)
        found.append(
            QuantizedShape(
                features=tuple(features),
                dim=dims.pop() if len(dims) == 1 else 0,
                block=block,
                column_blocks=-(-max(form.code_bytes(t.dim) for t in tables) // block),
                bags=bags,
                unroll=min(unroll, most),
                column_align=alignment(*(layout.feature_columns[f] for f in features)),
                wide=any(t.rows * form.row_bytes(t.dim) > INT32_MAX for t in tables),
            )
        )
    return tuple(found)


class QuantizedTables:
    """The layout's numbers as tensors on one device, and the launch shapes; made once for a spec."""

    def __init__(
        self, spec: QuantizedSpec, config: DeviceConfig, caps: Capabilities, device: torch.device
    ) -> None:
        layout, form = spec.layout, spec.form
        self.number = next_number()
        unit, _ = gradient_units(spec)
        self.shapes = quantized_shapes(spec, config, caps.warp_size, short=False)
        self.short_shapes = quantized_shapes(spec, config, caps.warp_size, short=True)
        by_feature = [
            [f, t.rows, spec.table_bases[n], layout.feature_columns[f], t.dim, form.row_bytes(t.dim)]
            for f, n in enumerate(layout.feature_table_map)
            for t in (layout.tables[n],)
        ]
        self.forward = [
            torch.tensor([by_feature[f] for f in shape.features], dtype=torch.int64, device=device)
            for shape in self.shapes
        ]
        self.rows = torch.tensor([[row[1], row[2]] for row in by_feature], dtype=torch.int64, device=device)
        """Pooling none: rows and first byte of every feature's table."""
        self.linearise = torch.tensor(
            [
                [t[1], layout.row_bases[n], t[3] // unit]
                for t, n in zip(by_feature, layout.feature_table_map, strict=True)
            ],
            dtype=torch.int64,
            device=device,
        )
        """What the check of ids reads: rows of every feature."""
        self._config, self._features = config, layout.features

    def shapes_for(self, lookups: int, batch: int) -> tuple[QuantizedShape, ...]:
        """The launches of a forward, by the average length and the number of its bags."""
        config = self._config
        short = lookups < config.forward_short_length * batch * self._features
        return self.short_shapes if short or lookups >= config.forward_short_lookups else self.shapes


_tables: dict[tuple[int, DeviceConfig, Capabilities, torch.device], QuantizedTables] = {}


def quantized_tables(lookup: QuantizedLookup) -> QuantizedTables:
    plan, device = lookup.plan, lookup.weights.device
    key = (lookup.spec.handle, plan.config, plan.caps, device)
    found = _tables.get(key)
    if found is None:
        found = _tables[key] = QuantizedTables(lookup.spec, plan.config, plan.caps, device)
    return found


def forward(lookup: QuantizedLookup) -> torch.Tensor:
    """The output of a quantised lookup, on the current device."""
    spec, n = lookup.spec, lookup.indices.numel()
    pooled = spec.pooling != "none"
    height = lookup.batch if pooled else n
    out = torch.empty(height, spec.output_width, dtype=spec.output_dtype, device=lookup.weights.device)
    if not out.numel():
        return out
    tables = quantized_tables(lookup)
    words = Part(lookup.weights, 0, lookup.weights.numel() // 4, torch.float32)
    if not pooled:
        _rows(lookup, tables, words, out)
        return out
    shapes = tables.shapes_for(n, lookup.batch)
    side = side_for_narrow([s.block for s in shapes], n, lookup.plan.config, out.device)
    for shape, features in zip(shapes, tables.forward, strict=True):
        beside = side.stream.cuda_stream if side and shape.block <= NARROW else None
        _pool(lookup, tables, shape, features, words, out, beside)
    if side:
        side.join()
    return out


def _variant(lookup: QuantizedLookup, tables: QuantizedTables) -> tuple[Any, ...]:
    from .launch import variant_of

    return variant_of(lookup, tables)


def _pool(
    lookup: QuantizedLookup,
    tables: QuantizedTables,
    shape: QuantizedShape,
    features: torch.Tensor,
    words: Part,
    out: torch.Tensor,
    stream: int | None,
) -> None:
    from .kernels.quantized import tbe_quantized_pool_kernel
    from .launch import WIDE_FROM

    spec, n = lookup.spec, lookup.indices.numel()
    blocks = -(-lookup.batch // shape.bags)
    weights = lookup.per_sample_weights
    run(
        tbe_quantized_pool_kernel,
        (len(shape.features) * blocks * shape.column_blocks,),
        out,
        lookup.weights,
        words,
        lookup.indices,
        lookup.offsets,
        lookup.indices if weights is None else weights,
        features,
        lookup.batch,
        blocks,
        n,
        out.shape[1],
        D=shape.dim,
        STRIDE=spec.form.row_bytes(shape.dim) if shape.dim else 0,
        BLOCK=shape.block,
        COLUMN_BLOCKS=shape.column_blocks,
        BAGS=shape.bags,
        UNROLL=shape.unroll,
        FORMAT=spec.quantization,
        WEIGHTED=weights is not None,
        MEAN=spec.pooling == "mean",
        COLUMN_ALIGN=shape.column_align,
        WIDE=shape.wide,
        WIDE_LOOKUPS=n > WIDE_FROM,
        STREAMS=lookup.plan.config.forward_streams,
        num_warps=1,
        stream=stream,
        variant=(*_variant(lookup, tables), shape.features[0], shape.bags, shape.unroll),
    )


def _rows(lookup: QuantizedLookup, tables: QuantizedTables, words: Part, out: torch.Tensor) -> None:
    from .kernels.quantized import tbe_quantized_rows_kernel
    from .launch import WIDE_FROM

    spec, n = lookup.spec, lookup.indices.numel()
    dim, form = spec.layout.dims[0], spec.form
    block = min(next_power_of_two(form.code_bytes(dim)), ROWS_BLOCK)
    run(
        tbe_quantized_rows_kernel,
        (-(-n // ROWS), -(-form.code_bytes(dim) // block)),
        out,
        lookup.weights,
        words,
        lookup.indices,
        lookup.offsets,
        tables.rows,
        lookup.offsets.numel() - 1,
        max(lookup.batch, 1),
        n,
        D=dim,
        STRIDE=form.row_bytes(dim),
        BLOCK=block,
        ROWS=ROWS,
        FORMAT=spec.quantization,
        WIDE=n > WIDE_FROM,
        num_warps=4,
        variant=_variant(lookup, tables),
    )
