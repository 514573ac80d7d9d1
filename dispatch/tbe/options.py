"""What a module may be asked for beyond the plain lookup: clipping, frozen tables, masked weight gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tbe_core import Spec


def checked_limit(gradient_clipping: object) -> float | None:
    """``gradient_clipping`` as a float; the spec refuses what is not finite and above 0."""
    if gradient_clipping is None:
        return None
    if isinstance(gradient_clipping, bool) or not isinstance(gradient_clipping, (int, float)):
        raise ValueError(f"gradient_clipping={gradient_clipping!r}: expected a finite float > 0, or None")
    return float(gradient_clipping)


def with_frozen(spec: Spec, names: Sequence[str], freeze: bool) -> Spec:
    """``spec`` with the tables of these names frozen, or not; raises ``ValueError`` for an unknown name."""
    numbers = {table.name: number for number, table in enumerate(spec.layout.tables)}
    unknown = [name for name in names if not isinstance(name, str) or name not in numbers]
    if unknown:
        raise ValueError(f"table {unknown[0]!r}: expected one of {', '.join(map(repr, numbers))}")
    named = {numbers[name] for name in names}
    frozen = {*spec.frozen} | named if freeze else {*spec.frozen} - named
    return replace(spec, frozen=tuple(sorted(frozen)))


def wants_gradient(per_sample_weights: torch.Tensor | None) -> bool:
    """Whether a backward has to compute the weights' gradient."""
    return per_sample_weights is not None and per_sample_weights.requires_grad and torch.is_grad_enabled()


def check_feature_mask(
    spec: Spec, device: torch.device, feature_requires_grad: object, per_sample_weights: torch.Tensor | None
) -> None:
    """Raises ``ValueError`` naming the argument, its value and what was expected. Reads no value."""
    mask, features = feature_requires_grad, spec.layout.features
    if not isinstance(mask, torch.Tensor):
        raise ValueError(f"feature_requires_grad={type(mask).__name__}: expected a torch.Tensor")
    if mask.is_complex():
        raise ValueError(f"feature_requires_grad has dtype {mask.dtype}: expected bool, integers or floats")
    if tuple(mask.shape) != (features,):
        raise ValueError(
            f"feature_requires_grad has shape {list(mask.shape)}: expected [{features}], one for every feature"
        )
    if mask.device != device:
        raise ValueError(f"feature_requires_grad is on {mask.device}: expected {device}, where the tables are")
    if per_sample_weights is None:
        raise ValueError(
            "feature_requires_grad without per_sample_weights: expected None, it masks the weights' gradient only"
        )


def mask_gradient(
    spec: Spec,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    feature_requires_grad: torch.Tensor,
) -> torch.Tensor | None:
    """The same values, ``[N]``; no gradient reaches those of a feature whose mask is zero. No synchronisation.

    Raises:
        ValueError: the mask ``[T]`` is wrong, or there are no weights for it.
    """
    check_feature_mask(spec, offsets.device, feature_requires_grad, per_sample_weights)
    batch = (offsets.numel() - 1) // spec.layout.features
    if per_sample_weights is None or not wants_gradient(per_sample_weights) or not batch:
        return per_sample_weights
    ends = offsets[batch::batch].contiguous()
    position = torch.arange(per_sample_weights.numel(), device=offsets.device, dtype=offsets.dtype)
    # Beyond the last offset (bad offsets, on a GPU) there is no feature, and no gradient either.
    feature = torch.searchsorted(ends, position, right=True).clamp(max=spec.layout.features - 1)
    kept = (feature_requires_grad != 0)[feature]
    return torch.where(kept, per_sample_weights, per_sample_weights.detach())
