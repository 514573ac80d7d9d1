"""Read-only quantised tables for inference: an nn.Module with the call of ``TableBatchedEmbeddingBags``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tbe_core import Layout, Plan, QuantizedSpec, Table
from tbe_core.quantization import FORMATS, QUANTIZATIONS, Quantization, RowFormat, pack, unpack
from tbe_core.types import BoundsCheck, Pooling
from tbe_core.validate import check_inputs

from . import ops, policy
from .bounds import BadLookups
from .module import TableBatchedEmbeddingBags
from .options import wants_gradient
from .pieces import slices
from .quantized_memory import QuantizedMemory

READ_ONLY = (
    "per_sample_weights that require a gradient, in a quantised module: expected weights without gradient, or a "
    "call under torch.no_grad(); the module is for inference"
)
NAN_CODE = 0x7F
"""Of e4m3, its sign bit aside: no row is packed to it."""


class QuantizedTableBatchedEmbeddingBags(nn.Module):
    """Looks up and pools the ids of every feature at once, in read-only tables of int8, int4 or fp8 rows.

    ``quantize`` makes one of a trained module; made by hand all rows are zeros, for ``load_state_dict``. Each row
    has a scale and, for integers, a bias of its own, in fp32: docs/inference.md has formulas and bounds.

    Args:
        tables: the tables, with distinct names.
        feature_table_map: T table numbers, one a feature. Default: one feature a table, in order.
        pooling: ``"sum"``, ``"mean"`` or ``"none"``.
        quantization: ``"int8"``, ``"int4"`` or ``"fp8"`` (e4m3).
        output_dtype: float32, float16 or bfloat16; sums accumulate in fp32 and round once.
        bounds_check: as for ``TableBatchedEmbeddingBags``.
        backend: a backend's name; refused with reasons where it cannot serve. Default: the best that can.
        device: where the tables live.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and what was expected.
        BackendError: no backend, or not the one asked for, serves this problem; with every reason.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        feature_table_map: Sequence[int] | None = None,
        pooling: Pooling = "sum",
        *,
        quantization: Quantization,
        output_dtype: torch.dtype = torch.float32,
        bounds_check: BoundsCheck = "warn",
        backend: str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        layout = Layout.make(tables, feature_table_map)
        self.spec = QuantizedSpec(layout, quantization, pooling, output_dtype, bounds_check)
        self.requested_backend = backend
        where = torch.device(torch.get_default_device() if device is None else device)
        if where.type == "cuda" and where.index is None:
            where = torch.device("cuda", torch.cuda.current_device())
        policy.plan_for(self.spec.problem(), where, policy.request(backend))
        self._handle = ops.register_quantized(self.spec)
        self._bad_lookups = BadLookups()
        self.storage: torch.Tensor
        packed = torch.zeros(self.spec.total_bytes, dtype=torch.uint8, device=where)
        self.register_buffer("storage", packed, persistent=False)
        self.bad: torch.Tensor
        self.register_buffer("bad", torch.zeros(2, dtype=torch.int64, device=where), persistent=False)

    @property
    def plan(self) -> Plan:
        """The plan for int64 ids, unweighted: the backend, its configuration and who was passed over."""
        return policy.plan_for(self.spec.problem(), self.storage.device, policy.request(self.requested_backend))

    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Look up and pool; without gradient.

        Args:
            indices: ``[N]`` int32 or int64; -1 is a pruned id and is skipped.
            offsets: ``[T*B+1]`` int32 or int64, feature-major.
            per_sample_weights: ``[N]`` factors, multiplied in fp32.

        Returns:
            ``[B, sum of feature dims]``, feature t at its running column; ``[N, D]`` with pooling none.

        Raises:
            ValueError: an input is wrong, or ``per_sample_weights`` require a gradient.
        """
        asked = policy.request(self.requested_backend)
        if not torch.compiler.is_compiling():
            check_inputs(self.spec, self.storage.device, indices, offsets, per_sample_weights)
        if wants_gradient(per_sample_weights):
            raise ValueError(READ_ONLY)
        if not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack():
            return self._eager(indices, offsets, per_sample_weights, asked)
        self._check(indices, offsets, asked)
        out: torch.Tensor = torch.ops.tbe.quantized_lookup(
            self.storage, indices, offsets, per_sample_weights, self._handle, asked
        )
        return out

    def _eager(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None, asked: str
    ) -> torch.Tensor:
        self._check(indices, offsets, asked)
        return ops.quantized_lookup(self.storage, indices, offsets, per_sample_weights, self._handle, asked)

    def _check(self, indices: torch.Tensor, offsets: torch.Tensor, asked: str) -> None:
        mode = self.spec.bounds_check
        if mode == "none" or (mode == "ignore" and self.storage.device.type != "cpu"):
            return
        torch.ops.tbe.check(self.storage, indices, offsets, self.bad, self._handle, asked)
        if mode == "warn" and not torch.compiler.is_compiling():
            self._bad_lookups.poll(self.bad)

    def flush(self) -> None:
        """Wait for the device and report every bad id and offset counted so far."""
        self._bad_lookups.flush(self.bad)

    def dequantize(self, table: str | int, ids: torch.Tensor | Sequence[int] | None = None) -> torch.Tensor:
        """The values that the lookup reads: ``[n, dim]`` fp32, of all rows or of ``ids``.

        Raises:
            ValueError: there is no such table, or an id is not one of its rows.
        """
        number = self._number(table)
        known = self.spec.layout.tables[number]
        packed = self.spec.table(self.storage, number)
        if ids is not None:
            rows = torch.as_tensor(ids, device=self.storage.device, dtype=torch.int64)
            bad = (rows < 0) | (rows >= known.rows)
            if bool(bad.any()):
                raise ValueError(f"ids: {int(rows[bad][0])} of table {known.name!r}: expected [0, {known.rows})")
            packed = packed[rows]
        return unpack(packed, self.spec.form, known.dim)

    def _number(self, table: str | int) -> int:
        names = [t.name for t in self.spec.layout.tables]
        if isinstance(table, str) and table in names:
            return names.index(table)
        if isinstance(table, int) and not isinstance(table, bool) and 0 <= table < len(names):
            return table
        raise ValueError(f"table={table!r}: expected one of {', '.join(map(repr, names))}, or its number")

    def memory(self) -> QuantizedMemory:
        """Bytes of the rows, packed and as fp32 and fp16 tables would hold them."""
        return QuantizedMemory.of(self.spec)

    def _named_views(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds: ``<table>.<quantization>`` (codes), ``<table>.scale``, ``<table>.bias``."""
        form, views = self.spec.form, {}
        for number, table in enumerate(self.spec.layout.tables):
            packed = self.spec.table(self.storage, number)
            views[f"{table.name}.{form.name}"] = form.codes(packed, table.dim)
            views[f"{table.name}.scale"] = form.scales(packed, table.dim)
            if form.has_bias:
                views[f"{table.name}.bias"] = form.biases(packed, table.dim)
        return views

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, view in self._named_views().items():
            # torch.save refuses views of one memory in several dtypes; scales and biases are few.
            destination[prefix + name] = view.clone() if view.dtype == torch.float32 else view

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        views = self._named_views()
        missing_keys += [prefix + name for name in views if prefix + name not in state_dict]
        unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k.removeprefix(prefix) not in views]
        given = {name: state_dict[prefix + name] for name in views if prefix + name in state_dict}
        errors = [
            f"{prefix}{name} {fault}" for name, value in given.items() if (fault := _fault(value, views[name]))
        ]
        error_msgs += errors
        # Missing and unexpected keys do not stop it: torch raises by itself afterwards where it was strict.
        if errors:
            return
        for name, value in given.items():
            view = views[name]
            if view.itemsize == 1:  # bytes: not every torch copies fp8 between devices
                view, value = view.view(torch.uint8), value.view(torch.uint8)
            view.copy_(value)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedTableBatchedEmbeddingBags:
        # Asked of an empty tensor, so that a refusal leaves the module as it was. Of a float one: packed rows are
        # bytes, which no conversion would touch.
        probe = fn(torch.empty(0, dtype=torch.float32, device=self.storage.device))
        if probe.dtype != torch.float32:
            raise ValueError(
                f"cannot convert a quantised module to {probe.dtype}: output_dtype is set when the module is "
                "made; .to(device) moves it"
            )
        policy.plan_for(self.spec.problem(), probe.device, policy.request(self.requested_backend))
        base: Any = super()
        base._apply(fn, recurse)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        base: Any = super()
        base.__setstate__(state)
        self._handle = ops.register_quantized(self.spec)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bad_lookups": self._bad_lookups.forked()}

    def extra_repr(self) -> str:
        layout, spec = self.spec.layout, self.spec
        return (
            f"{len(layout.tables)} tables, {layout.features} features, {layout.total_rows} rows, "
            f"D={','.join(map(str, layout.dims))}, pooling={spec.pooling}, {self.memory().line()}"
        )


