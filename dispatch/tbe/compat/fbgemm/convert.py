"""Checkpoints of FBGEMM_GPU's fused module as this library's own, and back; and from a GPU's names to the CPU's.

``python -m tbe.compat.fbgemm.convert IN OUT --to native --optimizer rowwise_adagrad --hyper lr=0.05`` does
it with files of ``torch.save``. The drop-in itself needs none of this: it reads and writes FBGEMM_GPU's names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tbe.module import TableBatchedEmbeddingBags
from tbe_core import Layout
from tbe_core.dtypes import STATE_DTYPE
from tbe_core.optimizers import REGISTRY, Optimizer

from . import arguments, optimizers, state
from .enums import EmbeddingLocation

app = typer.Typer(add_completion=False)

State = Mapping[str, torch.Tensor]
SUFFIXES = {name: location for location, name in arguments.LOCATIONS.items()}


def _entry(found: State, name: str) -> torch.Tensor:
    if name not in found:
        raise ValueError(f"{name!r} is missing: expected a state dict of FBGEMM_GPU's fused module")
    return found[name]


def layout_of(fbgemm: State, table_names: Sequence[str] | None = None) -> Layout:
    """Tables and feature map of a checkpoint, from what it holds about them.

    Args:
        fbgemm: ``state_dict()`` of FBGEMM_GPU's fused module or of the drop-in.
        table_names: one a table. Default: ``table_0``, ...

    Raises:
        ValueError: an entry is missing, or the names are not as many as the tables.
    """
    bases = _entry(fbgemm, "hash_size_cumsum").tolist()[:-1]
    rows = _entry(fbgemm, "rows_per_table").tolist()
    dims = _entry(fbgemm, "D_offsets").diff().tolist()
    # A table of no rows could not be told from its neighbour; Table refuses it anyway.
    order = sorted({*bases})
    features = [order.index(base) for base in bases]
    sizes = [(rows[features.index(t)], dims[features.index(t)]) for t in range(len(order))]
    return Layout.make(arguments.sized(table_names, sizes), features)


def location_of(fbgemm: State) -> EmbeddingLocation:
    """Where a checkpoint's tables were; raises ``ValueError`` unless all were on one kind of device."""
    full = [name for name in ("host", "dev", "uvm") if _entry(fbgemm, f"weights_{name}").numel()]
    if len(full) != 1 or full[0] not in SUFFIXES:
        raise ValueError(
            f"weights are in {', '.join('weights_' + name for name in full) or 'no tensor'}: expected all of "
            "them in weights_host or in weights_dev"
        )
    return SUFFIXES[full[0]]


def to_native(
    fbgemm: State, optimizer: Optimizer, table_names: Sequence[str] | None = None
) -> dict[str, torch.Tensor]:
    """A state dict for ``TableBatchedEmbeddingBags`` with the same tables.

    Args:
        fbgemm: ``state_dict()`` of FBGEMM_GPU's fused module or of the drop-in.
        optimizer: what the module has: its hyper-parameters are in no checkpoint of FBGEMM_GPU.
        table_names: one a table, in order. Default: ``table_0``, ...

    Returns:
        Views of ``fbgemm``'s tensors, under this library's names.

    Raises:
        ValueError: an entry is missing, or has not the size that this optimizer's state has.
    """
    layout, suffix = layout_of(fbgemm, table_names), arguments.LOCATIONS[location_of(fbgemm)]
    found = {"hyper": torch.tensor(optimizer.hyper_values(), dtype=STATE_DTYPE)}
    if optimizer.COUNTS_STEPS:
        found["step"] = _entry(fbgemm, "iter")[0]
        found["rounding_seed"] = torch.zeros_like(found["step"])
    weights = state.unflatten(layout, "element", _entry(fbgemm, f"weights_{suffix}"))
    for table, weight in zip(layout.tables, weights, strict=True):
        found[f"{table.name}.weight"] = weight
    for spec, (name, kind) in zip(optimizer.STATE, state.moments(optimizer).items(), strict=True):
        value, expected = _entry(fbgemm, f"{name}_{suffix}"), state.starts(layout, kind)[-1]
        if value.numel() != expected:
            raise ValueError(
                f"{name}_{suffix} has {value.numel()} values: expected {expected}, as "
                f"{type(optimizer).__name__} has"
            )
        for table, view in zip(layout.tables, state.unflatten(layout, kind, value), strict=True):
            found[f"{table.name}.{spec.name}"] = view
    return found


