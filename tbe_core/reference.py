"""The fp64 reference: loops over bags and rows, written to be read, shared with nothing that it judges."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .optimizers import Hyper
from .spec import Spec


@dataclass
class Reference:
    """Tables and state in fp64, stepped by plain loops."""

    spec: Spec
    tables: list[torch.Tensor]
    """Per table ``[rows, dim]`` fp64."""
    states: list[dict[str, torch.Tensor]]
    """Per table: state name to ``[rows]`` or ``[rows, dim]`` fp64."""

    @classmethod
    def of(cls, spec: Spec, tables: list[torch.Tensor], states: list[dict[str, torch.Tensor]]) -> Reference:
        """A copy in fp64 on the CPU of what a module holds."""
        return cls(
            spec,
            [t.detach().cpu().double().clone() for t in tables],
            [{k: v.detach().cpu().double().clone() for k, v in s.items()} for s in states],
        )

    def _bags(self, indices: torch.Tensor, offsets: torch.Tensor) -> list[tuple[int, int, list[int]]]:
        """(feature, bag, positions) for every bag; ids that contribute nothing are left out of positions."""
        features = self.spec.layout.features
        batch = (offsets.numel() - 1) // features
        ends, ids = offsets.tolist(), indices.tolist()
        bags = []
        for feature in range(features):
            rows = self.spec.layout.feature_table(feature).rows
            for bag in range(batch):
                at = feature * batch + bag
                positions = [n for n in range(ends[at], ends[at + 1]) if 0 <= ids[n] < rows]
                bags.append((feature, bag, positions))
        return bags

    def _scale(self, weights: torch.Tensor | None, n: int, length: int) -> float:
        scale = 1.0 if weights is None else float(weights[n])
        return scale / length if self.spec.pooling == "mean" else scale

    def _lengths(self, offsets: torch.Tensor) -> list[int]:
        return [int(x) for x in offsets.cpu().diff()]

    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[B, sum of dims]`` fp64 (``[N, D]`` with pooling none)."""
        spec, layout = self.spec, self.spec.layout
        indices, offsets = indices.cpu(), offsets.cpu()
        weights = None if weights is None else weights.detach().cpu().double()
        batch = (offsets.numel() - 1) // layout.features
        none = spec.pooling == "none"
        out = torch.zeros(indices.numel() if none else batch, spec.output_width, dtype=torch.float64)
        lengths = self._lengths(offsets)
        for feature, bag, positions in self._bags(indices, offsets):
            table = self.tables[layout.feature_table_map[feature]]
            column, dim = layout.feature_columns[feature], layout.feature_dims[feature]
            for n in positions:
                row = table[int(indices[n])]
                if none:
                    out[n] = row
                else:
                    out[bag, column : column + dim] += row * self._scale(
                        weights, n, lengths[feature * batch + bag]
                    )
        return out

    def _clipped(self, grad: torch.Tensor) -> torch.Tensor:
        """In fp64; clipped at the limit as the gradient's dtype holds it."""
        limit = self.spec.gradient_clipping
        if limit is not None:
            held = float(torch.tensor(limit, dtype=torch.float64).to(grad.dtype))
            grad = torch.where(grad.abs() > held, grad.sign() * min(held, torch.finfo(grad.dtype).max), grad)
        return grad.detach().cpu().double()

    def _bag_grad(self, grad: torch.Tensor, feature: int, bag: int, n: int) -> torch.Tensor:
        if self.spec.pooling == "none":
            return grad[n]
        column, dim = self.spec.layout.feature_columns[feature], self.spec.layout.feature_dims[feature]
        return grad[bag, column : column + dim]

    def backward_update(
        self,
        grad: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        hyper_values: list[float],
        step: int = 1,
    ) -> list[list[int]]:
        """One step of every touched row, the operator's ``step``-th; returns the touched rows of each table.

        Nothing is rounded: a table's dtype and its rounding are not the reference's business.
        """
        layout, optimizer = self.spec.layout, self.spec.optimizer
        indices, offsets, grad = indices.cpu(), offsets.cpu(), self._clipped(grad)
        weights = None if weights is None else weights.detach().cpu().double()
        batch = (offsets.numel() - 1) // layout.features
        lengths = self._lengths(offsets)
        sums: list[dict[int, torch.Tensor]] = [{} for _ in layout.tables]
        for feature, bag, positions in self._bags(indices, offsets):
            table = layout.feature_table_map[feature]
            if table in self.spec.frozen:
                continue
            for n in positions:
                scale = self._scale(weights, n, lengths[feature * batch + bag])
                g = self._bag_grad(grad, feature, bag, n) * scale
                row = int(indices[n])
                sums[table][row] = sums[table][row] + g if row in sums[table] else g
        values = tuple(torch.tensor(v, dtype=torch.float64) for v in hyper_values)
        hyper = Hyper(values, optimizer.HYPER, torch.tensor(step))
        for table, by_row in enumerate(sums):
            for row, g in by_row.items():
                state = {k: v[row : row + 1] for k, v in self.states[table].items()}
                at = self.tables[table][row : row + 1]
                at.copy_(optimizer.step_rows(at.clone(), g[None], state, hyper))
        return [sorted(by_row) for by_row in sums]

    def per_sample_weight_grad(
        self, grad: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """``[N]`` fp64; 0 where the id contributes nothing."""
        layout = self.spec.layout
        indices, offsets, grad = indices.cpu(), offsets.cpu(), self._clipped(grad)
        batch = (offsets.numel() - 1) // layout.features
        lengths = self._lengths(offsets)
        out = torch.zeros(indices.numel(), dtype=torch.float64)
        for feature, bag, positions in self._bags(indices, offsets):
            table = self.tables[layout.feature_table_map[feature]]
            for n in positions:
                dot = torch.dot(table[int(indices[n])], self._bag_grad(grad, feature, bag, n))
                out[n] = dot * self._scale(None, n, lengths[feature * batch + bag])
        return out
