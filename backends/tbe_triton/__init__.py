"""Portable Triton kernels for NVIDIA and AMD. Importing this package imports no Triton; using it does."""

from .backend import TritonBackend
from .crosscompile import TritonCrossCompiler

backend = TritonBackend()
cross_compiler = TritonCrossCompiler(backend)

__all__ = ["TritonBackend", "TritonCrossCompiler", "backend", "cross_compiler"]
