"""Tables as parameters with sparse gradients: what a module with ``NoOptimizer`` has in place of fused steps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tbe_core import Backend, Lookup

from . import policy
from .eager import clipped
from .options import wants_gradient

if TYPE_CHECKING:
    from .module import TableBatchedEmbeddingBags

ACCUMULATE = (
    "accumulate() of a module with NoOptimizer: expected backwards one after another, its gradients add up in "
    "`.grad` until the torch optimizer's zero_grad()"
)
DISPATCHED = (
    "a training call of a module with NoOptimizer under a dispatch mode: expected none, or torch.no_grad()"
)


class TableParameter(nn.Module):
    """One table as the parameter ``weight``, ``[rows, dim]``: a view of the module's storage.

    Its name is that of the table's entry in a checkpoint, which the module itself writes and reads.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(self, *args: Any) -> None:
        pass

    def __getstate__(self) -> dict[str, Any]:
        # A pickled view would take the whole storage along. The module links it again.
        weight = nn.Parameter(self.weight.new_empty(0), self.weight.requires_grad)
        return {**self.__dict__, "_parameters": {"weight": weight}}

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        # With the parameter, so that an optimizer that is copied along gets the same copy.
        made = TableParameter(self.weight.new_empty(0)).train(self.training)
        made.weight = copy.deepcopy(self.weight, memo)
        return made


def enter(module: TableBatchedEmbeddingBags) -> None:
    """Register every table of a new module as ``<table>.weight``."""
    for table, view in zip(module.spec.layout.tables, module.split_embedding_weights(), strict=True):
        # Not add_module, which refuses names that the module has otherwise: a table may be called "plan".
        module._modules[table.name] = TableParameter(view)


def parameters(module: TableBatchedEmbeddingBags) -> list[nn.Parameter]:
    """The tables' parameters, in table order."""
    modules: dict[str, Any] = module._modules
    return [modules[table.name].weight for table in module.spec.layout.tables]


@contextlib.contextmanager
def let_go(module: TableBatchedEmbeddingBags) -> Iterator[None]:
    """While the storage is moved: no table holds on to it, or would be moved by itself."""
    for parameter in parameters(module):
        parameter.data = parameter.data.new_empty(0)
    try:
        yield
    finally:
        link(module)


def link(module: TableBatchedEmbeddingBags) -> None:
    """After the storage was moved or copied: every parameter is its view again."""
    for parameter, view in zip(parameters(module), module.split_embedding_weights(), strict=True):
        parameter.data = view


def lookup_uncompiled(*args: Any) -> torch.Tensor:
    """``lookup`` from a module that is being compiled: the graph breaks here, and nothing below is traced."""
    why = "a sparse gradient has as many rows as the batch has distinct ids"
    out: torch.Tensor = torch.compiler.disable(lookup, reason=why)(*args)
    return out


def lookup(
    module: TableBatchedEmbeddingBags,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    asked: str,
) -> torch.Tensor:
    """An eager call, checked: its output, with a backward to the tables' parameters where they ask for it."""
    spec, tables = module.spec, parameters(module)
    backend, call = policy.lookup_for(spec, module.weights.data, indices, offsets, per_sample_weights, asked)
    trains = torch.is_grad_enabled() and any(tables[t].requires_grad for t in spec.trained)
    if not trains and not wants_gradient(per_sample_weights):
        return backend.forward(call, False)[0]
    apply: Any = SparseLookup.apply
    out: torch.Tensor = apply(per_sample_weights, call, backend, trains, *tables)
    return out


class SparseLookup(torch.autograd.Function):
    """Forward whose backward gives each table that asks for it a sparse gradient, coalesced."""

    @staticmethod
    def forward(
        ctx: Any,
        per_sample_weights: torch.Tensor | None,
        call: Lookup,
        backend: Backend,
        trains: bool,
        *tables: torch.Tensor,
    ) -> torch.Tensor:
        out, ctx.carry = backend.forward(call, trains)
        ctx.call, ctx.backend, ctx.trains = call, backend, trains
        # The rows make the weights' gradient: autograd then notices where an optimizer steps them before.
        rows = tables if ctx.needs_input_grad[0] else ()
        ctx.save_for_backward(call.indices, call.offsets, per_sample_weights, *rows)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, backend, per_sample_weights = ctx.call, ctx.backend, ctx.saved_tensors[2]
        grad, weight_grad = clipped(call.spec, grad), None
        if ctx.needs_input_grad[0]:
            weight_grad = backend.per_sample_weight_grad(call, grad).to(per_sample_weights.dtype)
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if ctx.trains:
            # A second backward through a kept graph: what the forward prepared has been used up.
            carry, ctx.carry = backend.prepare(call) if ctx.carry is None else ctx.carry, None
            found = backend.row_gradients(call, grad, carry)
        tables = call.spec.layout.tables
        of_tables = [
            _sparse(*found[t], (table.rows, table.dim)) if t in found and wanted else None
            for t, (table, wanted) in enumerate(zip(tables, ctx.needs_input_grad[4:], strict=True))
        ]
        return weight_grad, None, None, None, *of_tables


def _sparse(rows: torch.Tensor, values: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    # A copy: the tables' values are views of one buffer, which a kept gradient of one table would hold whole.
    return torch.sparse_coo_tensor(rows[None], values.clone(), size, is_coalesced=True, check_invariants=False)
