"""Checks of a call's inputs. Every error names the argument, its value and what was expected."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

from .dtypes import INDEX_DTYPES, SAMPLE_WEIGHT_DTYPES, names
from .quantized import QuantizedSpec
from .spec import Spec

AnySpec = Spec | QuantizedSpec


def check_tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...], device: torch.device) -> torch.Tensor:
    """A contiguous vector of one of ``dtypes`` on ``device``, or a ValueError."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}={type(value).__name__}: expected a torch.Tensor")
    if value.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {value.dtype}: expected one of {names(dtypes)}")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}: expected {device}, where the tables are")
    if value.dim() != 1:
        raise ValueError(f"{name} has shape {list(value.shape)}: expected one dimension")
    if not value.is_contiguous():
        raise ValueError(f"{name} has stride {value.stride()}: expected a contiguous tensor")
    return value


def check_inputs(
    spec: AnySpec,
    device: torch.device,
    indices: object,
    offsets: object,
    per_sample_weights: object | None,
) -> None:
    """Shapes, dtypes, devices and lengths; no value is read, so nothing synchronises.

    Raises:
        ValueError: names the argument, its value and what was expected.
    """
    checked = check_tensor("indices", indices, INDEX_DTYPES, device)
    ends = check_tensor("offsets", offsets, INDEX_DTYPES, device)
    features = spec.layout.features
    if ends.numel() < 1 or (ends.numel() - 1) % features:
        raise ValueError(
            f"offsets has length {ends.numel()}: expected T*B+1 with T={features} features, feature-major"
        )
    if ends.numel() - 1 >= 2**31:
        raise ValueError(f"offsets has length {ends.numel()}: expected fewer than 2^31 bags")
    if per_sample_weights is not None:
        weights = check_tensor("per_sample_weights", per_sample_weights, SAMPLE_WEIGHT_DTYPES, device)
        if weights.numel() != checked.numel():
            raise ValueError(
                f"per_sample_weights has length {weights.numel()}: expected {checked.numel()}, one for "
                "every index"
            )
        if spec.pooling == "none":
            raise ValueError("per_sample_weights with pooling='none': expected None, nothing is pooled")


def check_offset_values(
    spec: AnySpec, offsets: torch.Tensor, lookups: int, bags: Sequence[int] | None = None
) -> None:
    """Offsets start at 0, never decrease and end at the number of indices. Reads values.

    ``bags``: how many each feature has; default: all as many.

    Raises:
        ValueError: names the offending position, feature and bag.
    """
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0:
        raise ValueError(f"offsets[0]={first}: expected 0")
    lengths = offsets.diff()
    if bool((lengths < 0).any()):
        at = int((lengths < 0).nonzero()[0])
        features = spec.layout.features
        firsts = [0, *accumulate(bags or [(offsets.numel() - 1) // features] * features)]
        feature = bisect_right(firsts, at) - 1
        raise ValueError(
            f"offsets[{at + 1}]={int(offsets[at + 1])} after {int(offsets[at])} (feature {feature}, bag "
            f"{at - firsts[feature]}): expected offsets that never decrease"
        )
    if last != lookups:
        raise ValueError(f"offsets[-1]={last}: expected {lookups}, the length of indices")


def check_index_values(spec: AnySpec, indices: torch.Tensor, offsets: torch.Tensor) -> None:
    """Every id is -1 (pruned) or in [0, rows of its table). Offsets must be checked before. Reads values.

    Raises:
        ValueError: names feature, table, bag, position, value and limit of the first bad id, and their count.
    """
    batch = (offsets.numel() - 1) // spec.layout.features
    if not indices.numel():
        return
    lengths = offsets.diff()
    bags = torch.repeat_interleave(torch.arange(lengths.numel(), device=indices.device), lengths)
    rows = torch.tensor(
        [spec.layout.feature_table(f).rows for f in range(spec.layout.features)], device=indices.device
    )
    bad = (indices < -1) | (indices >= rows[bags // batch])
    if not bool(bad.any()):
        return
    position = int(bad.nonzero()[0])
    feature, bag = divmod(int(bags[position]), batch)
    table = spec.layout.feature_table(feature)
    raise ValueError(
        f"indices[{position}]={int(indices[position])} (feature {feature}, table {table.name!r}, bag {bag}): "
        f"expected an id in [0, {table.rows}), or -1 for a pruned one; {int(bad.sum())} bad of "
        f"{indices.numel()}"
    )
