"""The calls whose launches are cross-compiled: a table of problems, and how to make such a call on the CPU.

Nothing here names a kernel, an argument or a constant: they come from the backend's own methods, run on tensors
of the right dtypes, alignments and sizes whose values nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from tbe_core import (
    Backend,
    Capabilities,
    DeviceConfig,
    Layout,
    Lookup,
    Optimizer,
    Plan,
    QuantizedLookup,
    QuantizedSpec,
    RowwiseAdagrad,
    Spec,
    Table,
    Tier,
    Training,
    route,
    small_tables,
    takes_dense_tier,
)
from tbe_core.dtypes import STATE_DTYPE, short_name
from tbe_core.optimizers import REGISTRY, WEIGHT_DECAY_MODES, Adam, NoOptimizer
from tbe_core.quantization import QUANTIZATIONS, Quantization
from tbe_core.types import Pooling

from .launcher import Record, recording

FORWARD, UPDATE, WEIGHT_GRAD, CHECK = "forward", "update", "weight_grad", "check"
FEW_LOOKUPS = 333
"""No multiple of 16, so that the general variant of a kernel is compiled, as for most batches."""
ONE_PROCESSOR = 1
"""Many lookups for a device of one processor are few enough to allocate; what they launch is the same."""
MOST_LOOKUPS = 1 << 20
SHORT_BAG, LONG_BAG = 6, 40
SMALL_ROWS, ROWS, MANY_ROWS = 100, 1000, 1 << 25
"""Of a table: few enough for the dense tier; any; so many that row offsets need 64 bits."""
DEFAULT_OPTIMIZER = RowwiseAdagrad()


@dataclass(frozen=True)
class Variant:
    """A problem, and what of it is compiled."""

    dims: tuple[int, ...]
    weights_dtype: torch.dtype = torch.float16
    output_dtype: torch.dtype = torch.float32
    pooling: Pooling = "sum"
    weighted: bool = False
    optimizer: Optimizer = DEFAULT_OPTIMIZER
    stochastic_rounding: bool = False
    index_dtype: torch.dtype = torch.int32
    rows: int = ROWS
    """A table."""
    deterministic: bool = True
    quantization: Quantization | None = None
    """Of a read-only module's rows: only its forward is compiled."""
    passes: tuple[str, ...] = (FORWARD, UPDATE)
    tiers: tuple[Tier, ...] = (Tier.FUSED, Tier.SPLIT)
    """Few lookups, many, or bags that repeat rows of small tables."""

    def spec(self) -> Spec | QuantizedSpec:
        layout = Layout.make([Table(f"d{dim}", self.rows, dim) for dim in self.dims], None)
        if self.quantization is not None:
            return QuantizedSpec(layout, self.quantization, self.pooling, self.output_dtype)
        return Spec(
            layout, self.optimizer, self.pooling, self.weights_dtype, self.output_dtype,
            stochastic_rounding=self.stochastic_rounding, deterministic=self.deterministic,
        )  # fmt: skip

    def name(self, work: str, tier: Tier) -> str:
        """What stands in the brackets: only what decides the kernels of that pass."""
        words = [
            f"D={','.join(map(str, self.dims))}",
            f"{self.quantization or short_name(self.weights_dtype)}->{short_name(self.output_dtype)}",
        ]
        if work == UPDATE:
            flags = self.optimizer.flags.items()
            words.append(self.optimizer.NAME)
            words += [str(v) if isinstance(v, str) else k for k, v in flags if v not in (False, "none")]
            words += ["stochastic rounding"] * self.stochastic_rounding
        if work != UPDATE or self.pooling != "sum":
            words.append(self.pooling)
        if self.weighted:
            words.append("weighted")
        if self.index_dtype != torch.int32:
            words.append(f"ids {short_name(self.index_dtype)}")
        if self.rows > ROWS:
            words.append(f"{self.rows} rows")
        if not self.deterministic:
            words.append("non-deterministic")
        if work == UPDATE:
            words.append(tier.value)
        elif work == FORWARD and self.pooling != "none":
            words.append("short bags" if tier is Tier.FUSED else "long bags")
        return " ".join(words)


def _variants() -> Iterator[Variant]:
    only_update, few = (UPDATE,), (Tier.FUSED,)
    for dim in (4, 64, 128, 256, 512, 1024, 2048, 4096):
        yield Variant((dim,))
    yield Variant((3, 16, 128, 512))
    for dtype in (torch.float32, torch.bfloat16):
        yield Variant((128,), dtype)
    yield Variant((128,), output_dtype=torch.float16)
    yield Variant((128,), index_dtype=torch.int64, tiers=few)
    yield Variant((128,), pooling="mean")
    yield Variant((128,), weighted=True)
    yield Variant((128,), pooling="none")
    yield Variant((128,), rows=MANY_ROWS, passes=(FORWARD,))
    optimizers = [make() for make in REGISTRY.values() if make() != DEFAULT_OPTIMIZER] + [
        RowwiseAdagrad(weight_decay_mode=mode, max_norm=norm)
        for mode, norm in product(WEIGHT_DECAY_MODES, (0.0, 1.0))
        if RowwiseAdagrad(weight_decay_mode=mode, max_norm=norm) != DEFAULT_OPTIMIZER
    ]
    optimizers.append(NoOptimizer())
    for dtype in (torch.float16, torch.bfloat16):
        yield Variant((128,), dtype, passes=only_update, stochastic_rounding=True)
    yield Variant((3, 16, 128, 512, 1024), torch.float32, optimizer=Adam(), passes=only_update)
    for optimizer in optimizers:
        yield Variant((128,), optimizer=optimizer, passes=only_update)
    for dims in ((64,), (128,), (1024,), (3, 16, 128, 512)):
        yield Variant(dims, passes=(WEIGHT_GRAD,), weighted=True, tiers=few)
    yield Variant((128,), pooling="mean", passes=(WEIGHT_GRAD,), weighted=True, tiers=few)
    for dim in (16, 128, 256):
        yield Variant((dim,), rows=SMALL_ROWS, passes=only_update, tiers=(Tier.DENSE,))
    yield Variant((128,), passes=(CHECK,), tiers=few)
    for quantization in QUANTIZATIONS:
        read = {"quantization": quantization, "passes": (FORWARD,)}
        for dim in (16, 128, 256):
            yield Variant((dim,), **read)
        yield Variant((3, 16, 128, 512), tiers=few, **read)
        yield Variant((128,), pooling="mean", weighted=True, tiers=few, **read)
        yield Variant((128,), rows=MANY_ROWS, tiers=few, **read)
        yield Variant((128,), pooling="none", tiers=few, **read)


