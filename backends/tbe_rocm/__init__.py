"""What differs on AMD GPUs from the portable Triton kernels. Importing this package imports no Triton."""

from tbe_triton import TritonCrossCompiler
from tbe_triton.targets import TARGETS

from .backend import VENDOR, RocmBackend

backend = RocmBackend()
cross_compiler = TritonCrossCompiler(
    backend, targets=tuple(arch for arch, caps in TARGETS.items() if caps.vendor == VENDOR)
)

__all__ = ["RocmBackend", "backend", "cross_compiler"]
