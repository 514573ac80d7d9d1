"""Facts about a device, from torch and package metadata alone: nothing of Triton or a vendor is imported."""

from __future__ import annotations

import importlib.metadata
import platform
from functools import lru_cache

import torch

from tbe_core import Capabilities

from . import environment


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@lru_cache(maxsize=64)
def _probe(device_type: str, index: int, interpret: bool) -> Capabilities:
    torch_version = torch.__version__
    triton_version = _version("triton") or _version("fbtriton") or _version("pytorch-triton-rocm")
    cccl_version = _version("cuda-cccl")
    if device_type != "cuda":
        return Capabilities(
            device_type=device_type,
            vendor="cpu" if device_type == "cpu" else device_type,
            arch=platform.machine(),
            name=platform.processor() or platform.machine(),
            processors=torch.get_num_threads(),
            triton_interpret=interpret,
            torch_version=torch_version,
            triton_version=triton_version,
            cccl_version=cccl_version,
        )
    found = torch.cuda.get_device_properties(index)
    amd = torch.version.hip is not None
    return Capabilities(
        device_type="cuda",
        vendor="amd" if amd else "nvidia",
        arch=found.gcnArchName.split(":")[0] if amd else f"sm_{found.major}{found.minor}",
        name=found.name,
        processors=found.multi_processor_count,
        memory_bytes=found.total_memory,
        l2_bytes=found.L2_cache_size,
        warp_size=found.warp_size,
        triton_interpret=interpret,
        torch_version=torch_version,
        triton_version=triton_version,
        cccl_version=cccl_version,
    )


def capabilities(device: torch.device | str) -> Capabilities:
    """What ``device`` is. Kept: a device is asked once."""
    device = torch.device(device)
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if device.type == "cuda" else 0
    return _probe(device.type, index, environment.triton_interpret())


def devices() -> list[torch.device]:
    """The CPU, then every GPU that torch sees."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(gpus))]