VARIANTS: tuple[Variant, ...] = tuple(_variants())


class Call:
    """One call of a variant's operator, as a backend sees it."""

    def __init__(self, backend: Backend, variant: Variant, tier: Tier, caps: Capabilities) -> None:
        spec = variant.spec()
        problem = spec.problem(variant.index_dtype, variant.index_dtype, variant.weighted)
        self.reasons = backend.unsupported(problem, caps)
        """Why no plan would ever give this call to the backend."""
        if self.reasons:
            return
        config, notes = backend.configure(problem, caps)
        self.tier = tier if config.fused_programs or tier is not Tier.FUSED else Tier.SPLIT
        """What an update takes: on a device without a fused tier few lookups are split, too."""
        if tier is Tier.SPLIT:
            caps = replace(caps, processors=ONE_PROCESSOR)
        lookups, batch = _size(variant, tier, config, caps)
        self._backend = backend
        packed = isinstance(spec, QuantizedSpec)
        rows = (spec.total_bytes, torch.uint8) if packed else (spec.layout.total_elements, variant.weights_dtype)
        self._lookup: Any = (QuantizedLookup if packed else Lookup)(
            spec,
            Plan(backend.name, problem, caps, config, notes),
            _storage(*rows),
            torch.zeros(lookups, dtype=variant.index_dtype),
            torch.zeros(batch * spec.layout.features + 1, dtype=variant.index_dtype),
            torch.zeros(lookups) if variant.weighted else None,
        )

    def run(self, work: str, record: Record) -> None:
        """Run one pass through the backend's own method, its launches handed to ``record``."""
        backend, lookup = self._backend, self._lookup
        if work == CHECK:
            with recording(record):
                backend.count_bad(lookup, torch.zeros(2, dtype=torch.int64))
            return
        if isinstance(lookup, QuantizedLookup):
            with recording(record):
                backend.forward_quantized(lookup)
            return
        with recording(record if work == FORWARD else _ignore):
            out, carry = backend.forward(lookup, carry=True)
        grad = torch.zeros_like(out)
        with recording(record):
            if work == WEIGHT_GRAD:
                backend.per_sample_weight_grad(lookup, grad)
            elif work == UPDATE and not lookup.spec.optimizer.STEPS:
                # Nobody has sorted: keys of 0, of which the host reads how many rows were touched.
                backend.row_gradients(lookup, grad, carry.zero_())
            elif work == UPDATE:
                backend.backward_update(lookup, grad, _training(lookup.spec), carry)


def _ignore(*launch: Any) -> None:
    """A launch that another pass compiles."""


def _size(variant: Variant, tier: Tier, config: DeviceConfig, caps: Capabilities) -> tuple[int, int]:
    """Lookups, and bags a feature, that take the tier by ``tbe_core.tiers``'s own rules."""
    spec = variant.spec()
    features = spec.layout.features
    lookups, batch = FEW_LOOKUPS, max(FEW_LOOKUPS // (SHORT_BAG * features), 2)

    def right() -> bool:
        if tier is Tier.DENSE:
            small = bool(small_tables(spec, config))
            return small and takes_dense_tier(spec, lookups, batch, variant.weighted, config)
        chosen = route(lookups, config, caps)
        if tier is Tier.FUSED:
            # Few lookups: fused where the device ever fuses, else split in the smallest stretches.
            return chosen.long_runs is tier if config.fused_programs else chosen.stretch == config.stretch_small
        return chosen.long_runs is tier and chosen.stretch == config.stretch

    while not right():
        lookups = lookups * 2 + 1
        batch = lookups // (LONG_BAG * features)
        if lookups > MOST_LOOKUPS or tier is Tier.FUSED:
            raise ValueError(f"no number of lookups up to {lookups} takes the {tier.value} tier of {config}")
    return lookups, batch


def _training(spec: Spec) -> Training:
    sizes = {"row": spec.layout.total_rows, "element": spec.layout.total_elements}
    states = tuple(_storage(sizes[state.kind], STATE_DTYPE) for state in spec.optimizer.STATE)
    hyper = torch.tensor(spec.optimizer.hyper_values(), dtype=STATE_DTYPE)
    return Training(states, hyper, torch.zeros(2, dtype=torch.int64) if spec.counts_steps else None)


def _storage(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """``[elements]`` that take no memory: only their address and dtype are looked at."""
    return torch.empty(1, dtype=dtype).expand(elements)
