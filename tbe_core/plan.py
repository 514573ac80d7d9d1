"""Which backend serves a problem, and why not the others: a pure choice."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .config import DeviceConfig
from .types import Capabilities, Problem

if TYPE_CHECKING:
    from .backend import Backend


class BackendError(RuntimeError):
    """No backend, or not the one that was asked for, can serve the problem. The message has every reason."""


@dataclass(frozen=True)
class Policy:
    """What the user asked for. ``source`` says where, for messages."""

    backend: str | None = None
    source: str = "backend="
    disabled: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Rejection:
    """A backend that was passed over, with its reasons."""

    backend: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.backend}: {'; '.join(self.reasons)}"


@dataclass(frozen=True)
class Plan:
    """The backend that serves a problem on a device. ``str(plan)`` is the log line and the error text."""

    backend: str
    problem: Problem
    caps: Capabilities
    config: DeviceConfig
    notes: tuple[str, ...] = ()
    rejected: tuple[Rejection, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.backend} serves {self.problem} on {self.caps} [{self.config.source}]"]
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  passed over {rejection}" for rejection in self.rejected]
        return "\n".join(lines)


@dataclass(frozen=True)
class Absent:
    """A backend that was not loaded, with the reason."""

    name: str
    reason: str


def other_vendor(vendors: Collection[str], caps: Capabilities) -> str | None:
    """Why a backend for the devices of ``vendors`` alone cannot run on this one; None: it is one of theirs."""
    if {caps.vendor}.issubset(vendors):
        return None
    return f"for devices of {' and '.join(sorted(vendors))} only, and the vendor here is {caps.vendor}"


def reasons_against(
    backend: Backend | Absent, problem: Problem, caps: Capabilities, policy: Policy
) -> tuple[str, ...]:
    """Every reason why ``backend`` does not serve ``problem``; empty when it does."""
    if backend.name in policy.disabled:
        return ("disabled by TBE_DISABLE",)
    if isinstance(backend, Absent):
        return (backend.reason,)
    unavailable = backend.unavailable(caps)
    if unavailable is not None:
        return (unavailable,)
    if problem.quantization is not None and not hasattr(backend, "forward_quantized"):
        return (f"has no lookup of {problem.quantization} rows (no forward_quantized)",)
    return backend.unsupported(problem, caps)


def choose(problem: Problem, caps: Capabilities, backends: Iterable[Backend | Absent], policy: Policy) -> Plan:
    """The best backend without reasons against it; pure.

    An explicit choice is taken or refused, never replaced.

    Raises:
        BackendError: the explicit choice is unknown or cannot serve, or nothing can.
    """
    known = list(backends)
    if policy.backend is not None:
        return _explicit(problem, caps, known, policy)
    rejected = []
    usable: list[Backend] = []
    for backend in known:
        reasons = reasons_against(backend, problem, caps, policy)
        if reasons or isinstance(backend, Absent):
            rejected.append(Rejection(backend.name, reasons))
        elif backend.preference(caps) < 0:
            rejected.append(Rejection(backend.name, ("used on this device only when asked for",)))
        else:
            usable.append(backend)
    if not usable:
        raise BackendError("\n  ".join([f"no backend serves {problem} on {caps}:", *map(str, rejected)]))
    best = max(usable, key=lambda b: b.preference(caps))
    rejected += [
        Rejection(b.name, (f"can serve, but {best.name} is preferred here",)) for b in usable if b is not best
    ]
    return _plan(best, problem, caps, tuple(rejected))


def _explicit(problem: Problem, caps: Capabilities, known: list[Backend | Absent], policy: Policy) -> Plan:
    asked = f"{policy.source}{policy.backend!r}"
    found = [b for b in known if b.name == policy.backend]
    if not found:
        raise BackendError(f"{asked}: no such backend, expected one of {', '.join(b.name for b in known)}")
    reasons = reasons_against(found[0], problem, caps, policy)
    if reasons or isinstance(found[0], Absent):
        raise BackendError(f"{asked} cannot serve {problem} on {caps}: {'; '.join(reasons)}")
    return _plan(found[0], problem, caps, ())


def _plan(backend: Backend, problem: Problem, caps: Capabilities, rejected: tuple[Rejection, ...]) -> Plan:
    config, notes = backend.configure(problem, caps)
    return Plan(backend.name, problem, caps, config, notes, rejected)
