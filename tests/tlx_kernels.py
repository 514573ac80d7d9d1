"""Kernels that only a child of the tests compiles: it has imported a provider of TLX before this file."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx


@triton.jit
def tbe_test_own_fence_kernel(data_ptr):
    """The provider's own gpu fence, which triton-utlx drops."""
    tl.store(data_ptr, 1)
    tlx.fence("gpu")
    tl.store(data_ptr + 1, 1)


@triton.jit
def tbe_test_no_fence_kernel(data_ptr):
    """A kernel that compiles and has no fence at all."""
    tl.store(data_ptr, 1)
