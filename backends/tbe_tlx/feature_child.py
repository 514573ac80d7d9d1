"""What runs in the child that ``features`` starts: compile one tiny kernel a feature and look at its PTX."""

from __future__ import annotations

import importlib
import re
from typing import Any

from tbe_core.assist import ASYNC_LOAD, CLC, GPU_FENCE, MBARRIER, STORE_REDUCE

from .features import announce, verdict

POINTER = {"data_ptr": "*i32"}
SIGNATURES: dict[str, tuple[str, dict[str, str]]] = {
    GPU_FENCE: ("tbe_probe_gpu_fence_kernel", POINTER),
    CLC: ("tbe_probe_clc_kernel", POINTER),
    STORE_REDUCE: (
        "tbe_probe_store_reduce_kernel",
        {"desc": "tensordesc<fp32[1,128]>", "data_ptr": "*fp32"},
    ),
    MBARRIER: ("tbe_probe_mbarrier_kernel", POINTER),
    ASYNC_LOAD: ("tbe_probe_async_load_kernel", POINTER),
}


def main(module: str, arch: int, names: list[str]) -> None:
    """Announce a verdict for every feature of ``names``; the process may die in any of them."""
    importlib.import_module(module)
    from .kernels import feature_probes

    for name in names:
        announce(name)
        kernel, signature = SIGNATURES[name]
        announce(name, _compile(name, getattr(feature_probes, kernel), signature, arch))


def _compile(name: str, kernel: Any, signature: dict[str, str], arch: int) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    try:
        compiled = triton.compile(
            ASTSource(kernel, signature, {}), target=GPUTarget("cuda", arch, 32), options={"num_warps": 1}
        )
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises is why the feature is missing
        return f"{type(error).__name__}: {_cause(str(error))}"
    return verdict(name, compiled.asm["ptx"])


def _cause(message: str) -> str:
    """The line that says what is wrong: an assembler's own error, else the last; the first is often a place."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = [line.partition("error")[2].lstrip(" :") for line in lines if re.search(r"\berror\s*:", line)]
    return (told or lines[-1:] or ["no message"])[0]
