"""The portable kernels with TLX for NVIDIA's Hopper and later. Importing this package imports no Triton."""

from tbe_triton import TritonCrossCompiler
from tbe_triton.targets import TARGETS

from .backend import TlxBackend
from .providers import facts, out_of_question

backend = TlxBackend()
cross_compiler = TritonCrossCompiler(
    backend,
    targets=tuple(arch for arch, caps in TARGETS.items() if out_of_question(caps) is None),
    facts=facts,
)

__all__ = ["TlxBackend", "backend", "cross_compiler", "facts"]
