"""``tbe compile``: cross-compile every kernel of a backend for named targets, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tbe_core.compiled import CompiledKernel, CrossCompileError, FailedKernel

if TYPE_CHECKING:
    from rich.table import Table

TARGETS = "sm_80,sm_90,sm_100,gfx90a,gfx942,gfx950"
PLAIN_WIDTH = 200
"""Columns of the table where the output is no terminal."""

Backend = Annotated[str, typer.Option(help="Backend whose kernels are compiled.")]
Targets = Annotated[str, typer.Option(help="Comma-separated names; an unknown one lists all that are known.")]
Kernels = Annotated[str, typer.Option(metavar="SUBSTRING", help="Only rows whose kernel contains this.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Targets compiled side by side; default: one a CPU.")]
Json = Annotated[bool, typer.Option("--json", help="A list of objects, one a kernel and target.")]


def compile_kernels(
    backend: Backend = "triton",
    targets: Targets = TARGETS,
    kernels: Kernels = "",
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Show registers, spills, shared memory and the instructions that matter of every kernel and target."""
    from rich.console import Console

    names = [name.strip() for name in targets.split(",") if name.strip()]
    if not names:
        raise _refused("--targets names no target")
    try:
        rows = list(_with_progress(backend, names, kernels, jobs))
    except CrossCompileError as error:
        raise _refused(str(error)) from None
    rows.sort(key=lambda row: names.index(row.target))
    compiled = [row for row in rows if isinstance(row, CompiledKernel)]
    failed = [row for row in rows if isinstance(row, FailedKernel)]
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in compiled], indent=2))
    elif compiled:
        console = Console()
        if not console.is_terminal:
            console = Console(width=PLAIN_WIDTH)
        console.print(_table(compiled))
    for failure in failed:
        typer.echo(f"tbe compile: failed: {failure}", err=True)
    if failed:
        raise typer.Exit(1)
    if not rows:
        raise _refused(f"--kernels {kernels!r}: no kernel's name contains it")


def _refused(message: str) -> typer.Exit:
    typer.echo(f"tbe compile: {message}", err=True)
    return typer.Exit(2)


def _with_progress(
    backend: str, targets: list[str], kernels: str, jobs: int | None
) -> Iterator[CompiledKernel | FailedKernel]:
    """The rows; on stderr, where it is a terminal, the targets that are done and the kernels so far."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tbe.crosscompile import compile_targets

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("targets"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("0 kernels", total=len(set(targets)))
        rows = compile_targets(backend, targets, kernels, jobs, lambda target: progress.advance(task))
        for count, row in enumerate(rows, 1):
            progress.update(task, description=f"{count} kernels")
            yield row


def _table(rows: list[CompiledKernel]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"backend {rows[0].backend}", title_justify="left")
    table.add_column("target")
    table.add_column("kernel", overflow="fold")
    for name in ("registers", "spills", "shared", "occupancy"):
        table.add_column(name, justify="right")
    table.add_column("instructions", overflow="fold")
    for row in rows:
        table.add_row(
            row.target,
            Text(row.kernel),
            str(row.registers),
            Text(str(row.spills), style="bold red" if row.spills else ""),
            str(row.shared),
            "" if row.resident is None else f"{row.resident}/{row.most}",
            " ".join(f"{kind}={count}" for kind, count in row.instructions.items() if count),
        )
    return table
