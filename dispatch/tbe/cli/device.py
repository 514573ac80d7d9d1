"""The option ``--device``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tbe.bench.errors import BenchError

if TYPE_CHECKING:
    import torch


def chosen_device(text: str | None) -> torch.device:
    """The device asked for, or a CUDA device where there is one. Raises ``BenchError`` for one there is
    not."""
    import torch

    if text is None:
        text = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise BenchError(f"--device {text}: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda"):
        raise BenchError(f"--device must be cuda, cuda:N or cpu, got {text}")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise BenchError(f"--device {text}: this machine has {count} CUDA devices")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device
