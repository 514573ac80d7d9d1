"""Installed packages, by their metadata alone."""

from __future__ import annotations

import importlib.metadata

TRITON = ("triton", "fbtriton", "pytorch-triton-rocm")
"""Packages that are Triton, under any name."""


def version(*packages: str) -> str | None:
    """Of the first of ``packages`` that is installed; None where none is."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