def _fault(value: object, view: torch.Tensor) -> str | None:
    """What is wrong with a value for ``view``, or None. Reads values where these could not be a row's."""
    if not isinstance(value, torch.Tensor):
        return f"is a {type(value).__name__}: expected a tensor"
    if tuple(value.shape) != tuple(view.shape) or value.dtype != view.dtype:
        return f"is {list(value.shape)} {value.dtype}: expected {list(view.shape)} {view.dtype}"
    if value.dtype == torch.float32 and not bool(value.isfinite().all()):
        row = int(value.isfinite().logical_not().nonzero()[0])
        return f"of row {row} is {float(value[row])}: expected a finite number"
    if value.dtype == torch.float8_e4m3fn:
        for piece in slices(value):
            nan = ((value[piece].view(torch.uint8) & NAN_CODE) == NAN_CODE).any(dim=1)
            if bool(nan.any()):
                return f"of row {piece.start + int(nan.nonzero()[0])} has a NaN: expected finite numbers"
    return None


@torch.no_grad()
def quantize(
    emb: TableBatchedEmbeddingBags,
    quantization: Quantization = "int8",
    *,
    output_dtype: torch.dtype | None = None,
    bounds_check: BoundsCheck | None = None,
    backend: str | None = None,
) -> QuantizedTableBatchedEmbeddingBags:
    """A read-only module with the rows of ``emb``, quantised row by row, on the same device.

    ``emb`` stays as it is. Beside the result it takes a bounded number of rows in fp64 at a time, never a second
    copy of a table.

    Args:
        emb: with rows that are finite; frozen or not.
        quantization: ``"int8"``, ``"int4"`` or ``"fp8"``.
        output_dtype, bounds_check, backend: default: those of ``emb``.

    Raises:
        ValueError: an argument is wrong, or a row holds inf or NaN, or spreads wider than float32 holds; table
            and row are named.
        BackendError: no backend, or not the one asked for, serves quantised tables on the device.
    """
    if not isinstance(emb, TableBatchedEmbeddingBags):
        raise ValueError(f"emb={type(emb).__name__}: expected a tbe.TableBatchedEmbeddingBags")
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization={quantization!r}: expected one of {', '.join(QUANTIZATIONS)}")
    layout = emb.spec.layout
    found = QuantizedTableBatchedEmbeddingBags(
        layout.tables,
        layout.feature_table_map,
        emb.spec.pooling,
        quantization=quantization,
        output_dtype=emb.spec.output_dtype if output_dtype is None else output_dtype,
        bounds_check=emb.spec.bounds_check if bounds_check is None else bounds_check,
        backend=emb.requested_backend if backend is None else backend,
        device=emb.weights.device,
    )
    found.train(emb.training)
    form = FORMATS[quantization]
    for number, (table, rows) in enumerate(zip(layout.tables, emb.split_embedding_weights(), strict=True)):
        _pack_table(table, rows, found.spec.table(found.storage, number), form)
    return found


def _pack_table(table: Table, rows: torch.Tensor, into: torch.Tensor, form: RowFormat) -> None:
    for piece in slices(rows):
        part = rows[piece]
        finite = part.isfinite().all(dim=1)
        if not bool(finite.all()):
            row = piece.start + int(finite.logical_not().nonzero()[0])
            bad = rows[row][rows[row].isfinite().logical_not()][0]
            raise ValueError(
                f"row {row} of table {table.name!r} holds {float(bad)}: expected finite values to quantise; "
                "reset_rows makes a row new"
            )
        packed = pack(part, form)
        spread = form.scales(packed, table.dim).double() * form.largest
        if bool((spread > torch.finfo(torch.float32).max).any()):
            row = piece.start + int(spread.argmax())
            raise ValueError(
                f"row {row} of table {table.name!r} spreads over {float(spread.max()):.3g}: expected a number of "
                "float32, in which rows are read back"
            )
        into[piece] = packed
