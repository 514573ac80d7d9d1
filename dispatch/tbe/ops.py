"""``torch.ops.tbe``: schemas, fake kernels and autograd of the operator.

The lookup is functional; its backward calls an update whose schema declares the tensors that it changes, so
that torch.compile sees the mutation. Tables are tensors without gradient; a zero-size hook that requires grad
makes autograd call the backward. ``spec`` is the handle of a ``Spec``, entered by ``register``.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from tbe_core import QuantizedBackend, QuantizedSpec, Spec, Training
from tbe_core.validate import check_index_values, check_inputs, check_offset_values

from . import policy
from .eager import SECOND_BACKWARD, clipped

_library = torch.library.Library("tbe", "DEF")
_library.define(
    "lookup(Tensor weights, Tensor[] states, Tensor hyper, Tensor? counter, Tensor hook, Tensor indices, "
    "Tensor offsets, Tensor? per_sample_weights, int spec, str backend, bool training) -> (Tensor, Tensor)"
)
_library.define(
    "backward_update(Tensor grad, Tensor(a!) weights, Tensor(b!)[] states, Tensor hyper, Tensor(c!)? counter, "
    "Tensor indices, Tensor offsets, Tensor? per_sample_weights, Tensor carry, int spec, str backend) -> ()"
)
_library.define(
    "per_sample_weight_grad(Tensor grad, Tensor weights, Tensor indices, Tensor offsets, "
    "Tensor per_sample_weights, int spec, str backend) -> Tensor"
)
_library.define(
    "quantized_lookup(Tensor weights, Tensor indices, Tensor offsets, Tensor? per_sample_weights, int spec, "
    "str backend) -> Tensor"
)
_library.define(
    "check(Tensor weights, Tensor indices, Tensor offsets, Tensor(a!) bad, int spec, str backend) -> ()"
)

_specs: dict[int, Spec] = {}
_quantized_specs: dict[int, QuantizedSpec] = {}


def register(spec: Spec) -> int:
    """Enter a spec; returns the handle that the operators take, the same in every process."""
    _specs[spec.handle] = spec
    return spec.handle


def register_quantized(spec: QuantizedSpec) -> int:
    """``register`` for read-only quantised tables."""
    _quantized_specs[spec.handle] = spec
    return spec.handle


def spec_of(handle: int) -> Spec:
    """The spec of a handle."""
    return _specs[handle]


def _lookup(
    weights: torch.Tensor,
    states: list[torch.Tensor],
    hyper: torch.Tensor,
    counter: torch.Tensor | None,
    hook: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    spec: int,
    backend: str,
    training: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, lookup = policy.lookup_for(_specs[spec], weights, indices, offsets, per_sample_weights, backend)
    found: tuple[torch.Tensor, torch.Tensor] = chosen.forward(lookup, training)
    return found


def _lookup_fake(
    weights: torch.Tensor,
    states: list[torch.Tensor],
    hyper: torch.Tensor,
    counter: torch.Tensor | None,
    hook: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    spec: int,
    backend: str,
    training: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    known, n = _specs[spec], indices.shape[0]
    weighted = per_sample_weights is not None
    chosen, plan = policy.backend_for(known, weights.device, indices.dtype, offsets.dtype, weighted, backend)
    # A compiled module leaves its own check out of the graph: here it runs once, when the graph is made.
    check_inputs(known, weights.device, indices, offsets, per_sample_weights)
    batch = (offsets.shape[0] - 1) // known.layout.features
    height = n if known.pooling == "none" else batch
    nbytes = chosen.carry_bytes(known, plan.config, n, batch, weighted) if training else 0
    return (
        weights.new_empty((height, known.output_width), dtype=known.output_dtype),
        weights.new_empty((nbytes,), dtype=torch.uint8),
    )


def _backward_update(
    grad: torch.Tensor,
    weights: torch.Tensor,
    states: list[torch.Tensor],
    hyper: torch.Tensor,
    counter: torch.Tensor | None,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    carry: torch.Tensor,
    spec: int,
    backend: str,
) -> None:
    # .data: a row step is no autograd event, and a module that is called twice before its backward must
    # not find its own saved tables "modified in place".
    chosen, lookup = policy.lookup_for(_specs[spec], weights.data, indices, offsets, per_sample_weights, backend)
    training = Training(tuple(s.data for s in states), hyper, None if counter is None else counter.data)
    training.advance()
    chosen.backward_update(lookup, grad, training, carry)


def _per_sample_weight_grad(
    grad: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor,
    spec: int,
    backend: str,
) -> torch.Tensor:
    chosen, lookup = policy.lookup_for(_specs[spec], weights, indices, offsets, per_sample_weights, backend)
    found: torch.Tensor = chosen.per_sample_weight_grad(lookup, grad)
    return found.to(per_sample_weights.dtype)


def check_values(spec: Spec | QuantizedSpec, indices: torch.Tensor, offsets: torch.Tensor) -> None:
    """What a call checks on the host, where ``bounds_check`` is not ``"none"``. Raises ``ValueError``."""
    if spec.bounds_check == "error" or indices.device.type == "cpu":
        check_offset_values(spec, offsets, indices.numel())
    if spec.bounds_check == "error":
        check_index_values(spec, indices, offsets)


def _check(
    weights: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    bad: torch.Tensor,
    spec: int,
    backend: str,
) -> None:
    known = _quantized_specs[spec] if spec in _quantized_specs else _specs[spec]
    check_values(known, indices, offsets)
    if known.bounds_check == "warn":
        chosen, lookup = policy.lookup_for(known, weights, indices, offsets, None, backend)
        chosen.count_bad(lookup, bad)


def quantized_lookup(
    weights: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    spec: int,
    backend: str,
) -> torch.Tensor:
    """What ``torch.ops.tbe.quantized_lookup`` runs; an eager call runs it without the dispatcher."""
    known = _quantized_specs[spec]
    chosen, lookup = policy.lookup_for(known, weights, indices, offsets, per_sample_weights, backend)
    # A backend without it is passed over by the plan.
    return cast(QuantizedBackend, chosen).forward_quantized(lookup)


def _quantized_lookup_fake(
    weights: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    spec: int,
    backend: str,
) -> torch.Tensor:
    known = _quantized_specs[spec]
    # For the plan's reasons, where no backend serves this call.
    policy.lookup_for(known, weights, indices, offsets, per_sample_weights, backend)
    check_inputs(known, weights.device, indices, offsets, per_sample_weights)
    batch = (offsets.shape[0] - 1) // known.layout.features
    height = indices.shape[0] if known.pooling == "none" else batch
    return weights.new_empty((height, known.output_width), dtype=known.output_dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    weights, states, hyper, counter, _, indices, offsets, per_sample_weights, spec, backend, training = inputs
    ctx.save_for_backward(weights, hyper, counter, indices, offsets, per_sample_weights, output[1], *states)
    ctx.spec, ctx.backend, ctx.training, ctx.consumed = spec, backend, training, False


def _backward(ctx: Any, grad: torch.Tensor, _: None) -> tuple[Any, ...]:
    if ctx.consumed:
        raise RuntimeError(SECOND_BACKWARD)
    weights, hyper, counter, indices, offsets, per_sample_weights, carry, *states = ctx.saved_tensors
    grad = clipped(_specs[ctx.spec], grad)
    weight_grad = None
    if per_sample_weights is not None and ctx.needs_input_grad[7]:
        weight_grad = torch.ops.tbe.per_sample_weight_grad(
            grad, weights, indices, offsets, per_sample_weights, ctx.spec, ctx.backend
        )
    if ctx.training:
        torch.ops.tbe.backward_update(
            grad,
            weights,
            states,
            hyper,
            counter,
            indices,
            offsets,
            per_sample_weights,
            carry,
            ctx.spec,
            ctx.backend,
        )
        ctx.consumed = True
    return None, [None] * len(states), None, None, None, None, None, weight_grad, None, None, None


_library.impl("lookup", _lookup, "CompositeExplicitAutograd")
_library.impl("backward_update", _backward_update, "CompositeExplicitAutograd")
_library.impl("per_sample_weight_grad", _per_sample_weight_grad, "CompositeExplicitAutograd")
_library.impl("check", _check, "CompositeExplicitAutograd")
torch.library.register_fake("tbe::lookup", _lookup_fake, lib=_library)
torch.library.register_fake("tbe::backward_update", lambda *args: None, lib=_library)
torch.library.register_fake(
    "tbe::per_sample_weight_grad",
    lambda grad, weights, indices, offsets, per_sample_weights, spec, backend: torch.empty_like(
        per_sample_weights
    ),
    lib=_library,
)
_library.impl("quantized_lookup", quantized_lookup, "CompositeExplicitAutograd")
torch.library.register_fake("tbe::quantized_lookup", _quantized_lookup_fake, lib=_library)
torch.library.register_fake("tbe::check", lambda *args: None, lib=_library)
torch.library.register_autograd("tbe::lookup", _backward, setup_context=_setup, lib=_library)
