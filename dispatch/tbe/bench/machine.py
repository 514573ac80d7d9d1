"""Facts about the machine and its software, as the results database keeps them."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from tbe.bench.implementations import package_version


def machine_facts(device: torch.device) -> dict[str, object]:
    """The columns of table ``machine``; ``memory_bytes`` and ``processors`` are the device's."""
    host = f"{platform.system()} {platform.machine()}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        architecture = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
        return {
            "device": properties.name,
            "device_type": device.type,
            "architecture": architecture or f"sm_{properties.major}{properties.minor}",
            "processors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "host": host,
        }
    return {
        "device": _cpu_name(),
        "device_type": device.type,
        "architecture": platform.machine(),
        "processors": os.cpu_count() or 0,
        "memory_bytes": _memory_bytes(),
        "host": host,
    }


def software_facts() -> dict[str, object]:
    """The columns of table ``software``. Versions of the operators are with their implementations."""
    toolkit = torch.version.cuda or (f"hip {torch.version.hip}" if torch.version.hip else "")
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": package_version("triton", "pytorch-triton", "fbtriton"),
        "cuda": toolkit,
    }


def _cpu_name() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "CPU"


def _memory_bytes() -> int:
    """Physical memory; 0 where the system does not tell (Windows)."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
