"""``tbe bench``: the options. What runs is imported when a command does, so that ``--help`` stays fast."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tbe.bench.errors import BenchError

from .device import chosen_device

if TYPE_CHECKING:
    import torch

    from tbe.bench.runner import RunOptions


class _RunByDefault(TyperGroup):
    """``tbe bench`` and ``tbe bench --repeats 5`` mean ``tbe bench run``, with its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["run", *args]
        return super().parse_args(ctx, args)


_HELP = "Measure this library and its peers; every result passes a correctness gate first. Default: run."
bench_app = typer.Typer(cls=_RunByDefault, help=_HELP)

WORKLOADS, IMPLEMENTATIONS, REPEATS, DB = "base,weighted", "ours,fbgemm", 11, Path("tbe-bench.db")

Workloads = Annotated[
    str, typer.Option(help="Names, the tags base, weighted, fp16_output, variant, published; or all.")
]
Implementations = Annotated[
    str, typer.Option(help="ours, ours:all, ours:BACKEND, fbgemm, torch, all; comma-separated.")
]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:N or cpu; default cuda where there is one.")]
Database = Annotated[Path, typer.Option("--db", help="SQLite file to add the run to; made when missing.")]
Repeats = Annotated[int, typer.Option(min=1, help="Samples a metric; the median is reported.")]
Scale = Annotated[float, typer.Option(help="Shrink bags and rows by this factor, in (0, 1].")]
Seed = Annotated[int, typer.Option(min=0, help="Decides inputs, initial weights and samples.")]
TimeLimit = Annotated[
    float | None, typer.Option(min=0.0, help="Seconds after which no new measurement is started.")
]
Graph = Annotated[bool, typer.Option(help="Also capture a step of ours in a CUDA graph.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON value on stdout, nothing else.")]


@bench_app.command()
def run(
    workloads: Workloads = WORKLOADS,
    implementations: Implementations = IMPLEMENTATIONS,
    device: Device = None,
    db: Database = DB,
    repeats: Repeats = REPEATS,
    scale: Scale = 1.0,
    seed: Seed = 0,
    time_limit: TimeLimit = None,
    graph: Graph = True,
    as_json: Json = False,
) -> None:
    """Measure implementations on workloads and add the results to a database as they come."""
    from tbe.bench.implementations import resolve
    from tbe.bench.runner import RunOptions
    from tbe.bench.workloads import select

    with _refusals():
        if not 0 < scale <= 1:
            raise BenchError(f"--scale must be in (0, 1], got {scale:g}")
        target = chosen_device(device)
        options = RunOptions(
            workloads=tuple(select(workloads)),
            implementations=tuple(resolve(implementations, target)),
            device=target,
            repeats=repeats,
            scale=scale,
            seed=seed,
            time_limit=time_limit,
            graph=graph,
        )
        _run(options, db, as_json)


def _run(options: RunOptions, db: Path, as_json: bool) -> None:
    """Run with a progress bar on stderr, then print what the database now has."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tbe.bench.queries import RunView
    from tbe.bench.report import as_json as report_json
    from tbe.bench.report import console, print_short
    from tbe.bench.runner import Runner, planned
    from tbe.bench.store import Store

    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Store(db, create=True) as store:
        with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
            total = planned(options.workloads, options.implementations)
            task = bar.add_task("copy speed", total=total)
            started = -1  # the tick before a measurement completes the one before it

            def tick(workload: str, implementation: str) -> None:
                nonlocal started
                started += 1
                bar.update(task, completed=started, description=f"{workload}  {implementation}")

            number = Runner(options, store, tick).run()
        view = RunView(store, number)
        if as_json:
            typer.echo(json.dumps({"db": str(db), **report_json(view)}, allow_nan=False))
        else:
            print_short(view, console())


@bench_app.command("list")
def list_(device: Device = None, as_json: Json = False) -> None:
    """Name the workloads and the implementations, and say why one cannot be used on this machine."""
    from tbe.bench.implementations import resolve
    from tbe.bench.workloads import catalogue

    with _refusals():
        target = chosen_device(device)
        known = catalogue()
        names = ["ours", *(f"ours:{name}" for name in _backends(target)), "fbgemm", "torch"]
        makers = [(maker.name, maker.unavailable(target)) for maker in resolve(",".join(names), target)]
        if as_json:
            value = {
                "workloads": [{"name": w.name, "tags": list(w.tags), **w.parameters()} for w in known],
                "implementations": [{"name": name, "unavailable": reason} for name, reason in makers],
            }
            typer.echo(json.dumps(value))
            return
        width = max(len(workload.name) for workload in known)
        typer.echo("workloads")
        for workload in known:
            typer.echo(f"  {workload.name:<{width}}  {workload.tags[0]:<11}  {workload.summary()}")
        typer.echo(f"implementations on {target}")
        for name, reason in makers:
            typer.echo(f"  {name:<{width}}  {'available' if reason is None else reason}")


@bench_app.command()
def report(
    db: Annotated[Path, typer.Argument(help="Database of bench results.")],
    html: Annotated[Path | None, typer.Option(help="Also write one self-contained page here.")] = None,
    run_id: Annotated[int | None, typer.Option("--run", help="Number of the run; default the newest.")] = None,
    as_json: Json = False,
) -> None:
    """Show a run: speed-ups, times against their floors, memory, and what has no figures and why."""
    from tbe.bench.page import render
    from tbe.bench.queries import RunView
    from tbe.bench.report import as_json as report_json
    from tbe.bench.report import console, print_report
    from tbe.bench.store import Store

    with _refusals(), Store(db) as store:
        view = RunView(store, run_id)
        if html is not None:
            html.write_text(render(view), encoding="utf-8")
        if as_json:
            typer.echo(json.dumps(report_json(view), allow_nan=False))
        else:
            print_report(view, console())
        if html is not None:
            typer.echo(f"page written to {html}", err=True)


def _backends(device: torch.device) -> list[str]:
    from tbe.bench.implementations import backend_reasons

    return list(backend_reasons(device))


@contextmanager
def _refusals() -> Iterator[None]:
    """Print what the user can act on as one message and exit with 2."""
    try:
        yield
    except (BenchError, OSError, sqlite3.OperationalError) as error:
        typer.echo(f"tbe bench: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("interrupted; what was measured is in the database: see tbe bench report", err=True)
        raise typer.Exit(130) from None
