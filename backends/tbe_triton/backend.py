"""The host side: from a lookup to launches. Triton is imported at the first call, not before."""

from __future__ import annotations

import torch
from packaging.version import Version

from tbe_core import Capabilities, DeviceConfig, Lookup, Problem, Training, route

from . import configs, sort
from .shapes import MAX_DIM, device_tables, forward_shapes

MIN_TRITON = Version("3.6")
OPTIMIZERS = ("sgd", "rowwise_adagrad")
"""Optimizers with a device function in kernels/row_updates.py."""


class TritonBackend:
    """Forward, exact fused update and per-sample-weight gradient in portable Triton."""

    name = "triton"

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
        config = configs.config_for(caps)
        radix = sort.radix_unavailable(caps)
        notes = (
            f"tiers: short runs in one program, long runs fused up to {config.fused_programs} programs, "
            "else split",
            "sort: radix sort of cuda-cccl" if radix is None else f"sort: torch.sort, since {radix}",
        )
        return config, notes

    def count_bad(self, lookup: Lookup, bad: torch.Tensor) -> None:
        from . import launch

        launch.check(lookup, device_tables(lookup.spec, lookup.plan.config, bad.device), bad)

    def forward(self, lookup: Lookup) -> torch.Tensor:
        from . import launch

        spec, device = lookup.spec, lookup.weights.device
        tables = device_tables(spec, lookup.plan.config, device)
        pooled = spec.pooling != "none"
        height = lookup.batch if pooled else lookup.indices.numel()
        out = torch.empty(height, spec.output_width, dtype=spec.output_dtype, device=device)
        if not out.numel():
            return out
        if not pooled:
            keys, _, _ = launch.linearise(lookup, tables, 0)
            launch.forward_rows(lookup, keys, out)
            return out
        for shape, features in zip(forward_shapes(spec.layout, lookup.plan.config), tables.forward, strict=True):
            launch.forward_pool(lookup, shape, features, out)
        return out

    def backward_update(self, lookup: Lookup, grad: torch.Tensor, training: Training) -> None:
        from . import launch

        n = lookup.indices.numel()
        if not n:
            return
        plan, spec = lookup.plan, lookup.spec
        tables = device_tables(spec, plan.config, lookup.weights.device)
        chosen = route(n, plan.config, plan.caps)
        slots = chosen.programs + len(spec.layout.groups)
        keys, values, counters = launch.linearise(lookup, tables, slots + 1)
        radix = sort.radix_unavailable(plan.caps) is None
        bits = spec.layout.total_rows.bit_length()
        keys, values = sort.sort_pairs(keys, values, bits, radix)
        launch.update(lookup, tables, grad.contiguous(), training, keys, values, counters, chosen)

    def per_sample_weight_grad(self, lookup: Lookup, grad: torch.Tensor) -> torch.Tensor:
        from . import launch

        out = torch.zeros(lookup.indices.numel(), dtype=torch.float32, device=grad.device)
        if not out.numel():
            return out
        tables = device_tables(lookup.spec, lookup.plan.config, grad.device)
        shapes = forward_shapes(lookup.spec.layout, lookup.plan.config)
        for shape, features in zip(shapes, tables.forward, strict=True):
            launch.weight_grad(lookup, shape, features, grad.contiguous(), out)
        return out
