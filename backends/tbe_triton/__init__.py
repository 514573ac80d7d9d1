"""Portable Triton kernels for NVIDIA and AMD. Importing this package imports no Triton; using it does."""

from .backend import TritonBackend

backend = TritonBackend()

__all__ = ["TritonBackend", "backend"]
