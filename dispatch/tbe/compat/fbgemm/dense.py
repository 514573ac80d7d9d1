"""FBGEMM_GPU's dense module over this library's operator: the tables are a parameter with a dense gradient.

The gradient is made by the fused update itself: one exact SGD step with lr = -1 on tables of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tbe import ops, policy, vbe_ops
from tbe.options import mask_gradient
from tbe_core import Layout, Lookup, Spec, Training
from tbe_core.optimizers import SGD
from tbe_core.validate import check_inputs

from . import arguments, inputs, state
from .enums import EmbeddingLocation, PoolingMode, SparseType, member

STRUCTURE = ("D_offsets", "feature_dims", "hash_size_cumsum", "weights_offsets")
"""Entries of a dense module's checkpoint besides ``weights``."""


def to_storage(layout: Layout, value: torch.Tensor) -> torch.Tensor:
    """From tables one after another to this library's order: the same tensor where the orders agree."""
    if state.in_order(layout, "element"):
        return value
    storage = value.new_zeros(layout.total_elements)
    for table, base, piece in zip(
        layout.tables, layout.element_bases, state.unflatten(layout, "element", value), strict=True
    ):
        storage[base : base + table.rows * table.dim] = piece.flatten()
    return storage


def from_storage(layout: Layout, storage: torch.Tensor) -> torch.Tensor:
    """The inverse of ``to_storage``."""
    views = [
        storage[base : base + table.rows * table.dim]
        for table, base in zip(layout.tables, layout.element_bases, strict=True)
    ]
    return state.flat(layout, "element", storage, views)


