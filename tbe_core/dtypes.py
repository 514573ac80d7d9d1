"""The dtypes of the contract: the one place that names them."""

from __future__ import annotations

import torch

WEIGHT_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
OUTPUT_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
INDEX_DTYPES: tuple[torch.dtype, ...] = (torch.int32, torch.int64)
SAMPLE_WEIGHT_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
STATE_DTYPE = torch.float32

_SHORT = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def short_name(dtype: torch.dtype) -> str:
    """``torch.float16`` -> ``"fp16"``; a dtype outside the contract keeps torch's name."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """A list of dtypes for an error message: ``"float32, float16, bfloat16"``."""
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
