"""An operator that is right, and the same with one planted fault: what the gate itself is tested with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tbe.bench.implementations import Built
from tbe.bench.inputs import Inputs
from tbe.bench.workloads import Workload
from tbe_core.optimizers import RowwiseAdagrad

# Each fault, and which of the gate's checks must find it.
FAULTS = {
    "weights off by an ulp": "weights",
    "untouched rows": "weights",
    "dropped lookup": "forward",
    "dropped gradient": "weights",
    "stale state": "state",
    "overwritten state": "state",
    "not a number": "forward",
}


class PlantedBuilt:
    """The operator in fp64, rounded once, for CPU tensors; ``fault`` spoils it in one way."""

    detail = "fp64"

    def __init__(self, workload: Workload, fault: str) -> None:
        self.w, self.fault = workload, fault
        shapes = list(zip(workload.rows, workload.dims, strict=True))
        self._tables = [torch.empty(rows, dim, dtype=workload.weights_dtype) for rows, dim in shapes]
        self._states = [torch.empty(rows) for rows in workload.rows]

    def tables(self) -> list[Tensor]:
        return self._tables

    def states(self) -> list[list[Tensor]]:
        return [[state] for state in self._states]

    def _lookups(self, feature: int) -> tuple[Tensor, Tensor, Tensor]:
        offsets = self.inputs.offsets[feature * self.w.batch : (feature + 1) * self.w.batch + 1].long()
        lengths = offsets.diff()
        bags = torch.repeat_interleave(torch.arange(self.w.batch), lengths)
        scale = torch.ones(bags.numel(), dtype=torch.float64)
        if self.inputs.per_sample_weights is not None:
            scale = self.inputs.per_sample_weights[offsets[0] : offsets[-1]].double()
        scale = scale / lengths[bags] if self.w.pooling == "mean" else scale
        return self.inputs.indices[offsets[0] : offsets[-1]].long(), bags, scale

    def forward(self, inputs: Inputs) -> Tensor:
        self.inputs = inputs
        outs = []
        for feature, table in enumerate(self._tables):
            ids, bags, scale = self._lookups(feature)
            if self.fault == "dropped lookup":
                scale = scale.clone()
                scale[0] = 0
            out = torch.zeros(self.w.batch, table.shape[1], dtype=torch.float64)
            outs.append(out.index_add_(0, bags, table[ids].double() * scale.unsqueeze(1)))
        total = torch.cat(outs, 1).to(self.w.output_dtype)
        return total * torch.nan if self.fault == "not a number" else total

    def backward(self, out: Tensor, grad: Tensor) -> None:
        column = 0
        for feature, (table, state) in enumerate(zip(self._tables, self._states, strict=True)):
            ids, bags, scale = self._lookups(feature)
            dim = table.shape[1]
            terms = grad[:, column : column + dim].double()[bags] * scale.unsqueeze(1)
            column += dim
            if self.fault == "dropped gradient":
                terms[(ids == ids.mode()[0]).nonzero()[0]] = 0
            g = torch.zeros(table.shape, dtype=torch.float64).index_add_(0, ids, terms)
            rows = torch.unique(ids)
            kept = 0.0 if self.fault == "overwritten state" else state[rows].double()
            sums = kept + g[rows].square().mean(1)
            if self.fault != "stale state":
                state[rows] = sums.float()
            assert isinstance(self.w.optimizer, RowwiseAdagrad)
            rate = self.w.optimizer.lr / (sums.sqrt() + self.w.optimizer.eps)
            new = table[rows].double() - rate.unsqueeze(1) * g[rows]
            if self.fault == "weights off by an ulp":
                new = new * (1 + torch.finfo(table.dtype).eps)
            table[rows] = new.to(table.dtype)
            if self.fault == "untouched rows":
                table.mul_(1 + torch.finfo(table.dtype).eps)
                table[rows] = new.to(table.dtype)


@dataclass
class Planted:
    """An implementation of it; ``broken`` fails to build and ``refused_pooling`` is unsupported."""

    name: str = "ours"
    fault: str = ""
    ours: bool = True
    broken: bool = False
    refused_pooling: str = ""

    def version(self) -> str:
        return "1"

    def unavailable(self, device: torch.device) -> str | None:
        return None if device.type == "cpu" else "for CPU tensors only"

    def unsupported(self, workload: Workload) -> str | None:
        pooling = workload.pooling
        return f"no {pooling} pooling" if pooling == self.refused_pooling else None

    def build(self, workload: Workload, device: torch.device) -> Built:
        if self.broken:
            raise RuntimeError("out of memory\nwith a long tail")
        return PlantedBuilt(workload, self.fault)
