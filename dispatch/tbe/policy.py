"""Which backend the user asked for, and the plans that follow; kept, so that a call looks one up."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from tbe_core import (
    Absent,
    Backend,
    BackendError,
    Capabilities,
    DeviceConfig,
    Lookup,
    Plan,
    Policy,
    Problem,
    QuantizedLookup,
    QuantizedSpec,
    Spec,
    choose,
)

from . import environment, probe, registry

logger = logging.getLogger("tbe")

_context: list[str] = []


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use backend ``name`` for lookups in this block, unless a module was made with its own ``backend=``.

    Process-wide, so that autograd's threads see it. Raises ``BackendError`` for an unknown name.
    """
    if name not in registry.names():
        raise BackendError(f"use_backend({name!r}): expected one of {', '.join(registry.names())}")
    _context.append(name)
    try:
        yield
    finally:
        _context.pop()


def request(own: str | None) -> str:
    """What is asked for now, as ``source|name``; ``""`` leaves the choice to the library.

    Order: the module's ``backend=``, ``use_backend``, ``TBE_BACKEND``. A string, so that an operator's schema
    can carry it from forward to backward.
    """
    if own is not None:
        return f"backend=|{own}"
    if _context:
        return f"use_backend=|{_context[-1]}"
    asked = environment.backend()
    return "" if asked is None else f"TBE_BACKEND=|{asked}"


# What torch.compiler.assume_constant_result does, without its import of all of dynamo (and Triton).
request.__dict__["_dynamo_marked_constant"] = True


def _log(plan: Plan) -> None:
    """With TBE_LOG a plan is shown even where the program has not configured logging; else it is a detail."""
    if not environment.log():
        logger.debug("%s", plan)
        return
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    logger.info("%s", plan)


@lru_cache(maxsize=1024)
def _plan(problem: Problem, caps: Capabilities, asked: str, disabled: frozenset[str]) -> Plan:
    source, _, name = asked.partition("|")
    policy = Policy(name or None, source, disabled)
    plan = choose(problem, caps, registry.load_for(caps), policy)
    _log(plan)
    return plan


def plan_for(problem: Problem, device: torch.device, asked: str) -> Plan:
    """The plan for ``problem`` on ``device``; raises ``BackendError`` with every reason."""
    return plan_on(problem, probe.capabilities(device), asked)


def plan_on(problem: Problem, caps: Capabilities, asked: str) -> Plan:
    """The plan on a device of which only the facts are at hand."""
    plan = _plan(problem, caps, asked, environment.disabled())
    return plan if _override is None else replace(plan, config=_override, notes=("a configuration on trial",))


_fast: dict[tuple[object, ...], tuple[Backend, Plan]] = {}
_override: DeviceConfig | None = None


@contextlib.contextmanager
def override_config(config: DeviceConfig) -> Iterator[None]:
    """Run lookups in this block with ``config`` whatever the device's own is: for ``tbe tune``. Process-wide.

    A lookup's backward must run in the block of its forward.
    """
    global _override
    before, _override = _override, config
    try:
        yield
    finally:
        _override = before
        for key in [key for key in _fast if key[-1] == config]:
            del _fast[key]


def backend_for(
    spec: Spec | QuantizedSpec,
    device: torch.device,
    index_dtype: torch.dtype,
    offset_dtype: torch.dtype,
    weighted: bool,
    asked: str,
) -> tuple[Backend, Plan]:
    """The backend and plan of a call. The host's time is spent here on every call: one dictionary lookup."""
    disabled = environment.disabled()
    interpret = environment.triton_interpret()
    key = (spec.handle, device, index_dtype, offset_dtype, weighted, asked, disabled, interpret, _override)
    found = _fast.get(key)
    if found is None:
        plan = plan_for(spec.problem(index_dtype, offset_dtype, weighted), device, asked)
        backend = registry.load(plan.backend)
        if isinstance(backend, Absent):
            raise BackendError(f"{plan.backend}: {backend.reason}")
        found = _fast[key] = (backend, plan)
    return found


def lookup_for(
    spec: Spec | QuantizedSpec,
    weights: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    asked: str,
) -> tuple[Backend, Any]:
    """The backend of a call, and the ``Lookup`` or ``QuantizedLookup`` that it takes."""
    backend, plan = backend_for(
        spec, weights.device, indices.dtype, offsets.dtype, per_sample_weights is not None, asked
    )
    kind: Any = QuantizedLookup if isinstance(spec, QuantizedSpec) else Lookup
    return backend, kind(spec, plan, weights, indices, offsets, per_sample_weights)


def settle() -> None:
    """Wait for what backends build in the background, such as NVIDIA's radix sort on its first use.

    Steps before that are right, only slower. Worth a call after the first step and before a CUDA graph is
    captured or time is measured.
    """
    for backend, _ in list(_fast.values()):
        backend.settle()


@dataclass(frozen=True)
class BackendStatus:
    """A backend on one device."""

    name: str
    unavailable: str | None
    """Why it cannot run there, or None."""
    preference: int


def backends(device: torch.device | str = "cpu") -> list[BackendStatus]:
    """Every known backend and whether it can run on ``device``."""
    return backends_on(probe.capabilities(device))


def backends_on(caps: Capabilities) -> list[BackendStatus]:
    """Every known backend and whether it can run on a device of these facts."""
    found = []
    for backend in registry.load_for(caps):
        if isinstance(backend, Absent):
            found.append(BackendStatus(backend.name, backend.reason, -1))
        elif backend.name in environment.disabled():
            found.append(BackendStatus(backend.name, "disabled by TBE_DISABLE", -1))
        else:
            found.append(BackendStatus(backend.name, backend.unavailable(caps), backend.preference(caps)))
    return found
