"""Portable Triton kernels for NVIDIA and AMD. Importing this package imports no Triton; using it does."""

from .backend import TritonBackend
from .crosscompile import TritonCrossCompiler
from .fused_tier import GatedTritonBackend

backend = GatedTritonBackend()
# Ungated: it compiles the fused tier for AMD too, where nothing launches it, so that it stays known to compile.
cross_compiler = TritonCrossCompiler(TritonBackend())

__all__ = ["GatedTritonBackend", "TritonBackend", "TritonCrossCompiler", "backend", "cross_compiler"]
