"""Operators of other projects, imported only when asked about: FBGEMM's TBE and torch.nn.EmbeddingBag."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tbe.bench.implementations import Built, Implementation, package_version
from tbe.bench.inputs import Inputs
from tbe.bench.workloads import Workload, dtype_name
from tbe_core.optimizers import RowwiseAdagrad

_FBGEMM_MODULE = "fbgemm_gpu.split_table_batched_embeddings_ops_training"
_FBGEMM_COMMON = "fbgemm_gpu.split_table_batched_embeddings_ops_common"
_FBGEMM_CONFIGS = "fbgemm_gpu.split_embedding_configs"
_SPARSE_TYPES = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}
_FBGEMM_OPTIMIZERS = {
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
    "adam": "ADAM",
    "partial_rowwise_adam": "PARTIAL_ROWWISE_ADAM",
}
_BOUNDS_CHECKS = {"none": "NONE", "warn": "WARNING", "ignore": "IGNORE", "error": "FATAL"}


def peers() -> list[Implementation]:
    """Every peer, whether or not it is installed."""
    return [Fbgemm(), TorchEmbeddingBag()]


class _FbgemmBuilt:
    def __init__(self, emb: Any, workload: Workload, bounds_check: str) -> None:
        self._emb, self._workload = emb, workload
        optimizer = _FBGEMM_OPTIMIZERS[workload.optimizer.NAME]
        self.detail = f"SplitTableBatchedEmbeddingBagsCodegen, {optimizer}, {bounds_check}"

    def tables(self) -> list[Tensor]:
        return list(self._emb.split_embedding_weights())

    def states(self) -> list[list[Tensor]]:
        kinds = self._workload.optimizer.STATE
        return [
            [
                state.view(-1) if kind.kind == "row" else state.view(-1, dim)
                for kind, state in zip(kinds, states, strict=True)
            ]
            for dim, states in zip(self._workload.dims, self._emb.split_optimizer_states(), strict=True)
        ]

    def forward(self, inputs: Inputs) -> Tensor:
        weights = inputs.per_sample_weights
        out: Tensor = self._emb(inputs.indices, inputs.offsets, per_sample_weights=weights)
        return out

    def backward(self, out: Tensor, grad: Tensor) -> None:
        torch.autograd.backward(out, grad)


@dataclass
class Fbgemm:
    """FBGEMM_GPU's table-batched embedding with its fused optimizer: tables in device memory, no
    cache, no stochastic rounding, the bounds check that the workload asks for. On the CPU its CPU operator."""

    name: str = "fbgemm"
    ours: bool = False
    _missing: str | None = field(default=None, repr=False)

    def version(self) -> str:
        return package_version("fbgemm-gpu", "fbgemm-gpu-genai", "fbgemm-gpu-cpu", "fbgemm-gpu-nightly")

    def unavailable(self, device: torch.device) -> str | None:
        try:
            importlib.import_module(_FBGEMM_MODULE)
        except (ImportError, OSError, RuntimeError) as error:
            # A build for another torch or CUDA fails as OSError or RuntimeError when its library is loaded.
            return f"fbgemm_gpu cannot be imported: {error}".splitlines()[0]
        return None

    def unsupported(self, workload: Workload) -> str | None:
        if workload.optimizer.NAME not in _FBGEMM_OPTIMIZERS:
            return f"optimizer {workload.optimizer.NAME} is not compared, only {', '.join(_FBGEMM_OPTIMIZERS)}"
        odd = sorted({dim for dim in workload.dims if dim % 4})
        return f"dims must be multiples of 4, got {odd}" if odd else None

    def build(self, workload: Workload, device: torch.device) -> Built:
        training, common = importlib.import_module(_FBGEMM_MODULE), importlib.import_module(_FBGEMM_COMMON)
        sparse_type = importlib.import_module(_FBGEMM_CONFIGS).SparseType
        location = common.EmbeddingLocation.DEVICE if device.type == "cuda" else common.EmbeddingLocation.HOST
        compute = training.ComputeDevice.CUDA if device.type == "cuda" else training.ComputeDevice.CPU
        bounds_check = getattr(common.BoundsCheckMode, _BOUNDS_CHECKS[workload.bounds_check])
        shapes = zip(workload.rows, workload.dims, strict=True)
        types = importlib.import_module(_FBGEMM_CONFIGS).EmbOptimType
        optimizer = workload.optimizer
        hyper = dict(zip(optimizer.HYPER, optimizer.hyper_values(), strict=True))
        hyper["learning_rate"] = hyper.pop("lr")
        hyper = {name: value for name, value in hyper.items() if name != "max_norm"}
        emb = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, location, compute) for rows, dim in shapes],
            optimizer=getattr(types, _FBGEMM_OPTIMIZERS[optimizer.NAME]),
            **hyper,
            weights_precision=getattr(sparse_type, _SPARSE_TYPES[workload.weights_dtype]),
            output_dtype=getattr(sparse_type, _SPARSE_TYPES[workload.output_dtype]),
            pooling_mode=getattr(common.PoolingMode, workload.pooling.upper()),
            bounds_check_mode=bounds_check,
            stochastic_rounding=False,
            device=device,
        )
        return _FbgemmBuilt(emb, workload, f"BoundsCheckMode.{bounds_check.name}")


class _TorchBuilt:
    detail = "nn.functional.embedding_bag(sparse=True) a table, then row-wise Adagrad on the coalesced gradient"

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._workload = workload
        shapes = zip(workload.rows, workload.dims, strict=True)
        self._bags = [
            torch.nn.EmbeddingBag(
                *(rows, dim),
                mode=workload.pooling,
                sparse=True,
                include_last_offset=True,
                _weight=torch.empty(rows, dim, dtype=workload.weights_dtype, device=device),
            )
            for rows, dim in shapes
        ]
        self._sums = [torch.empty(rows, device=device) for rows in workload.rows]

    def tables(self) -> list[Tensor]:
        return [bag.weight.detach() for bag in self._bags]

    def states(self) -> list[list[Tensor]]:
        return [[total] for total in self._sums]

    def forward(self, inputs: Inputs) -> Tensor:
        batch, outs = self._workload.batch, []
        for feature, bag in enumerate(self._bags):
            # The whole index array with absolute offsets would make each table skip the others' lookups, so a
            # feature's slice is taken: this costs a host read, as it does in a model built of EmbeddingBags.
            offsets = inputs.offsets[feature * batch : (feature + 1) * batch + 1]
            begin, end = int(offsets[0]), int(offsets[-1])
            weights = inputs.per_sample_weights
            outs.append(
                bag(
                    inputs.indices[begin:end],
                    offsets - begin,
                    per_sample_weights=None if weights is None else weights[begin:end],
                )
            )
        return torch.cat(outs, dim=1)

    def backward(self, out: Tensor, grad: Tensor) -> None:
        torch.autograd.backward(out, grad)
        with torch.no_grad():
            for bag, total in zip(self._bags, self._sums, strict=True):
                self._step(bag.weight, total)

    def _step(self, weight: Tensor, total: Tensor) -> None:
        assert weight.grad is not None
        gradient = weight.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        total.index_add_(0, rows, values.square().mean(dim=1))
        optimizer = self._workload.optimizer
        assert isinstance(optimizer, RowwiseAdagrad)
        scale = optimizer.lr / (total[rows].sqrt() + optimizer.eps)
        weight.index_add_(0, rows, values * scale.unsqueeze(1), alpha=-1.0)
        weight.grad = None


@dataclass
class TorchEmbeddingBag:
    """``torch.nn.EmbeddingBag``, one a table, with the optimizer in torch operators: what one has without a
    fused operator."""

    name: str = "torch"
    ours: bool = False

    def version(self) -> str:
        return str(torch.__version__)

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def unsupported(self, workload: Workload) -> str | None:
        if not isinstance(workload.optimizer, RowwiseAdagrad):
            return f"its step is row-wise Adagrad's, not {workload.optimizer.NAME}'s"
        if workload.weighted and workload.pooling != "sum":
            return f"EmbeddingBag takes per-sample weights with sum only, not {workload.pooling}"
        if workload.bounds_check != "none":
            return f"EmbeddingBag has no bounds check {workload.bounds_check!r}"
        dtypes = {workload.weights_dtype, workload.output_dtype}
        if dtypes != {torch.float32}:
            names = f"{dtype_name(workload.weights_dtype)} to {dtype_name(workload.output_dtype)}"
            return f"EmbeddingBag sums and returns in the table's dtype: fp32 only, not {names}"
        return None

    def build(self, workload: Workload, device: torch.device) -> Built:
        return _TorchBuilt(workload, device)
