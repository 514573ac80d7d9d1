"""The eager torch backend: the floor that is always there."""

from .backend import CpuBackend

backend = CpuBackend()

__all__ = ["CpuBackend", "backend"]
