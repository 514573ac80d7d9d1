"""What a module's ``state_dict`` holds, and how it is read back: whole, or not where an entry does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from . import hyper as hyper_parameters

if TYPE_CHECKING:
    from .module import TableBatchedEmbeddingBags


def named_views(module: TableBatchedEmbeddingBags) -> dict[str, torch.Tensor]:
    """What a checkpoint holds: ``<table>.weight``, ``<table>.<state>``, ``hyper``; where steps are counted,
    ``step`` and ``rounding_seed``."""
    views = {"hyper": module.hyper} if module.spec.optimizer.HYPER else {}
    if module.counter is not None:
        views |= {"step": module.counter[0], "rounding_seed": module.counter[1]}
    weights, states = module.split_embedding_weights(), module.split_optimizer_states()
    for table, weight, state in zip(module.spec.layout.tables, weights, states, strict=True):
        views[f"{table.name}.weight"] = weight
        views.update({f"{table.name}.{name}": view for name, view in state.items()})
    return views


def load(
    module: TableBatchedEmbeddingBags,
    state_dict: Mapping[str, Any],
    prefix: str,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """``nn.Module._load_from_state_dict``'s work, by its rules for the three lists."""
    views, copies = named_views(module), []
    errors = []
    for name, view in views.items():
        value = state_dict.get(prefix + name)
        if value is None:
            missing_keys.append(prefix + name)
        elif not isinstance(value, torch.Tensor):
            errors.append(f"{prefix}{name} is a {type(value).__name__}: expected a tensor")
        elif tuple(value.shape) != tuple(view.shape) or value.dtype != view.dtype:
            errors.append(
                f"{prefix}{name} is {list(value.shape)} {value.dtype}: expected {list(view.shape)} "
                f"{view.dtype}"
            )
        else:
            copies.append((view, value))
    unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k.removeprefix(prefix) not in views]
    error_msgs += errors
    # Missing and unexpected keys do not stop it: torch passes strict=True whatever its caller asked for,
    # and raises by itself afterwards.
    if errors:
        return
    with torch.no_grad():
        for view, value in copies:
            view.copy_(value)
    hyper_parameters.reread(module)
