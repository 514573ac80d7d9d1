"""Rows of a living module: initialise, reset, and grow the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from tbe_core import Table

from .init import UNWRITTEN, Init, Initialiser, fill, fill_from, normal, per_table
from .module import TableBatchedEmbeddingBags


def initialise(
    emb: TableBatchedEmbeddingBags, init: Init, *, generator: torch.Generator | None = None
) -> TableBatchedEmbeddingBags:
    """Write every row anew, of the tables that ``init`` names or of all; optimizer state stays. Returns ``emb``.

    Args:
        init: one of ``tbe.init`` for all tables, or by table name.
        generator: on the tables' device; the same seed gives the same rows. Default: torch's own.

    Raises:
        ValueError: a table or an initialiser does not fit; nothing has been changed.
    """
    emb._initialise(per_table(init, emb.spec.layout.tables, emb.spec.weights_dtype), generator)
    return emb


def reset_rows(
    emb: TableBatchedEmbeddingBags,
    table: str | int,
    ids: torch.Tensor | Sequence[int],
    init: Initialiser | None,
    generator: torch.Generator | None,
) -> None:
    """See ``TableBatchedEmbeddingBags.reset_rows``."""
    at, known = table_number(emb, table)
    rows = _checked_ids(ids, known, emb.weights.device)
    chosen = emb._init.get(known.name, normal()) if init is None else init
    if chosen is None:
        raise ValueError(f"init=None: table {known.name!r} was made from a tensor, expected an initialiser")
    per_table({known.name: chosen}, (known,), emb.spec.weights_dtype)
    with torch.no_grad():
        fill(emb.split_embedding_weights()[at], chosen, rows, generator)
        for state in emb.split_optimizer_states()[at].values():
            state[rows] = 0


def table_number(emb: TableBatchedEmbeddingBags, table: str | int) -> tuple[int, Table]:
    """A table by name or number; ``ValueError`` where there is none."""
    tables = emb.spec.layout.tables
    names = [t.name for t in tables]
    if isinstance(table, str) and table in names:
        return names.index(table), tables[names.index(table)]
    if isinstance(table, int) and not isinstance(table, bool) and 0 <= table < len(tables):
        return table, tables[table]
    raise ValueError(
        f"table={table!r}: expected a number below {len(tables)} or one of {', '.join(map(repr, names))}"
    )


def _checked_ids(ids: torch.Tensor | Sequence[int], table: Table, device: torch.device) -> torch.Tensor:
    """Distinct rows, ascending, int64 on ``device``."""
    given = torch.as_tensor(ids)
    if not given.numel():
        return torch.empty(0, dtype=torch.int64, device=device)
    if given.dim() != 1 or given.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids is {list(given.shape)} {given.dtype}: expected one dimension of int32 or int64")
    wrong = (given < 0) | (given >= table.rows)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ValueError(
            f"ids[{at}]={int(given[at])}: expected a row of table {table.name!r}, in [0, {table.rows}); "
            f"{int(wrong.sum())} wrong of {given.numel()}"
        )
    distinct: torch.Tensor = given.to(device, torch.int64).unique()
    return distinct


def resized(
    emb: TableBatchedEmbeddingBags,
    rows: Mapping[str, int],
    *,
    init: Init | None = None,
    generator: torch.Generator | None = None,
) -> TableBatchedEmbeddingBags:
    """A new module whose tables have more rows; ``emb`` stays as it is, and both exist until it is dropped.

    Old rows, their optimizer state, hyper-parameters and counters are kept bit for bit; new rows are initialised,
    their state is zero. Optimizers, compiled models and captured graphs of ``emb`` do not know the new module.

    Args:
        rows: table name to its new number of rows, not below the present one.
        init: of the new rows: one of ``tbe.init``, or by table name. Default: what the tables were made with.
        generator: on the tables' device.

    Raises:
        ValueError: a table or a number of rows is wrong.
    """
    spec = emb.spec
    for name, count in rows.items():
        table = table_number(emb, str(name))[1]
        if isinstance(count, bool) or not isinstance(count, int) or count < table.rows:
            raise ValueError(f"rows[{name!r}]={count!r}: expected an integer >= {table.rows}, its rows now")
    tables = tuple(Table(t.name, rows.get(t.name, t.rows), t.dim) for t in spec.layout.tables)
    chosen: dict[str, Initialiser | None] = {t.name: emb._init.get(t.name, normal()) for t in tables}
    if init is not None:
        chosen.update(per_table(init, tables, spec.weights_dtype))
    for old, new in zip(spec.layout.tables, tables, strict=True):
        if new.rows > old.rows and chosen[new.name] is None:
            raise ValueError(f"init=None: table {new.name!r} was made from a tensor, expected an initialiser")
    kept = (f.name for f in fields(spec) if f.name not in ("layout", "frozen"))
    options: dict[str, Any] = {name: getattr(spec, name) for name in kept}
    grown = TableBatchedEmbeddingBags(
        tables,
        spec.layout.feature_table_map,
        **options,
        backend=emb.requested_backend,
        device=emb.weights.device,
        init=UNWRITTEN,
    )
    grown.freeze(*emb.frozen)
    with torch.no_grad():
        targets = grown._named_views()
        for name, view in emb._named_views().items():
            target = targets[name][: view.shape[0]] if view.dim() else targets[name]
            target.copy_(view)
        for old, new, weight in zip(spec.layout.tables, tables, grown.split_embedding_weights(), strict=True):
            make = chosen[new.name]
            if make is not None and new.rows > old.rows:
                fill_from(weight, make, old.rows, generator)
    grown._init = dict(emb._init)
    grown._hyper_values = list(emb._hyper_values)
    trains = dict(emb.named_parameters())
    for name, parameter in grown.named_parameters():
        parameter.requires_grad_(trains[name].requires_grad)
    return grown.train(emb.training)
