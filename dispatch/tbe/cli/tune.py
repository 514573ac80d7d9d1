"""``tbe tune``: the options and the tables. What searches is imported when the command runs."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tbe.bench.errors import BenchError

from .bench import Device, Json, Repeats, Scale
from .device import chosen_device

if TYPE_CHECKING:
    from tbe.tune_device import Result, TuneOptions

DIRECTORY = Path("tbe-configs")


def tune(
    device: Device = None,
    backend: Annotated[str | None, typer.Option(help="Backend to tune; default what serves the device.")] = None,
    workloads: Annotated[
        str | None, typer.Option(help="Names and tags of bench workloads; default a set of seven.")
    ] = None,
    scale: Scale = 1.0,
    time_limit: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds after which no new measurement is started.")
    ] = None,
    repeats: Repeats = 11,
    fields: Annotated[str | None, typer.Option(help="Search only these settings, comma-separated.")] = None,
    out: Annotated[
        Path | None, typer.Option(help=f"File for the winner; default {DIRECTORY}/BACKEND-DEVICE.json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Search a backend's settings on a device, and write the fastest as a file for TBE_CONFIG_DIR."""
    from tbe.bench.workloads import select
    from tbe.tune import TuneError
    from tbe.tune_device import DEFAULT_WORKLOADS, TuneOptions, chosen_backend

    try:
        if not 0 < scale <= 1:
            raise TuneError(f"--scale must be in (0, 1], got {scale:g}")
        target = chosen_device(device)
        options = TuneOptions(
            backend=chosen_backend(backend, target),
            device=target,
            workloads=tuple(select(DEFAULT_WORKLOADS if workloads is None else workloads)),
            repeats=repeats,
            scale=scale,
            time_limit=time_limit,
            fields=None if fields is None else tuple(f.strip() for f in fields.split(",") if f.strip()),
        )
        _run(options, out, as_json)
    except (TuneError, BenchError, OSError) as error:
        typer.echo(f"tbe tune: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("interrupted; nothing was written: --time-limit ends a search and keeps its best", err=True)
        raise typer.Exit(130) from None


def _run(options: TuneOptions, out: Path | None, as_json: bool) -> None:
    """Search with a progress bar on stderr, write the file, show what was tried."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tbe import probe
    from tbe.tune_device import space, tune
    from tbe_core.device_files import write

    space(options)  # a refusal comes before a directory is made
    caps = probe.capabilities(options.device)
    if out is None:
        out = DIRECTORY / f"{options.backend}-{re.sub(r'[^a-z0-9]+', '-', caps.name.lower()).strip('-')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    screen = Console(stderr=True)
    if options.device.type == "cpu":
        screen.print("wall time on the CPU: the winner is for trying the command, and says nothing about a GPU")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("inputs", total=None)

        def tick(done: int, expected: int, what: str) -> None:
            bar.update(task, completed=done, total=expected, description=what)

        result = tune(options, tick)
    write(out, options.backend, result.caps, result.config)
    if as_json:
        typer.echo(json.dumps(_plain(result, out), allow_nan=False))
    else:
        _print(result, out)


def _plain(result: Result, out: Path) -> dict[str, Any]:
    found = result.found
    return {
        "file": str(out),
        "device": result.caps.name,
        "complete": found.complete,
        "start": found.start.to_dict(),
        "winner": result.config.to_dict(),
        "changed": {name: list(values) for name, values in found.changed.items()},
        "trials": [asdict(trial) for trial in found.trials],
        "final": result.final,
        "notes": list(result.notes),
    }


def _print(result: Result, out: Path) -> None:
    from rich.table import Table

    from tbe.bench.report import console

    screen, found = console(), result.found
    tried = Table("pass", "setting", "value", "present", "time", "present's", "verdict", title="Tried")
    tried.caption = "time: geometric mean over the workloads, relative to the configuration at the start"
    tried.title_justify = tried.caption_justify = "left"
    for trial in found.trials:
        score = "" if trial.score is None else f"{trial.score:.3f}"
        cells = (trial.affects, trial.field, str(trial.value), str(trial.present), score)
        tried.add_row(*cells, f"{trial.present_score:.3f}", trial.verdict.replace("[", "\\["))
    screen.print(tried)
    if result.final is not None:
        names = list(next(iter(result.final.values())))
        final = Table("workload", *result.final, title="The winner's time over the start's", title_justify="left")
        for name in names:
            final.add_row(name, *(f"{times[name]:.3f}" for times in result.final.values()))
        screen.print(final)
    changes = [f"{name}: {before} -> {after}" for name, (before, after) in found.changed.items()]
    lines = [*result.notes, *(changes or ["nothing was faster than the present configuration"])]
    lines += [] if found.complete else ["the time limit ended the search before everything was tried"]
    for line in [*lines, f"written to {out}: set TBE_CONFIG_DIR={out.parent.resolve()} to use it"]:
        screen.print(line, markup=False, soft_wrap=True)
