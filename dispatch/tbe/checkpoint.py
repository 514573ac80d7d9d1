"""Checkpoints of tables that do not fit in memory twice: saved and loaded a bounded piece at a time.

``state_dict`` and ``load_state_dict`` are torch's own way; this is the one for files, and for checkpoints that
fit only after a table was renamed or a dtype converted, which is done when it is asked for and not otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from . import hyper
from .module import TableBatchedEmbeddingBags
from .sources import Found, Source, TensorSource, is_safetensors, open_file, write_pieces, write_safetensors


def save_checkpoint(emb: TableBatchedEmbeddingBags, path: str | os.PathLike[str], *, prefix: str = "") -> None:
    """Write what ``emb.state_dict(prefix=prefix)`` holds; needs memory for a small piece of one table only.

    Args:
        emb: the module, on any device.
        path: a file that ends in ``.safetensors``, written under another name and moved over an older one when
            complete; any other path is a directory in the format of ``torch.distributed.checkpoint``.
        prefix: in front of every name, such as ``"model.emb."``.

    Raises:
        FileExistsError: the directory holds a checkpoint; it could not be replaced at once.
        OSError: the path cannot be written.
    """
    views = {prefix + name: view.detach() for name, view in emb._named_views().items()}
    write = write_safetensors if is_safetensors(path) else write_pieces
    write(views, Path(path))


def load_checkpoint(
    emb: TableBatchedEmbeddingBags,
    source: Mapping[str, Any] | str | os.PathLike[str],
    *,
    cast: bool = False,
    rename: Mapping[str, str] | None = None,
    prefix: str = "",
    states: bool = True,
) -> None:
    """Load in place, all of it or, when anything does not fit, nothing.

    Args:
        emb: the module, on any device and backend.
        source: a state dict, a ``.safetensors`` file, or a directory of ``torch.distributed.checkpoint``.
        cast: convert dtypes, rounding to nearest. Without it another dtype is refused.
        rename: table name in the checkpoint to table name in the module.
        prefix: of the names to load, as in ``save_checkpoint``; names without it are not looked at.
        states: False loads the weights alone: optimizer state, hyper-parameters and counters stay.

    Raises:
        ValueError: with every reason, which names the table, what was found and what was expected; also for a
            cast under which a finite value would become infinite.
        OSError: the path cannot be read.
    """
    opened: Source = TensorSource(source) if isinstance(source, Mapping) else open_file(Path(source))
    found = {k.removeprefix(prefix): k for k in opened.entries if k.startswith(prefix)}
    reasons, names = _renamed(emb, found, dict(rename or {}))
    _refuse(reasons)
    wanted = {n: v for n, v in emb._named_views().items() if states or n.endswith(".weight")}
    reasons = _unknown_tables(emb, names)
    targets = {}
    for name, view in wanted.items():
        entry = opened.entries[found[names[name]]] if name in names else None
        reason = _misfit(name, view, entry, cast, [n for n in names if _table(n) == _table(name)])
        if reason is not None:
            reasons.append(reason)
        elif name in names:
            targets[found[names[name]]] = view
    reasons += [f"{n!r} of the checkpoint: the module has no such value" for n in _strays(emb, names) if states]
    _refuse(reasons)
    for key in opened.overflowing({key: view.dtype for key, view in targets.items()}):
        reasons.append(f"{key!r} has values beyond the range of {targets[key].dtype}: expected a wider dtype")
    _refuse(reasons)
    with torch.no_grad():
        opened.read(targets)
    hyper.reread(emb)


def _refuse(reasons: list[str]) -> None:
    if reasons:
        told = "".join(f"\n- {reason}" for reason in reasons)
        raise ValueError(f"the checkpoint does not fit, nothing was loaded:{told}")


def _table(name: str) -> str:
    """Of a value ``<table>.<what>``; the names of values outside tables have no dot."""
    return name.partition(".")[0]


def _tables(emb: TableBatchedEmbeddingBags) -> list[str]:
    return [table.name for table in emb.spec.layout.tables]


def _renamed(
    emb: TableBatchedEmbeddingBags, found: Mapping[str, str], rename: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Reasons against ``rename``; and the module's name of every value to its name in the checkpoint."""
    reasons: list[str] = []
    names: dict[str, str] = {}
    held = {_table(name) for name in found if "." in name}
    for old, new in rename.items():
        for owner, name, known in (("checkpoint", old, held), ("module", new, set(_tables(emb)))):
            if name not in known:
                asked = f"rename={{{old!r}: {new!r}}}"
                reasons.append(f"{asked}: the {owner} has no table {name!r}, only {_list(known)}")
    for name in found:
        table, dot, what = name.partition(".")
        mapped = rename.get(table, table) + dot + what if dot else name
        if mapped in names:
            reasons.append(f"{name!r} and {names[mapped]!r} of the checkpoint are both named {mapped!r} here")
        names[mapped] = name
    return reasons, names


def _unknown_tables(emb: TableBatchedEmbeddingBags, names: Mapping[str, str]) -> list[str]:
    """Tables of the checkpoint that the module has not."""
    unknown = {_table(name) for name in names if "." in name} - set(_tables(emb))
    return [
        f"table {table!r} of the checkpoint: the module has no such table, expected {_list(_tables(emb))}, or "
        f"rename={{{table!r}: ...}}"
        for table in sorted(unknown)
    ]


def _strays(emb: TableBatchedEmbeddingBags, names: Mapping[str, str]) -> list[str]:
    """Values of the checkpoint that have no place, in tables that the module has and outside tables."""
    known, tables = emb._named_views(), _tables(emb)
    return [n for n in names if n not in known and ("." not in n or _table(n) in tables)]


def _misfit(name: str, view: torch.Tensor, entry: Found | None, cast: bool, siblings: list[str]) -> str | None:
    """Why a value of the checkpoint cannot be loaded into ``view``, or None."""
    table, dot, what = name.partition(".")
    place = f"table {table!r}, {what}" if dot else name
    expected = f"expected {list(view.shape)} {view.dtype}"
    if entry is None:
        if not siblings:
            return f"{f'table {table!r}' if dot else name}: the checkpoint has none, {expected}"
        return f"{place}: the checkpoint has only {_list(siblings)}, {expected}; states=False loads weights alone"
    if entry.dtype is None:
        return f"{place}: {entry.kind} in the checkpoint, {expected}"
    said = f"{place}: {list(entry.shape)} {entry.dtype} in the checkpoint, {expected}"
    if tuple(entry.shape) != tuple(view.shape):
        if dot and entry.shape[1:] == tuple(view.shape[1:]) and entry.shape[:1] < tuple(view.shape[:1]):
            said += f"; tbe.resized grows a module that was loaded with {entry.shape[0]} rows"
        return said
    if entry.dtype != view.dtype and not (entry.dtype.is_floating_point and view.dtype.is_floating_point):
        return said
    if entry.dtype != view.dtype and not cast:
        return said + "; cast=True converts it"
    return None


def _list(names: Any) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"
