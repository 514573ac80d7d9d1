"""The portable kernels with TLX for NVIDIA's Hopper and later. Importing this package imports no Triton."""

from .backend import TlxBackend
from .crosscompile import TlxCrossCompiler
from .providers import facts

backend = TlxBackend()
cross_compiler = TlxCrossCompiler(backend)

__all__ = ["TlxBackend", "TlxCrossCompiler", "backend", "cross_compiler", "facts"]
