"""Who provides TLX here, and which of its features really work: each is compiled and looked for in the PTX.

Importing this module imports neither Triton nor a provider.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from packaging.version import InvalidVersion, Version

from tbe_core import Capabilities, other_vendor

VENDORS = frozenset({"nvidia"})
FIRST_ARCH = 90
"""sm_90: the first with the tensor memory accelerator."""


@dataclass(frozen=True)
class Provider:
    """An installed package that provides TLX."""

    package: str
    version: str
    module: str
    """What is imported to have it."""

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


MODULES = {"fbtriton": "triton.language.extra.tlx", "triton-utlx": "utlx_plugin"}
"""Package to module. fbtriton replaces Triton, so where both are installed it is the one that runs."""


def installed() -> Provider | None:
    """The provider of this installation, by package metadata alone."""
    for package, module in MODULES.items():
        try:
            return Provider(package, importlib.metadata.version(package), module)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def misfit(provider: str, triton_version: str | None) -> str | None:
    """Why the provider (``package version``) cannot work with this Triton, or None."""
    package, _, version = provider.partition(" ")
    if package != "triton-utlx":
        return None
    wanted = Version(version).release[:2]
    try:
        fits = triton_version is not None and Version(triton_version).release[:2] == wanted
    except InvalidVersion:
        fits = False
    if fits:
        return None
    return f"{provider} needs Triton {'.'.join(map(str, wanted))}, and {triton_version} is installed"


def out_of_question(caps: Capabilities) -> str | None:
    """Why no provider could serve this device, or None. Looks at facts alone."""
    elsewhere = other_vendor(VENDORS, caps)
    if elsewhere is not None:
        return elsewhere
    if caps.triton_interpret:
        return "TLX does not run in Triton's interpreter (TRITON_INTERPRET=1)"
    if arch_number(caps) < FIRST_ARCH:
        return f"for sm_{FIRST_ARCH} and later only, and {caps.name or 'the device'} is {caps.arch}"
    return None


def arch_number(caps: Capabilities) -> int:
    """90 for ``sm_90``."""
    return int(caps.arch.removeprefix("sm_"))


def facts(caps: Capabilities) -> Capabilities:
    """``caps`` with the provider of this installation and its features on that architecture.

    Nothing is looked at where TLX is out of the question, and what has been set by hand is left as it is. The
    first time on a machine, a child process compiles some seconds; the result is kept on disk.
    """
    if caps.tlx_provider is not None or out_of_question(caps) is not None:
        return caps
    provider = installed()
    if provider is None:
        return caps
    caps = replace(caps, tlx_provider=str(provider))
    if misfit(str(provider), caps.triton_version) is not None:
        return caps
    from .features import missing

    lacking = missing(provider, caps.triton_version or "", arch_number(caps))
    return replace(caps, tlx_features=frozenset(name for name, why in lacking.items() if not why))


@lru_cache(maxsize=1)
def load() -> Any:
    """Import this installation's provider into this process; from then on Triton compiles through it.

    Never where kernels for AMD are compiled: triton-utlx replaces that pipeline for the whole process.

    Raises:
        RuntimeError: Triton compiles for AMD here, or no provider is installed.
    """
    provider = installed()
    if provider is None:
        raise RuntimeError("no TLX provider is installed")
    if _compiles_for_amd():
        raise RuntimeError(f"{provider} must not be imported in a process that compiles for AMD")
    importlib.import_module(provider.module)
    return importlib.import_module("triton.language.extra.tlx")


def _compiles_for_amd() -> bool:
    import torch

    if torch.version.hip is not None:
        return True
    driver = sys.modules.get("triton.runtime.driver")
    active = getattr(getattr(driver, "driver", None), "_active", None)
    return active is not None and active.get_current_target().backend == "hip"