def from_native(
    emb: TableBatchedEmbeddingBags, location: EmbeddingLocation | None = None
) -> dict[str, torch.Tensor]:
    """A state dict that FBGEMM_GPU's fused module and the drop-in with the same tables load.

    Args:
        emb: the module; its optimizer must be one that FBGEMM_GPU has.
        location: ``HOST`` or ``DEVICE``: where the loading module's tables are. Default: as ``emb``'s are.

    Raises:
        ValueError: FBGEMM_GPU has not this optimizer.
    """
    layout, optimizer, dtype = emb.spec.layout, emb.spec.optimizer, emb.spec.weights_dtype
    if type(optimizer) not in optimizers.CLASSES.values():
        known = ", ".join(cls.__name__ for cls in optimizers.CLASSES.values())
        raise ValueError(f"emb has the optimizer {optimizer}: expected one of FBGEMM_GPU's, {known}")
    on_cpu = emb.weights.device.type == "cpu"
    where = location or (EmbeddingLocation.HOST if on_cpu else EmbeddingLocation.DEVICE)
    suffix = arguments.LOCATIONS[where]
    found = state.structure(layout, optimizer, dtype, where)
    found["placeholder_autograd_tensor"] = torch.empty(0)
    found["bounds_check_warning"] = torch.zeros(1, dtype=torch.int64)
    found[f"weights_{suffix}"] = state.flat(layout, "element", emb.weights, emb.split_embedding_weights())
    split = emb.split_optimizer_states()
    for nth, (name, kind) in enumerate(state.moments(optimizer).items()):
        views = [list(of_table.values())[nth] for of_table in split]
        found[f"{name}_{suffix}"] = state.flat(layout, kind, emb.states[nth], views)
    if optimizer.COUNTS_STEPS and emb.counter is not None:
        found["iter"] = emb.counter[:1]
    return found


def relocated(fbgemm: State, location: EmbeddingLocation) -> dict[str, torch.Tensor]:
    """The same checkpoint for tables at ``location``, a GPU's or the CPU's. Raises as ``location_of``."""
    before, after = arguments.LOCATIONS[location_of(fbgemm)], arguments.LOCATIONS[location]
    found = dict(fbgemm)
    for name in ("weights", *state.MOMENTS):
        if f"{name}_{before}" not in fbgemm or before == after:
            continue
        found[f"{name}_{after}"] = fbgemm[f"{name}_{before}"]
        found[f"{name}_{before}"] = fbgemm[f"{name}_{before}"].new_empty(0)
        placements = _entry(fbgemm, f"{name}_placements")
        found[f"{name}_placements"] = torch.full_like(placements, location.value)
    return found


def _optimizer(name: str, hyper: Sequence[str]) -> Optimizer:
    """Raises ``ValueError`` for an unknown name, a hyper-parameter that it has not, or a bad value."""
    if name not in REGISTRY:
        raise ValueError(f"--optimizer {name!r}: expected one of {', '.join(REGISTRY)}")
    known = {field.name: field.type for field in fields(REGISTRY[name])}
    values: dict[str, Any] = {}
    for text in hyper:
        key, _, value = text.partition("=")
        if key not in known:
            raise ValueError(f"--hyper {text}: expected name=value with one of {', '.join(known)}")
        values[key] = float(value) if known[key] == "float" else value
    return REGISTRY[name](**values)


@app.command()
def convert_file(
    source: Annotated[Path, typer.Argument(help="A state dict of FBGEMM_GPU's fused module, by torch.save.")],
    target: Annotated[Path, typer.Argument(help="The file to write, for torch.load.")],
    to: Annotated[str, typer.Option(help="native: this library's names; host or dev: FBGEMM_GPU's.")],
    optimizer: Annotated[str, typer.Option(help="With native: which one, such as rowwise_adagrad.")] = "",
    hyper: Annotated[
        list[str], typer.Option(help="With native: a hyper-parameter as name=value, such as lr=0.05; repeatable.")
    ] = [],  # noqa: B006 - typer reads the default and makes a list of its own
    prefix: Annotated[str, typer.Option(help="In front of the module's names; others stay.")] = "",
) -> None:
    """Convert a checkpoint of FBGEMM_GPU's fused module, or of the drop-in."""
    if to not in ("native", *SUFFIXES):
        raise typer.BadParameter(f"--to {to}: expected native, {' or '.join(SUFFIXES)}")
    whole = torch.load(source, map_location="cpu", weights_only=True)
    mine = {name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)}
    try:
        made = to_native(mine, _optimizer(optimizer, hyper)) if to == "native" else relocated(mine, SUFFIXES[to])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    kept = {name: value for name, value in whole.items() if not name.startswith(prefix)}
    torch.save({**kept, **{prefix + name: value.clone() for name, value in made.items()}}, target)


if __name__ == "__main__":
    app()
