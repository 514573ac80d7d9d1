"""Hyper-parameters of a living module: checks, and the present values on the host and on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tbe_core import Optimizer

if TYPE_CHECKING:
    from .module import TableBatchedEmbeddingBags

Value = float | torch.Tensor
PAIRS = {"betas": ("beta1", "beta2")}
"""Names under which torch's optimizers keep two hyper-parameters as one tuple."""


def pairs(optimizer: Optimizer) -> dict[str, tuple[str, str]]:
    """Of ``PAIRS``, those whose parts this optimizer has."""
    return {name: parts for name, parts in PAIRS.items() if set(parts) <= set(optimizer.HYPER)}


def checked(module: TableBatchedEmbeddingBags, values: Mapping[str, Any]) -> dict[str, Value]:
    """Names of ``HYPER`` to a float, or to a tensor that stays one. Changes nothing.

    A tensor on a GPU is not read: that would wait for the device.

    Raises:
        ValueError: an unknown name or a value that the optimizer would refuse.
    """
    optimizer, found = module.spec.optimizer, dict[str, Value]()
    for name, value in _apart(optimizer, values).items():
        if name not in optimizer.HYPER:
            raise ValueError(
                f"{name}={value!r}: {type(optimizer).__name__} has no such hyper-parameter, expected one of "
                + (", ".join((*optimizer.HYPER, *pairs(optimizer))) or "those of the torch optimizer")
            )
        found[name] = _tensor(name, value) if isinstance(value, torch.Tensor) else _number(name, value)
    on_host = {n: float(v) for n, v in found.items() if isinstance(v, float) or v.device.type == "cpu"}
    # The optimizer's own constructor has the rules, those between two values too.
    changed = replace(optimizer, **on_host)
    for flag, was in optimizer.flags.items():
        if changed.flags[flag] != was:
            raise ValueError(
                f"{', '.join(f'{n}={v!r}' for n, v in on_host.items())}: {flag} would become "
                f"{changed.flags[flag]}, expected values that leave it {was}: it was settled when the module "
                "was made"
            )
    return found


def _apart(optimizer: Optimizer, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with every pair as its two parts; the parts win where both are given."""
    found: dict[str, Any] = {}
    for name, parts in pairs(optimizer).items():
        if name not in values:
            continue
        pair = values[name]
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"{name}={pair!r}: expected a pair of numbers")
        found.update(zip(parts, pair, strict=True))
    return found | {name: value for name, value in values.items() if name not in pairs(optimizer)}


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r}: expected a number") from None
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name}={value!r}: expected a finite number >= 0")
    return number


def _tensor(name: str, value: torch.Tensor) -> torch.Tensor:
    if value.numel() != 1 or not value.is_floating_point():
        raise ValueError(
            f"{name} is a tensor of shape {list(value.shape)}, {value.dtype}: expected one floating-point number"
        )
    if value.device.type == "cpu":
        _number(name, value.detach().item())
    return value.detach().reshape(())


def write(module: TableBatchedEmbeddingBags, values: Mapping[str, Value]) -> None:
    """Enter what ``checked`` returned, on the device and on the host."""
    names = module.spec.optimizer.HYPER
    # .data: a backward whose forward came before reads the present value; it is no autograd event.
    device = module.hyper.data
    for name, value in values.items():
        at = names.index(name)
        if isinstance(value, torch.Tensor):
            device[at].copy_(value)
        else:
            device[at].fill_(value)  # assigning a number waits for the GPU
        module._hyper_values[at] = None if isinstance(value, torch.Tensor) else value


def present(module: TableBatchedEmbeddingBags) -> dict[str, Any]:
    """Name to the present value, pairs included: a float, or the live 0-d tensor where a tensor was written."""
    found: dict[str, Any] = {}
    for at, (name, value) in enumerate(zip(module.spec.optimizer.HYPER, module._hyper_values, strict=True)):
        found[name] = module.hyper.data[at] if value is None else value
    for name, (first, second) in pairs(module.spec.optimizer).items():
        found[name] = (found[first], found[second])
    return found


def reread(module: TableBatchedEmbeddingBags) -> None:
    """After ``hyper`` was loaded: the host's values follow, and keep their digits beyond fp32 where they may."""
    loaded = module.hyper.tolist()
    for at, value in enumerate(loaded):
        known = module._hyper_values[at]
        if known is None or torch.tensor(known, dtype=module.hyper.dtype).item() != value:
            module._hyper_values[at] = value
