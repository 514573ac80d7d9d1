"""FBGEMM_GPU's treatment of a call's inputs: its casts, and what its bounds-check modes do to bad values.

Its modes are not this library's: WARNING and IGNORE write into the caller's tensors, read bad ids as row 0 and
train row 0. Only this drop-in does that.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache

import torch

from tbe.bounds import BadLookupWarning
from tbe_core.types import PRUNED_ID

from .enums import BoundsCheckMode

Sizes = Sequence[Sequence[int]]
# From the warning to the user's line: report, check, its no_grad, the module's own two, nn.Module's two.
_FROM_CALL = 8


def cast(
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    index_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Offsets in the dtype of indices, weights in fp32. A tensor that needs no cast stays the caller's own.

    Raises:
        ValueError: an argument is no tensor.
    """
    for name, value in (("indices", indices), ("offsets", offsets)):
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name}={type(value).__name__}: expected a torch.Tensor")
    if index_dtype == torch.int32:
        indices = indices.to(torch.int32)
    weights = None if per_sample_weights is None else per_sample_weights.float()
    return indices, offsets.to(indices.dtype), weights


def bag_ends(features: int, offsets: torch.Tensor, sizes: Sizes | None) -> list[int]:
    """Per feature: the number of bags of the features up to it.

    Raises:
        ValueError: ``offsets`` has not one entry a bag and one more.
    """
    bags = offsets.numel() - 1
    if sizes is None:
        if bags < 0 or bags % features:
            raise ValueError(f"offsets has length {bags + 1}: expected T*B+1 with T={features} features")
        return [bags // features * (f + 1) for f in range(features)]
    counts = [sum(of_ranks) for of_ranks in sizes]
    if len(counts) != features or sum(counts) != bags:
        raise ValueError(
            f"batch_size_per_feature_per_rank has {len(counts)} features and {sum(counts)} bags: expected "
            f"{features} features and {bags} bags, one less than offsets has"
        )
    return [sum(counts[: f + 1]) for f in range(features)]


def mended(offsets: torch.Tensor, lookups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets within ``[0, N]`` that never decrease and end at N; and how many bags were wrong, 0-d int64.

    The same as FBGEMM_GPU's walk from bag to bag on the CPU, where each wrong bag's two offsets are clamped
    before the next bag is looked at.
    """
    last = offsets[-1:] != lookups
    wanted = torch.cat([offsets[:-1], torch.full_like(offsets[-1:], lookups)])
    fixed = wanted.clamp(0, lookups).cummax(0).values.to(offsets.dtype)
    starts = torch.cat([wanted[:1], fixed[1:-1]]) if offsets.numel() > 1 else wanted[:0]
    ends = wanted[1:]
    wrong = (starts < 0) | (starts > ends) | (ends > lookups)
    return fixed, wrong.sum() + last.sum()


def bad_ids(indices: torch.Tensor, offsets: torch.Tensor, ends: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``[N]`` bool: ids of some bag that are neither -1 nor below their table's rows. Offsets must be in order.

    ``ends``: ``[T]`` bags up to and with each feature; ``rows``: ``[T]``.
    """
    position = torch.arange(indices.numel(), device=indices.device, dtype=offsets.dtype)
    bag = torch.searchsorted(offsets.contiguous(), position, right=True) - 1
    inside = (bag >= 0) & (bag < offsets.numel() - 1)
    feature = torch.searchsorted(ends, bag, right=True).clamp(max=rows.numel() - 1)
    return inside & (indices != PRUNED_ID) & ((indices < 0) | (indices >= rows[feature]))


def refuse_bad(indices: torch.Tensor, offsets: torch.Tensor, ends: torch.Tensor, rows: torch.Tensor) -> None:
    """FATAL: raises ``RuntimeError`` naming the first bad offset or id. Waits for a GPU."""
    n = indices.numel()
    if int(offsets[-1]) != n:
        raise RuntimeError(f"offsets[-1]={int(offsets[-1])}: expected {n}, the length of indices")
    wrong = (offsets < 0) | (offsets > n)
    wrong[1:] |= offsets[1:] < offsets[:-1]
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise RuntimeError(
            f"offsets[{at}]={int(offsets[at])}: expected offsets in [0, {n}] that never decrease; "
            f"{int(wrong.sum())} bad"
        )
    bad = bad_ids(indices, offsets, ends, rows)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        bag = int(torch.searchsorted(offsets.contiguous(), at, right=True)) - 1
        feature = int(torch.searchsorted(ends, bag, right=True))
        raise RuntimeError(
            f"indices[{at}]={int(indices[at])} (feature {feature}): expected an id in "
            f"[0, {int(rows[feature])}), or -1 for a pruned one; {int(bad.sum())} bad of {n}"
        )


@lru_cache(maxsize=256)
def _kept(ends: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # Kept: a captured graph must not copy from the host's memory.
    return torch.tensor(ends).to(device, non_blocking=True)


def report(found: int, depth: int) -> None:
    """Warn of so many bad values; ``depth`` frames from ``warnings.warn`` is the user's line."""
    warnings.warn(
        f"{found} ids or offsets out of range: the ids were set to 0, which trains row 0, and the offsets into "
        "range, in the tensors of the call. BoundsCheckMode.FATAL names the first one",
        BadLookupWarning,
        stacklevel=depth,
    )


@torch.no_grad()
def check(
    mode: BoundsCheckMode,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    ends: list[int],
    rows: torch.Tensor,
    counter: torch.Tensor,
    total: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and offsets to look up. FATAL raises and changes nothing; WARNING and IGNORE mend them in place.

    In a compiled graph they mend copies: the caller's tensors stay.

    WARNING counts this call's bad values in ``counter`` and adds them to ``total``, int64 ``[1]`` each. On the
    CPU a Python warning tells at once; on a GPU nothing waits, and ``flush`` tells.
    """
    if mode is BoundsCheckMode.NONE:
        return indices, offsets
    compiling = torch.compiler.is_compiling()
    feature_ends = torch.tensor(ends, device=indices.device) if compiling else _kept(tuple(ends), indices.device)
    if mode is BoundsCheckMode.FATAL:
        refuse_bad(indices, offsets, feature_ends, rows)
        return indices, offsets
    fixed, wrong_bags = mended(offsets, indices.numel())
    bad = bad_ids(indices, fixed, feature_ends, rows)
    count = wrong_bags + bad.sum()
    if mode is BoundsCheckMode.WARNING:
        counter.copy_(count)
        total.add_(count)
    if indices.device.type == "cpu" and not compiling:
        found = int(count)
        if not found:
            return indices, offsets
        if mode is BoundsCheckMode.WARNING:
            report(found, _FROM_CALL)
    if compiling:  # autograd refuses a compiled graph that writes to the inputs that its backward needs
        return indices.masked_fill(bad, 0), fixed
    # .data: the same tensors may be in an earlier call's graph, where good values have not changed.
    offsets.data.copy_(fixed)
    indices.data.masked_fill_(bad, 0)
    return indices, offsets


def without_lead(
    indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None, pooled: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Lookups before ``offsets[0]`` are in no bag: left out on the CPU, pruned on a GPU, where nothing waits.

    Raises:
        ValueError: there are some on the CPU, where without pooling they would have rows of the output.
    """
    if torch.compiler.is_compiling():  # values are not known, and the first offset is taken to be 0
        return indices, offsets, per_sample_weights
    if indices.device.type != "cpu":
        position = torch.arange(indices.numel(), device=indices.device, dtype=offsets.dtype)
        return torch.where(position < offsets[:1], PRUNED_ID, indices), offsets, per_sample_weights
    first = int(offsets[0]) if offsets.numel() else 0
    if first <= 0:
        return indices, offsets, per_sample_weights
    if not pooled:
        raise ValueError(f"offsets[0]={first} without pooling: expected 0")
    weights = None if per_sample_weights is None else per_sample_weights[first:]
    return indices[first:], offsets - first, weights
