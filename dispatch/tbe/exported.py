"""``torch.ops.tbe.inference``: the forward as ``torch.export`` records it.

An exported program outlives the process that made it, so its operator holds everything that it needs: the spec as
text, not as a handle of this process. It is functional. Nobody can ask an exported program for its counts of bad
ids, so it keeps none: with ``bounds_check="warn"`` they contribute nothing, as with ``"ignore"``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from tbe_core import Layout, Spec, Table
from tbe_core.optimizers import REGISTRY
from tbe_core.validate import check_inputs

from . import ops, policy

if TYPE_CHECKING:
    from .module import TableBatchedEmbeddingBags

TRAINING = (
    "torch.export of a module in training mode: expected model.eval() before; an exported program steps no table"
)
VARIABLE = (
    "torch.export with batch_size_per_feature_per_rank: expected one batch size for all features; "
    "an exported program takes no variable batch"
)

_library = torch.library.Library("tbe", "FRAGMENT")
_library.define(
    "inference(Tensor weights, Tensor indices, Tensor offsets, Tensor? per_sample_weights, str spec, "
    "str? backend) -> Tensor"
)


def forward(
    module: TableBatchedEmbeddingBags,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    sizes: Sequence[Sequence[int]] | None,
) -> torch.Tensor:
    """What a module's forward is while it is exported.

    Raises:
        RuntimeError: the module is in training mode, or the batch is a variable one.
    """
    if module.training and torch.is_grad_enabled():
        raise RuntimeError(TRAINING)
    if sizes is not None:
        raise RuntimeError(VARIABLE)
    # The module's own backend alone: what this process asks for is no part of a program.
    out: torch.Tensor = torch.ops.tbe.inference(
        module.weights, indices, offsets, per_sample_weights, text_of(module._handle), module.requested_backend
    )
    return out


def spec_text(spec: Spec) -> str:
    """A spec as JSON, from which ``spec_of_text`` makes an equal one in any process."""
    values: dict[str, Any] = {field.name: getattr(spec, field.name) for field in fields(Spec)}
    layout, optimizer = spec.layout, spec.optimizer
    values["layout"] = {
        "tables": [[t.name, t.rows, t.dim] for t in layout.tables],
        "feature_table_map": layout.feature_table_map,
    }
    own = {field.name: getattr(optimizer, field.name) for field in fields(optimizer)}
    values["optimizer"] = {"name": optimizer.NAME, **own}
    return json.dumps(values, default=_dtype_text, separators=(",", ":"))


def text_of(handle: int) -> str:
    """``spec_text`` of the spec that a module entered under ``handle``."""
    return spec_text(ops.spec_of(handle))


# A constant for torch.export(strict=True); see policy.request.
text_of.__dict__["_dynamo_marked_constant"] = True


def _dtype_text(value: object) -> dict[str, str]:
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{value!r} in a spec: expected text, numbers, dtypes and tuples of them")
    return {"dtype": str(value).removeprefix("torch.")}


@lru_cache(maxsize=1024)
def spec_of_text(text: str) -> Spec:
    """The spec of a text of ``spec_text``.

    Raises:
        ValueError: its optimizer is not known here, or it is not such a text.
    """
    try:
        values = json.loads(text, object_hook=lambda v: getattr(torch, v["dtype"]) if "dtype" in v else v)
        layout, optimizer = values.pop("layout"), values.pop("optimizer")
        name = optimizer.pop("name")
        tables = [Table(*table) for table in layout["tables"]]
        if name not in REGISTRY:
            raise ValueError(f"optimizer {name!r}: expected one of {', '.join(REGISTRY)}")
        rest: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return Spec(Layout.make(tables, layout["feature_table_map"]), REGISTRY[name](**optimizer), **rest)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"the spec of an exported program cannot be read: {error}; expected a program that this version "
            "of the library exported"
        ) from error


def _inference(
    weights: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    spec: str,
    backend: str | None,
) -> torch.Tensor:
    known = spec_of_text(spec)
    check_inputs(known, weights.device, indices, offsets, per_sample_weights)
    if known.bounds_check != "none":
        ops.check_values(known, indices, offsets)
    # .data: parameters come with requires_grad, which no backend asks about.
    chosen, lookup = policy.lookup_for(
        known, weights.data, indices, offsets, per_sample_weights, policy.request(backend)
    )
    out: torch.Tensor = chosen.forward(lookup, False)[0]
    return out


def _inference_fake(
    weights: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    spec: str,
    backend: str | None,
) -> torch.Tensor:
    # Inputs are checked when the program runs: a check here would become a bound of its dynamic sizes.
    known = spec_of_text(spec)
    batch = (offsets.shape[0] - 1) // known.layout.features
    height = indices.shape[0] if known.pooling == "none" else batch
    return weights.new_empty((height, known.output_width), dtype=known.output_dtype)


_library.impl("inference", _inference, "CompositeExplicitAutograd")
torch.library.register_fake("tbe::inference", _inference_fake, lib=_library)
