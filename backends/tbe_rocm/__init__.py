"""What differs on AMD GPUs from the portable Triton kernels. Importing this package imports no Triton."""

from tbe_triton import TritonCrossCompiler
from tbe_triton.targets import TARGETS

from .backend import VENDORS, RocmBackend

backend = RocmBackend()
cross_compiler = TritonCrossCompiler(
    backend, targets=tuple(arch for arch, caps in TARGETS.items() if caps.vendor in VENDORS)
)

__all__ = ["VENDORS", "RocmBackend", "backend", "cross_compiler"]
