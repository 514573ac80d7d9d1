"""Names of backends, and how to load one when it is first needed. Listing imports nothing."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
from functools import lru_cache

from tbe_core import Absent, Backend, Capabilities, other_vendor
from tbe_core.compiled import CrossCompileError, CrossCompiler

logger = logging.getLogger("tbe")

IN_TREE: dict[str, str] = {
    "tlx": "tbe_tlx",
    "rocm": "tbe_rocm",
    "triton": "tbe_triton",
    "cpu": "tbe_cpu",
}
"""Name to import package; the package has the backend as ``backend``."""

VENDORS: dict[str, frozenset[str]] = {"tlx": frozenset({"nvidia"}), "rocm": frozenset({"amd"})}
"""Backends in-tree that declare whose devices they serve: for a device of another vendor such a package is not
even imported. Any other backend is asked itself."""

ENTRY_POINTS = "tbe.backends"
"""Entry-point group for third parties: ``name = "package.module:object"``."""


def names() -> list[str]:
    """Every known backend, in-tree first."""
    return [*IN_TREE, *_third_party()]


@lru_cache(maxsize=1)
def _third_party() -> dict[str, importlib.metadata.EntryPoint]:
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if point.name in IN_TREE or point.name in found:
            logger.warning("entry point %r (%s) is not used: the name is taken", point.name, point.value)
        else:
            found[point.name] = point
    return found


@lru_cache(maxsize=32)
def load(name: str) -> Backend | Absent:
    """The backend ``name``, or why it cannot be loaded."""
    if name in IN_TREE:
        package = IN_TREE[name]
        if importlib.util.find_spec(package) is None:
            return Absent(name, f"package {package} is not part of this installation")
        found = importlib.import_module(package).backend
    elif name in _third_party():
        try:
            found = _third_party()[name].load()
        except (ImportError, AttributeError) as error:
            return Absent(name, f"its entry point {_third_party()[name].value} cannot be loaded: {error}")
    else:
        return Absent(name, f"unknown, expected one of {', '.join(names())}")
    if not isinstance(found, Backend) or found.name != name:
        return Absent(name, f"{found!r} is not a backend of that name")
    return found


def complete(caps: Capabilities, disabled: frozenset[str]) -> Capabilities:
    """``caps`` with what a backend alone can find out: by ``facts`` of its package, where there is one."""
    for name, package in IN_TREE.items():
        elsewhere = name in VENDORS and other_vendor(VENDORS[name], caps) is not None
        if name not in disabled and not elsewhere and not isinstance(load(name), Absent):
            facts = getattr(importlib.import_module(package), "facts", None)
            caps = caps if facts is None else facts(caps)
    return caps


def cross_compiler(name: str) -> CrossCompiler:
    """The object ``cross_compiler`` that stands beside the backend ``name``.

    Raises:
        CrossCompileError: there is no such backend, or nothing of it can be compiled ahead.
    """
    found = load(name)
    if isinstance(found, Absent):
        raise CrossCompileError(f"backend {name!r}: {found.reason}")
    package = IN_TREE[name] if name in IN_TREE else _third_party()[name].module
    compiler = getattr(importlib.import_module(package), "cross_compiler", None)
    if not isinstance(compiler, CrossCompiler):
        raise CrossCompileError(f"backend {name!r} has no kernels to compile: {package} has no cross_compiler")
    return compiler


def load_for(caps: Capabilities) -> list[Backend | Absent]:
    """Every known backend; one that declares other vendors' devices comes as its reason, not imported."""
    reasons = {name: other_vendor(vendors, caps) for name, vendors in VENDORS.items()}
    return [load(name) if (reason := reasons.get(name)) is None else Absent(name, reason) for name in names()]
