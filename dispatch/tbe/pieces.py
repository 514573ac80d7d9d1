"""Large tensors a bounded piece at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

ELEMENTS = 1 << 21
"""Of a piece at most: 8 MiB in fp32. A reader holds a few pieces at once."""


def slices(tensor: torch.Tensor, width: int | None = None) -> Iterator[slice]:
    """Slices of the first dimension, each at most ``ELEMENTS`` and at least one row.

    ``width``: elements that go with one entry, where that is not the tensor's own.
    """
    rows = tensor.shape[0]
    step = max(1, ELEMENTS // max(1, tensor[0].numel() if width is None else width)) if rows else 1
    for at in range(0, rows, step):
        yield slice(at, min(at + step, rows))


def overflows(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a finite value becomes infinite in ``dtype``; both are floating point. Waits for a GPU."""
    return bool((value.to(dtype).isinf() & value.isfinite()).any())
