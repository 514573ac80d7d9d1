"""A variable batch's output written into a tensor that the caller made, which several modules share."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

import torch

from .inputs import Sizes


def check(
    output: torch.Tensor | None,
    offsets: torch.Tensor | None,
    sizes: Sizes | None,
    features: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Sizes, torch.Tensor, torch.Tensor] | None:
    """What ``place`` takes after the dims; None where the call gives no output.

    Raises:
        ValueError: names the argument of the call that is missing or wrong.
    """
    if output is None and offsets is None:
        return None
    if output is None or offsets is None or sizes is None:
        missing = [
            name
            for name, value in (
                ("vbe_output", output), ("vbe_output_offsets", offsets),
                ("batch_size_per_feature_per_rank", sizes),
            )
            if value is None
        ]  # fmt: skip
        raise ValueError(f"{missing[0]}=None: expected vbe_output, its offsets and the batch sizes together")
    if output.dtype != dtype or output.device != device or not output.is_contiguous():
        raise ValueError(
            f"vbe_output is {output.dtype} on {output.device}, contiguous={output.is_contiguous()}: expected "
            f"contiguous {dtype} on {device}"
        )
    shape = [len(sizes[0]) if len(sizes) else 0, features]
    if list(offsets.shape) != shape or offsets.device != device or offsets.dtype != torch.int64:
        raise ValueError(
            f"vbe_output_offsets is {offsets.dtype} {list(offsets.shape)} on {offsets.device}: expected "
            f"torch.int64 {shape}, a place for every rank and feature, on {device}"
        )
    return sizes, output, offsets


@lru_cache(64)
def _pieces(counts: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """``[R*T]`` elements of each piece of the flat output, and where it starts there."""
    starts = [0, *accumulate(counts)][:-1]
    return torch.tensor(counts, device=device), torch.tensor(starts, device=device)


def place(
    out: torch.Tensor, dims: tuple[int, ...], sizes: Sizes, output: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Write the flat ``out``, by rank, then feature, to where ``offsets [R, T]`` says in ``output``.

    Returns ``output``, which autograd then knows as a function of ``out`` and of what it held elsewhere.
    """
    ranks = range(len(sizes[0]))
    counts = tuple(sizes[t][r] * dim for r in ranks for t, dim in enumerate(dims))
    elements, starts = _pieces(counts, out.device)
    shift = (offsets.flatten() - starts).repeat_interleave(elements, output_size=out.numel())
    output.view(-1).index_copy_(0, torch.arange(out.numel(), device=out.device) + shift, out)
    return output
