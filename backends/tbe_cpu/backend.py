"""Forward, exact fused update and per-sample-weight gradient in eager torch; no loop over bags or rows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tbe_core import (
    BAD_LOOKUPS,
    BAD_OFFSETS,
    Capabilities,
    DeviceConfig,
    Lookup,
    Problem,
    QuantizedLookup,
    Spec,
    Training,
)
from tbe_core.optimizers import REGISTRY, Hyper, NoOptimizer
from tbe_core.quantization import unpack
from tbe_core.rounding import random_words, round_stochastically

from .jagged import GroupLookup, bad_ids, group_lookups, sum_segments

NO_COUNTER = torch.zeros(2, dtype=torch.int64).unbind()
CHUNK_ELEMENTS = 1 << 24
"""Elements of gathered rows held at once: 64 MiB in fp32, whatever the batch."""


class CpuBackend:
    """Serves CPU tensors. Results are bitwise repeatable: every sum has one owner and one order."""

    name = "cpu"

    def unavailable(self, caps: Capabilities) -> str | None:
        if caps.device_type != "cpu":
            return f"serves CPU tensors only, not {caps.device_type}"
        return None

    def preference(self, caps: Capabilities) -> int:
        return 0

    def unsupported(self, problem: Problem, caps: Capabilities) -> tuple[str, ...]:
        if problem.optimizer not in (*REGISTRY, NoOptimizer.NAME):
            return (f"optimizer {problem.optimizer!r} is unknown",)
        return ()

    def configure(self, problem: Problem, caps: Capabilities) -> tuple[DeviceConfig, tuple[str, ...]]:
        return DeviceConfig(source="eager torch, nothing to tune"), ()

    def settle(self) -> None:
        """Nothing is built in the background."""

    def count_bad(self, lookup: Lookup | QuantizedLookup, bad: torch.Tensor) -> None:
        indices, offsets = lookup.indices, lookup.offsets
        n = indices.numel()
        wrong = (offsets < 0) | (offsets > n)
        wrong[0], wrong[-1] = offsets[0] != 0, offsets[-1] != n
        wrong[1:] |= offsets[1:] < offsets[:-1]
        bad[BAD_OFFSETS] += wrong.sum()
        if not wrong.any():
            bad[BAD_LOOKUPS] += bad_ids(lookup).sum()

    def carry_bytes(self, spec: Spec, config: DeviceConfig, lookups: int, batch: int, weighted: bool) -> int:
        return 0

    def forward(self, lookup: Lookup, carry: bool) -> tuple[torch.Tensor, torch.Tensor]:
        spec = lookup.spec
        none = spec.pooling == "none"
        height = lookup.indices.numel() if none else lookup.batch
        out = torch.empty(height, spec.output_width, dtype=spec.output_dtype, device=lookup.weights.device)
        for part in group_lookups(lookup):
            pooled = _gather(part, lookup) if none else _pool(part, lookup)
            part.scatter_columns(out, pooled)
        return out, self.prepare(lookup)

    def forward_quantized(self, lookup: QuantizedLookup) -> torch.Tensor:
        spec = lookup.spec
        none = spec.pooling == "none"
        height = lookup.indices.numel() if none else lookup.batch
        out = torch.empty(height, spec.output_width, dtype=spec.output_dtype)
        bases = dict(zip(spec.layout.groups, spec.group_bases, strict=True))
        for part in group_lookups(lookup):
            width, base = spec.form.row_bytes(part.dim), bases[part.group]
            packed = lookup.weights[base : base + part.group.rows * width].view(part.group.rows, width)

            def read(rows: torch.Tensor, packed: torch.Tensor = packed, dim: int = part.dim) -> torch.Tensor:
                return unpack(packed[rows], spec.form, dim)

            if none:
                rows = torch.zeros(height, part.dim, dtype=out.dtype)
                for at in range(0, part.rows.numel(), step := max(1, CHUNK_ELEMENTS // part.dim)):
                    piece = slice(at, at + step)
                    rows[part.positions[piece]] = read(part.rows[piece]).to(out.dtype)
                part.scatter_columns(out, rows)
            else:
                part.scatter_columns(out, _pool_rows(part, part.scale(lookup), read))
        return out

    def prepare(self, lookup: Lookup) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def backward_update(
        self, lookup: Lookup, grad: torch.Tensor, training: Training, carry: torch.Tensor
    ) -> None:
        optimizer = lookup.spec.optimizer
        step, seed = NO_COUNTER if training.counter is None else training.counter.unbind()
        hyper = Hyper(tuple(training.hyper.unbind()), optimizer.HYPER, step)
        for part in group_lookups(lookup, lookup.spec.frozen):
            touched, sums = _row_sums(part, lookup, grad)
            if not touched.numel():
                continue
            table = part.table(lookup.weights)
            views = {
                spec.name: part.row_state(state) if spec.kind == "row" else part.table(state)
                for spec, state in zip(optimizer.STATE, training.states, strict=True)
            }
            state = {name: view[touched] for name, view in views.items()}
            stepped = optimizer.step_rows(table[touched].float(), sums, state, hyper)
            if lookup.spec.stochastic_rounding:
                words = random_words(seed, step, touched + part.group.row_base, part.dim)
                table[touched] = round_stochastically(stepped, table.dtype, words)
            else:
                table[touched] = stepped.to(table.dtype)
            for name, view in views.items():
                view[touched] = state[name]

    def row_gradients(
        self, lookup: Lookup, grad: torch.Tensor, carry: torch.Tensor
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        layout, found = lookup.spec.layout, {}
        for part in group_lookups(lookup, lookup.spec.frozen):
            touched, sums = _row_sums(part, lookup, grad)
            for t in sorted(lookup.spec.trained):
                table = layout.tables[t]
                if table.dim == part.dim:
                    base = layout.row_bases[t] - part.group.row_base
                    low, high = torch.searchsorted(touched, torch.tensor([base, base + table.rows])).tolist()
                    found[t] = touched[low:high] - base, sums[low:high].to(lookup.spec.weights_dtype)
        return found

    def per_sample_weight_grad(self, lookup: Lookup, grad: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(lookup.indices.numel(), dtype=torch.float32, device=grad.device)
        for part in group_lookups(lookup):
            table, bag_grads = part.table(lookup.weights), part.gather_columns(grad)
            inverse = part.inverse_lengths() if lookup.spec.pooling == "mean" else None
            for at in range(0, part.rows.numel(), step := max(1, CHUNK_ELEMENTS // part.dim)):
                piece = slice(at, at + step)
                bags = part.bags[piece]
                dots = (table[part.rows[piece]].float() * bag_grads[bags]).sum(dim=1)
                out[part.positions[piece]] = dots if inverse is None else dots * inverse[bags]
        return out


def _row_sums(part: GroupLookup, lookup: Lookup, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[U]`` touched rows of the group, ascending, and ``[U, D]`` fp32 their gradients' sums."""
    keys, order = part.rows.sort(stable=True)
    touched, lengths = keys.unique_consecutive(return_counts=True)
    if not touched.numel():
        return touched, torch.zeros(0, part.dim)
    scale = part.scale(lookup)
    source = part.gather_columns(grad)
    return touched, sum_segments(source, part.bags[order], lengths, None if scale is None else scale[order])


