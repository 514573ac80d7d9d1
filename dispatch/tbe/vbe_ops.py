"""``torch.ops.tbe.vbe_*``: the variable batch's two ends for torch.compile and fake tensors.

``sizes`` is ``batch_size_per_feature_per_rank`` as one list, feature-major; in a compiled graph they are symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tbe_core import Spec

from .ops import spec_of
from .vbe import NAME, Flatten, Sizes, VariableBatch, check_length, check_sizes, variable_batch

_library = torch.library.Library("tbe", "FRAGMENT")
_library.define("vbe_offsets(Tensor indices, Tensor offsets, SymInt[] sizes, int spec) -> Tensor")
_library.define("vbe_flatten(Tensor padded, SymInt[] sizes, int spec) -> Tensor")
_library.define("vbe_unflatten(Tensor flat, SymInt[] sizes, int spec) -> Tensor")


def enter(
    handle: int,
    device: torch.device,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    sizes: Sequence[Sequence[int]],
    eager: bool,
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """The padded offsets, and what makes the flat output of the padded one.

    Raises:
        ValueError: sizes or offsets are wrong.
    """
    spec = spec_of(handle)
    if eager:
        batch = variable_batch(spec, device, check_sizes(spec, sizes))
        apply: Any = Flatten.apply
        return batch.pad(indices, offsets), lambda padded: apply(padded, batch)
    if not torch.compiler.is_compiling():
        check_sizes(spec, sizes)
    flat = [size for row in sizes for size in row]
    ops = torch.ops.tbe
    return ops.vbe_offsets(indices, offsets, flat, handle), lambda padded: ops.vbe_flatten(padded, flat, handle)


def _nested(spec: Spec, sizes: Sequence[int]) -> Sizes:
    features = spec.layout.features
    ranks = len(sizes) // features
    if len(sizes) != features * ranks:
        raise ValueError(f"{NAME} has {len(sizes)} numbers: expected as many for each of {features} features")
    return tuple(tuple(sizes[t * ranks : (t + 1) * ranks]) for t in range(features))


def _batch(spec: int, device: torch.device, sizes: Sequence[int]) -> VariableBatch:
    known = spec_of(spec)
    return variable_batch(known, device, check_sizes(known, _nested(known, sizes)))


def _most(bags: Sequence[int]) -> int:
    found = bags[0]
    for count in bags[1:]:
        found = torch.sym_max(found, count)
    return found


def _offsets(indices: torch.Tensor, offsets: torch.Tensor, sizes: Sequence[int], spec: int) -> torch.Tensor:
    return _batch(spec, offsets.device, sizes).pad(indices, offsets)


def _offsets_fake(indices: torch.Tensor, offsets: torch.Tensor, sizes: Sequence[int], spec: int) -> torch.Tensor:
    bags = [sum(row) for row in _nested(spec_of(spec), sizes)]
    if spec_of(spec).pooling == "none":
        check_sizes(spec_of(spec), ())
    check_length(offsets, sum(bags))
    return offsets.new_empty((len(bags) * _most(bags) + 1,))


def _flatten(padded: torch.Tensor, sizes: Sequence[int], spec: int) -> torch.Tensor:
    batch = _batch(spec, padded.device, sizes)
    return batch.flatten(padded, batch.order())


def _flatten_fake(padded: torch.Tensor, sizes: Sequence[int], spec: int) -> torch.Tensor:
    known = spec_of(spec)
    rows = zip(_nested(known, sizes), known.layout.feature_dims, strict=True)
    return padded.new_empty((sum(sum(row) * dim for row, dim in rows),))


def _unflatten(flat: torch.Tensor, sizes: Sequence[int], spec: int) -> torch.Tensor:
    batch = _batch(spec, flat.device, sizes)
    return batch.unflatten(flat, batch.order())


def _unflatten_fake(flat: torch.Tensor, sizes: Sequence[int], spec: int) -> torch.Tensor:
    known = spec_of(spec)
    return flat.new_empty((_most([sum(row) for row in _nested(known, sizes)]), known.output_width))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.sizes, ctx.spec = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.tbe.vbe_unflatten(grad, ctx.sizes, ctx.spec), None, None


for _name, _real, _fake in (
    ("vbe_offsets", _offsets, _offsets_fake),
    ("vbe_flatten", _flatten, _flatten_fake),
    ("vbe_unflatten", _unflatten, _unflatten_fake),
):
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tbe::{_name}", _fake, lib=_library)
torch.library.register_autograd("tbe::vbe_flatten", _backward, setup_context=_setup, lib=_library)
