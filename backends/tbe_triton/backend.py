"""The host side: from a lookup to launches. Triton is imported at the first call, not before."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version

from tbe_core import (
    Capabilities,
    DeviceConfig,
    Lookup,
    Problem,
    QuantizedLookup,
    Spec,
    Training,
    small_tables,
    takes_dense_tier,
)
from tbe_core.tuning import Knob

from . import configs, quantized, sort
from .carry import Carry, CarryLayout
from .fused_tier import fused_tier_hazard, without_hazard
from .shapes import MAX_DIM
from .tables import DeviceTables, device_tables

if TYPE_CHECKING:
    from .ahead import SortAhead

MIN_TRITON = Version("3.6")
OPTIMIZERS = (
    "none",
    "sgd",
    "adagrad",
    "rowwise_adagrad",
    "adam",
    "partial_rowwise_adam",
    "lamb",
    "partial_rowwise_lamb",
    "lars",
)
"""Optimizers with a device function in kernels/row_updates.py."""


class TritonBackend:
    """Forward, exact fused update and per-sample-weight gradient in portable Triton."""

    name = "triton"
    packaged = configs.PACKAGED
    """The directory of its device files, which are those that name this backend."""

    def unavailable(self, caps: Capabilities) -> str | None:
        if caps.triton_version is None:
            return "Triton is not installed: pip install 'portable-tbe[triton]'"
        if Version(caps.triton_version).release < MIN_TRITON.release:
            return f"Triton {caps.triton_version} is too old: {MIN_TRITON} or newer is needed"
        if caps.device_type == "cpu" and not caps.triton_interpret:
            return (
                "no GPU: move the module to a GPU, or set TRITON_INTERPRET=1 to run the kernels in Triton's "
                "interpreter (slow, for checking values)"
            )
        if caps.device_type not in ("cpu", "cuda"):
            return f"no Triton kernels for {caps.device_type}"
        return None

    def preference(self, caps: Capabilities) -> int:
        return 10 if caps.device_type == "cuda" else -1

    def unsupported(self, problem: Problem, caps: Capabilities) -> tuple[str, ...]:
        reasons = []
        if problem.optimizer not in OPTIMIZERS:
            reasons.append(f"optimizer {problem.optimizer!r} has no kernel, only {', '.join(OPTIMIZERS)}")
        if problem.max_dim > MAX_DIM:
            reasons.append(f"dim {problem.max_dim} exceeds {MAX_DIM}, the widest row that a program holds")
        return tuple(reasons)

    def configure(self, problem: Problem, caps: Capabilities) -> tuple[DeviceConfig, tuple[str, ...]]:
        hazard = fused_tier_hazard(caps)
        config = without_hazard(self.device_config(caps), caps)
        if problem.quantization is not None:
            return config, ("packed rows are decoded in fp32 as they are pooled",)
        radix = sort.radix_unavailable(caps)
        fused = f"fused up to {config.fused_programs} programs, else split"
        long_runs = fused if hazard is None else f"split, never fused, since {hazard}"
        notes = (
            f"tiers: short runs in one program, long runs {long_runs}; tables of up to {config.dense_rows} rows "
            "dense where unweighted bags repeat them",
            f"sort: by rank up to {config.rank_sort_lookups} lookups, else "
            + ("radix sort of cuda-cccl" if radix is None else f"torch.sort, since {radix}"),
        )
        return config, notes

    def device_config(self, caps: Capabilities) -> DeviceConfig:
        """The device's numbers, before any rule about them; raises ``DeviceFileError``."""
        return configs.config_for(caps, self.name, self.packaged)

    def search_space(self, caps: Capabilities) -> tuple[Knob, ...]:
        """What ``tbe tune`` tries: nothing that ``configure`` would refuse."""
        knobs = configs.search_space(caps)
        return tuple(k for k in knobs if k.field != "fused_programs" or fused_tier_hazard(caps) is None)

    def settle(self) -> None:
        sort.settle()

    def count_bad(self, lookup: Lookup | QuantizedLookup, bad: torch.Tensor) -> None:
        from . import launch

        packed = isinstance(lookup, QuantizedLookup)
        tables = quantized.quantized_tables(lookup) if packed else device_tables(lookup)
        with on_device(bad):
            launch.check(lookup, tables, bad)

    def forward_quantized(self, lookup: QuantizedLookup) -> torch.Tensor:
        with on_device(lookup.weights):
            return quantized.forward(lookup)

    def carry_bytes(self, spec: Spec, config: DeviceConfig, lookups: int, batch: int, weighted: bool) -> int:
        if not spec.trained:
            return 0
        if small_tables(spec, config) == spec.trained and takes_dense_tier(
            spec, lookups, batch, weighted, config
        ):
            return 0
        return CarryLayout.of(spec, config, lookups, batch, weighted).nbytes

    def forward(self, lookup: Lookup, carry: bool) -> tuple[torch.Tensor, torch.Tensor]:
        from . import launch

        spec, device, n = lookup.spec, lookup.weights.device, lookup.indices.numel()
        tables = device_tables(lookup)
        pooled = spec.pooling != "none"
        out = torch.empty(
            lookup.batch if pooled else n, spec.output_width, dtype=spec.output_dtype, device=device
        )
        with on_device(out):
            variant = launch.variant_of(lookup, tables)
            ahead = self._sort_ahead(lookup, tables, variant) if carry else None
            if not out.numel():
                pass
            elif pooled:
                launch.forward(lookup, tables, out, variant)
            else:
                launch.forward_rows(lookup, tables, out, variant)
            return out, torch.empty(0, dtype=torch.uint8, device=device) if ahead is None else ahead.finish()

    def prepare(self, lookup: Lookup) -> torch.Tensor:
        from . import launch

        tables = device_tables(lookup)
        with on_device(lookup.weights):
            ahead = self._sort_ahead(lookup, tables, launch.variant_of(lookup, tables))
            nothing = torch.empty(0, dtype=torch.uint8, device=lookup.weights.device)
            return nothing if ahead is None else ahead.finish()

    def _sort_ahead(self, lookup: Lookup, tables: DeviceTables, variant: tuple[Any, ...]) -> SortAhead | None:
        from .ahead import SortAhead

        dense = tables.dense is not None and _dense(lookup)
        if (dense and tables.all_dense) or not lookup.spec.trained:
            return None
        return SortAhead(lookup, tables, tables.sorted_features if dense else tables.trained, variant)

    def backward_update(
        self, lookup: Lookup, grad: torch.Tensor, training: Training, carry: torch.Tensor
    ) -> None:
        from .dense import update_dense

        n, plan = lookup.indices.numel(), lookup.plan
        if not n or not lookup.spec.trained:
            return
        tables, grad = device_tables(lookup), grad.contiguous()
        with on_device(grad):
            if tables.dense is not None and _dense(lookup):
                update_dense(lookup, tables, tables.dense, grad, training)
                if tables.all_dense:
                    return
            weighted = lookup.per_sample_weights is not None
            kept = CarryLayout.of(lookup.spec, plan.config, n, lookup.batch, weighted).view(carry)
            self._update(lookup, tables, grad, training, kept)

    def _update(
        self, lookup: Lookup, tables: DeviceTables, grad: torch.Tensor, training: Training, carry: Carry
    ) -> None:
        from .update import Update

        Update(lookup, tables, grad, training, carry).launch()

    def row_gradients(
        self, lookup: Lookup, grad: torch.Tensor, carry: torch.Tensor
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        from .row_gradients import row_gradients

        tables, grad = device_tables(lookup), grad.contiguous()
        with on_device(grad):
            weighted, n = lookup.per_sample_weights is not None, lookup.indices.numel()
            kept = CarryLayout.of(lookup.spec, lookup.plan.config, n, lookup.batch, weighted).view(carry)
            return row_gradients(lookup, tables, grad, kept)

    def per_sample_weight_grad(self, lookup: Lookup, grad: torch.Tensor) -> torch.Tensor:
        from . import launch

        out = torch.zeros(lookup.indices.numel(), dtype=torch.float32, device=grad.device)
        if not out.numel():
            return out
        tables = device_tables(lookup)
        with on_device(out):
            for shape, features in zip(tables.forward_shapes, tables.forward, strict=True):
                launch.weight_grad(lookup, shape, features, grad.contiguous(), out)
        return out


def _dense(lookup: Lookup) -> bool:
    weighted = lookup.per_sample_weights is not None
    return takes_dense_tier(lookup.spec, lookup.indices.numel(), lookup.batch, weighted, lookup.plan.config)


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """The tensor's GPU as the current one: launches go there, whatever the caller's current device is."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)


_NOTHING = nullcontext()
