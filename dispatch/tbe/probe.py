"""Facts about a device, from torch and package metadata alone: nothing of Triton or a vendor is imported."""

from __future__ import annotations

import platform
from dataclasses import replace
from functools import lru_cache

import torch

from tbe_core import Capabilities, packages
from tbe_core.devices import DEVICES

from . import environment, registry


def software() -> dict[str, str | None]:
    """Versions of this installation that decide routing, by their field in ``Capabilities``."""
    return {
        "torch_version": torch.__version__,
        "triton_version": packages.version(*packages.TRITON),
        "cccl_version": packages.version("cuda-cccl"),
    }


@lru_cache(maxsize=64)
def _probe(
    device_type: str, index: int, interpret: bool, config_dir: str | None, disabled: frozenset[str]
) -> Capabilities:
    if device_type != "cuda":
        found = Capabilities(
            device_type=device_type,
            vendor=device_type,
            arch=platform.machine(),
            name=platform.processor() or platform.machine(),
            processors=torch.get_num_threads(),
        )
    else:
        facts = torch.cuda.get_device_properties(index)
        amd = torch.version.hip is not None
        found = Capabilities(
            device_type="cuda",
            vendor="amd" if amd else "nvidia",
            arch=facts.gcnArchName.split(":")[0] if amd else f"sm_{facts.major}{facts.minor}",
            name=facts.name,
            processors=facts.multi_processor_count,
            memory_bytes=facts.total_memory,
            l2_bytes=facts.L2_cache_size,
            warp_size=facts.warp_size,
        )
    return _with_software(found, interpret, config_dir, disabled)


def _with_software(
    caps: Capabilities, interpret: bool, config_dir: str | None, disabled: frozenset[str]
) -> Capabilities:
    here = software()
    caps = replace(
        caps,
        torch_version=here["torch_version"] or "",
        triton_version=here["triton_version"],
        cccl_version=here["cccl_version"],
        triton_interpret=interpret,
        config_dir=config_dir,
    )
    return caps if caps.device_type == "cpu" else registry.complete(caps, disabled)


def as_if(name: str) -> Capabilities:
    """A device of ``tbe_core.devices`` with the software of this installation; KeyError for another name."""
    return _with_software(DEVICES[name], False, environment.config_dir(), environment.disabled())


def capabilities(device: torch.device | str) -> Capabilities:
    """What ``device`` is. Kept: a device is asked once."""
    device = torch.device(device)
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if device.type == "cuda" else 0
    interpret, own = environment.triton_interpret(), environment.config_dir()
    return _probe(device.type, index, interpret, own, environment.disabled())


def devices() -> list[torch.device]:
    """The CPU, then every GPU that torch sees."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(gpus))]