class DenseLookup(torch.autograd.Function):
    """Pooled rows; the backward makes the gradient of all tables at once."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: torch.Tensor,
        per_sample_weights: torch.Tensor | None,
        spec: Spec,
        indices: torch.Tensor,
        offsets: torch.Tensor,
    ) -> torch.Tensor:
        ctx.spec = spec
        ctx.save_for_backward(weights, indices, offsets, per_sample_weights)
        backend, lookup = _lookup(spec, to_storage(spec.layout, weights), indices, offsets, per_sample_weights)
        out: torch.Tensor = backend.forward(lookup, False)[0]
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        spec: Spec = ctx.spec
        weights, indices, offsets, per_sample_weights = ctx.saved_tensors
        of_weights = of_samples = None
        if ctx.needs_input_grad[1]:
            storage = to_storage(spec.layout, weights)
            backend, lookup = _lookup(spec, storage, indices, offsets, per_sample_weights)
            of_samples = backend.per_sample_weight_grad(lookup, grad).to(per_sample_weights.dtype)
        if ctx.needs_input_grad[0]:
            zeros = torch.zeros(spec.layout.total_elements, dtype=torch.float32, device=weights.device)
            summing = replace(spec, weights_dtype=torch.float32)
            backend, lookup = _lookup(summing, zeros, indices, offsets, per_sample_weights)
            minus = torch.full((1,), -1.0, dtype=torch.float32, device=weights.device)
            backend.backward_update(lookup, grad, Training((), minus), backend.prepare(lookup))
            of_weights = from_storage(spec.layout, zeros).to(weights.dtype)
        return of_weights, of_samples, None, None, None


def _lookup(
    spec: Spec,
    storage: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
) -> tuple[Any, Lookup]:
    weighted = per_sample_weights is not None
    backend, plan = policy.backend_for(
        spec, storage.device, indices.dtype, offsets.dtype, weighted, policy.request(None)
    )
    samples = None if per_sample_weights is None else per_sample_weights.detach()
    return backend, Lookup(spec, plan, storage.detach(), indices, offsets, samples)


class DenseTableBatchedEmbeddingBagsCodegen(nn.Module):
    """``fbgemm_gpu``'s module of this name: tables as one parameter, for an optimizer of the user's.

    Args:
        embedding_specs: ``(rows, dim)`` a table, any dim >= 1.
        feature_table_map: T table numbers, one a feature. Default: one feature a table.
        use_cpu: tables on the CPU, else on the current CUDA device.

    Raises:
        NotImplementedError: an argument asks for what is not provided; the message names it and its value.
        ValueError: an argument is wrong; likewise.

    ``weights`` holds the tables one after another, standard normal at first. Where their dims differ, a call
    copies it into this library's order. Ids are not checked, as in FBGEMM_GPU; -1 is a pruned id.
    """

    def __init__(
        self,
        embedding_specs: Sequence[tuple[int, int]],
        feature_table_map: Sequence[int] | None = None,
        weights_precision: Any = SparseType.FP32,
        pooling_mode: Any = PoolingMode.SUM,
        use_cpu: bool = False,
        output_dtype: Any = SparseType.FP32,
        use_mtia: bool = False,
    ) -> None:
        super().__init__()
        if use_mtia:
            raise arguments.refuse("use_mtia", use_mtia, "there are no kernels for it", "False")
        tables = arguments.sized(None, embedding_specs)
        layout = Layout.make(tables, arguments.checked_map(feature_table_map, len(tables)))
        pooling = arguments.POOLING[member(PoolingMode, "pooling_mode", pooling_mode)]
        dtype = arguments.dtype_of("weights_precision", weights_precision)
        out = arguments.dtype_of("output_dtype", output_dtype)
        self.spec = Spec(layout, SGD(), pooling, dtype, out, "none")
        self.embedding_specs, self.pooling_mode = list(embedding_specs), pooling_mode
        self.weights_precision, self.use_cpu = weights_precision, use_cpu
        self.output_dtype = member(SparseType, "output_dtype", output_dtype).as_int()
        self.total_D, self.max_D = layout.output_width, max(table.dim for table in tables)
        where = torch.device("cpu") if use_cpu else torch.device("cuda", torch.cuda.current_device())
        self.current_device = where
        policy.plan_for(self.spec.problem(), where, policy.request(None))
        length = state.starts(layout, "element")[-1]
        self.weights = nn.Parameter(torch.randn(length, device=where, dtype=dtype))
        location = EmbeddingLocation.HOST if use_cpu else EmbeddingLocation.DEVICE
        described = state.structure(layout, self.spec.optimizer, dtype, location)
        for name in STRUCTURE:
            value = described[name]
            self.register_buffer(name, value if name == "feature_dims" else value.to(where))

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
        feature_requires_grad: torch.Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
    ) -> torch.Tensor:
        """Look up and pool; the arguments and the output are those of the fused module.

        Raises:
            ValueError: an input is wrong.
        """
        spec, sizes = self.spec, batch_size_per_feature_per_rank
        indices, offsets, samples = inputs.cast(indices, offsets, per_sample_weights, indices.dtype)
        flatten = None
        if sizes is not None:
            handle = ops.register(spec)
            offsets, flatten = vbe_ops.enter(handle, self.weights.device, indices, offsets, sizes, True)
        indices, offsets = indices.contiguous(), offsets.contiguous()
        indices, offsets, samples = inputs.without_lead(indices, offsets, samples, spec.pooling != "none")
        samples = None if samples is None else samples.contiguous()
        check_inputs(spec, self.weights.device, indices, offsets, samples)
        if feature_requires_grad is not None and samples is not None:
            samples = mask_gradient(spec, offsets, samples, feature_requires_grad)
        apply: Any = DenseLookup.apply
        out: torch.Tensor = apply(self.weights, samples, spec, indices, offsets)
        return out if flatten is None else flatten(out)

    def split_embedding_weights(self) -> list[torch.Tensor]:
        """The tables, ``[rows, dim]`` views in table order."""
        return state.unflatten(self.spec.layout, "element", self.weights.detach())

    @torch.no_grad()
    def init_embedding_weights_uniform(self, min_val: float, max_val: float) -> None:
        """Fill every table with uniform random numbers in ``[min_val, max_val)``."""
        for weight in self.split_embedding_weights():
            weight.uniform_(min_val, max_val)
