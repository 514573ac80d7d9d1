"""Operators to compare, behind one protocol, and how names given on the command line become them.

An ``Implementation`` says whether it can run and builds a ``Built`` operator; a ``Built`` has its tables and
optimizer state as views, so that every operator starts from the same values and is checked the same way. One
is built at a time: two copies of the largest workload would not fit on a device.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tbe.bench.errors import SelectionError
from tbe.bench.inputs import Inputs
from tbe.bench.workloads import Workload

OURS = "ours"

WEIGHT_STD = 0.01
# Of the order of one batch's mean squared gradient, and not zero: an operator that overwrites the state
# instead of adding to it, or steps from a zero state, then differs visibly.
STATE_HIGH = 1e-6


class Built(Protocol):
    """An operator of one workload on one device, holding its tables."""

    detail: str  # what it chose to run with, for the record

    def tables(self) -> list[Tensor]:
        """Views of the weights, [rows, dim] each, in table order."""

    def states(self) -> list[list[Tensor]]:
        """Views of a table's optimizer states, fp32 [rows] or [rows, dim], in the order of its ``STATE``."""

    def forward(self, inputs: Inputs) -> Tensor:
        """Pooled output, [B, sum of dims]."""

    def backward(self, out: Tensor, grad: Tensor) -> None:
        """Back-propagate ``grad`` and step every touched row."""


class Implementation(Protocol):
    """One way to compute the operator."""

    @property
    def name(self) -> str:
        """How the command line and the database call it."""

    @property
    def ours(self) -> bool:
        """Whether it is this library: peers are what ours are compared with."""

    def version(self) -> str:
        """Version of the package behind it, or '' when it cannot be had."""

    def unavailable(self, device: torch.device) -> str | None:
        """Why it cannot run on ``device`` at all; None when it can."""

    def unsupported(self, workload: Workload) -> str | None:
        """Why it cannot run ``workload``; None when it can, as far as is known before building."""

    def build(self, workload: Workload, device: torch.device) -> Built:
        """Allocate the operator; its weights are uninitialised until ``load``."""


@torch.no_grad()
def load(built: Built, seed: int) -> None:
    """Fill tables and state in place with the values that ``seed`` names, the same for every implementation:
    weights normal(0, 0.01), state uniform [0, 1e-6)."""
    for number, (table, states) in enumerate(zip(built.tables(), built.states(), strict=True)):
        generator = torch.Generator(table.device).manual_seed(seed * 10_007 + number)
        table.normal_(0.0, WEIGHT_STD, generator=generator)
        for state in states:
            state.uniform_(0.0, STATE_HIGH, generator=generator)


class _OursBuilt:
    def __init__(self, emb: Any) -> None:
        self._emb = emb
        self.detail = str(emb.plan)

    def tables(self) -> list[Tensor]:
        return list(self._emb.split_embedding_weights())

    def states(self) -> list[list[Tensor]]:
        return [list(state.values()) for state in self._emb.split_optimizer_states()]

    def forward(self, inputs: Inputs) -> Tensor:
        out: Tensor = self._emb(inputs.indices, inputs.offsets, inputs.per_sample_weights)
        return out

    def backward(self, out: Tensor, grad: Tensor) -> None:
        torch.autograd.backward(out, grad)


@dataclass
class Ours:
    """This library: the backend that its policy picks, or the one named by ``backend``."""

    backend: str | None = None
    ours: bool = True

    @property
    def name(self) -> str:
        """``ours``, or ``ours:triton`` for a named backend."""
        return OURS if self.backend is None else f"{OURS}:{self.backend}"

    def version(self) -> str:
        return package_version("portable-tbe")

    def unavailable(self, device: torch.device) -> str | None:
        if self.backend is None:
            return None
        return backend_reasons(device).get(self.backend)

    def unsupported(self, workload: Workload) -> str | None:
        return None  # the module itself refuses with every backend's reasons

    def build(self, workload: Workload, device: torch.device) -> Built:
        import tbe

        shapes = zip(workload.rows, workload.dims, strict=True)
        emb = tbe.TableBatchedEmbeddingBags(
            [tbe.Table(f"t{number}", rows, dim) for number, (rows, dim) in enumerate(shapes)],
            pooling=workload.pooling,
            optimizer=workload.optimizer,
            weights_dtype=workload.weights_dtype,
            output_dtype=workload.output_dtype,
            bounds_check=workload.bounds_check,
            backend=self.backend,
            device=device,
        )
        return _OursBuilt(emb)


def backend_reasons(device: torch.device) -> dict[str, str | None]:
    """Our backends by name, with the reason when one cannot be used on ``device``."""
    import tbe

    return {backend.name: backend.unavailable for backend in tbe.backends(device)}


def package_version(*names: str) -> str:
    """Version of the first installed distribution of ``names``; '' when none is."""
    from importlib.metadata import PackageNotFoundError, version

    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def resolve(text: str, device: torch.device) -> list[Implementation]:
    """``"ours,fbgemm"`` to implementations, in the order given and each once.

    Names: ``ours`` (the backend that the policy picks), ``ours:all`` (each backend usable on ``device``),
    ``ours:NAME`` (one backend, also when unusable: it is then recorded with its reason), ``fbgemm``,
    ``torch``, and ``all`` for ``ours:all,fbgemm,torch``. Raises ``SelectionError`` listing them.
    """
    from tbe.bench.peers import peers

    others = {peer.name: peer for peer in peers()}
    parts = [part.strip() for part in text.split(",") if part.strip()]
    named = any(part == "all" or part.startswith(f"{OURS}:") for part in parts)
    reasons = backend_reasons(device) if named else {}
    every = [f"{OURS}:{name}" for name, reason in reasons.items() if reason is None]
    groups = {"all": [*every, *others], f"{OURS}:all": every}
    chosen: dict[str, Implementation] = {}
    for name in (name for part in parts for name in groups.get(part, [part])):
        if name == OURS:
            chosen[name] = Ours()
        elif name.startswith(f"{OURS}:") and name.partition(":")[2] in reasons:
            chosen[name] = Ours(name.partition(":")[2])
        elif name in others:
            chosen[name] = others[name]
        else:
            backends = [f"{OURS}:{backend}" for backend in reasons] or [f"{OURS}:BACKEND"]
            valid = ", ".join([OURS, f"{OURS}:all", *backends, *others, "all"])
            raise SelectionError(f"unknown implementation {name}; valid: {valid}")
    if not chosen:
        raise SelectionError("no implementation named")
    return list(chosen.values())


def failure_types() -> tuple[type[Exception], ...]:
    """What an operator may raise that is recorded as its failure instead of ending the run.

    Out of memory and CUDA errors are RuntimeErrors, refusals of an argument the other built-in ones; Triton's
    compile errors derive from Exception alone, and exist only once Triton is loaded.
    """
    import tbe

    types: list[type[Exception]] = [RuntimeError, ValueError, TypeError, AssertionError, MemoryError]
    types += [NotImplementedError, ImportError, tbe.BackendError]
    triton_errors = sys.modules.get("triton.errors")
    if triton_errors is not None:
        types.append(triton_errors.TritonError)
    return tuple(types)


def is_refusal(error: Exception) -> bool:
    """Whether our library says that no backend serves the problem, as opposed to one failing at it."""
    import tbe

    return isinstance(error, tbe.BackendError)