def _gather(part: GroupLookup, lookup: Lookup) -> torch.Tensor:
    """Pooling none: ``[N, D]``, zero where the id contributes nothing."""
    out = torch.zeros(lookup.indices.numel(), part.dim, dtype=lookup.spec.output_dtype)
    out[part.positions] = part.table(lookup.weights)[part.rows].to(out.dtype)
    return out


def _pool(part: GroupLookup, lookup: Lookup) -> torch.Tensor:
    """``[T_g * B, D]`` fp32: pooled bags of one group of features."""
    table, scale = part.table(lookup.weights), part.scale(lookup)
    if table.dtype == torch.float32:
        lengths = torch.bincount(part.bags, minlength=part.bag_count)
        return sum_segments(table, part.rows, lengths, scale)
    # embedding_bag rounds its sum to the table's dtype: widen the rows first.
    return _pool_rows(part, scale, lambda rows: table[rows].float())


def _pool_rows(
    part: GroupLookup, scale: torch.Tensor | None, read: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The same of rows that ``read`` gives in fp32, ``[n, D]``: a bounded number of bags at a time."""
    lengths = torch.bincount(part.bags, minlength=part.bag_count)
    out = torch.empty(part.bag_count, part.dim, dtype=torch.float32)
    ends = lengths.cumsum(0)
    step = max(1, CHUNK_ELEMENTS // part.dim)
    first = lookups = 0
    while first < part.bag_count:
        # As many bags as fit, and at least one, however long it is.
        last = max(int(torch.searchsorted(ends, lookups + step, right=True)), first + 1)
        piece = slice(lookups, int(ends[last - 1]))
        rows = read(part.rows[piece])
        order = torch.arange(len(rows))
        out[first:last] = sum_segments(rows, order, lengths[first:last], None if scale is None else scale[piece])
        first, lookups = last, piece.stop
    return out
