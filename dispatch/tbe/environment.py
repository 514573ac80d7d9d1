"""Every environment variable that is read, and the one place that reads them. docs/environment.md is the page."""

from __future__ import annotations

import os
from functools import lru_cache

VARIABLES: dict[str, str] = {
    "TBE_BACKEND": "Name of the backend to use; refused with reasons where it cannot serve.",
    "TBE_DISABLE": "Comma-separated names of backends that are never chosen.",
    "TBE_LOG": "1: log every plan once, at level INFO to the logger 'tbe'; to stderr where it has no handler.",
    "TBE_CONFIG_DIR": "Directory of device files, as `tbe tune` writes them, that come before the packaged ones.",
    "TRITON_INTERPRET": "Triton's own: 1 runs its kernels in the interpreter, on CPU tensors, slowly.",
}


def backend() -> str | None:
    return os.environ.get("TBE_BACKEND", "").strip() or None


def disabled() -> frozenset[str]:
    return _names(os.environ.get("TBE_DISABLE", ""))


@lru_cache(maxsize=64)
def _names(text: str) -> frozenset[str]:
    return frozenset(n.strip() for n in text.split(",") if n.strip())


def log() -> bool:
    return os.environ.get("TBE_LOG", "0") not in ("", "0")


@lru_cache(maxsize=1)
def config_dir() -> str | None:
    """Read once a process, as are the files in it: every call's capabilities have it."""
    return os.environ.get("TBE_CONFIG_DIR") or None


def triton_interpret() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def unset_triton_interpret() -> None:
    """For a process that compiles: interpreted kernels are not compiled."""
    os.environ.pop("TRITON_INTERPRET", None)


def present() -> dict[str, str]:
    """Those of ``VARIABLES`` that are set, with their values: what a bug report needs."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}
