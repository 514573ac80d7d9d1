"""``tbe predict``: the times that memory alone would allow on a device that need not be there."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tbe.bench.errors import BenchError
from tbe.bench.model import MEMORY, Prediction, predict
from tbe_core.compiled import CompiledKernel
from tbe_core.devices import DEVICES

from .compile import PLAIN_WIDTH

if TYPE_CHECKING:
    from rich.table import Table

Device = Annotated[str, typer.Option(help=f"One of: {', '.join(MEMORY)}.")]
Workloads = Annotated[str, typer.Option(help="Names and tags of `tbe bench list`, comma-separated.")]
Kernels = Annotated[
    Path | None,
    typer.Option(help="What `tbe compile --json` printed: adds the latency that its loads hide."),
]
Json = Annotated[bool, typer.Option("--json", help="A list of objects, one a workload and pass.")]


def predict_times(
    device: Device = "MI300X", workloads: Workloads = "base", kernels: Kernels = None, as_json: Json = False
) -> None:
    """Show bandwidth-limited times of the forward and the update. Nothing is run; docs/amd.md says how far
    off they are on an H200."""
    from tbe.bench.workloads import select

    if device not in MEMORY:
        raise _refused(f"--device {device}: expected one of {', '.join(MEMORY)}")
    try:
        chosen, compiled = select(workloads), [] if kernels is None else read(kernels)
    except (BenchError, ValueError) as error:
        raise _refused(str(error)) from None
    found = [p for w in chosen for p in predict(w, device, DEVICES[device], compiled)]
    if as_json:
        values = [asdict(p) | {"seconds": p.seconds, "bound": p.bound} for p in found]
        typer.echo(json.dumps(values, indent=2))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    console.print(_table(device, found))


def read(path: Path) -> list[CompiledKernel]:
    """The rows of a file of ``tbe compile --json``; raises ``ValueError`` that names the file."""
    try:
        return [CompiledKernel(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"--kernels {path}: expected what `tbe compile --json` prints: {error}") from None


def _refused(message: str) -> typer.Exit:
    typer.echo(f"tbe predict: {message}", err=True)
    return typer.Exit(2)


def _table(device: str, found: list[Prediction]) -> Table:
    from rich.table import Table

    table = Table(title=f"{device}, bounds from {MEMORY[device].source}", title_justify="left")
    table.add_column("workload")
    table.add_column("pass")
    for name in ("us", "memory, MB", "cache, MB", "hides, ns"):
        table.add_column(name, justify="right")
    table.add_column("bound by")
    for p in found:
        hidden = "-" if p.hidden_seconds is None else f"{p.hidden_seconds * 1e9:,.0f}"
        cells = f"{p.seconds * 1e6:,.1f}", f"{p.memory_bytes / 1e6:,.1f}", f"{p.cache_bytes / 1e6:,.1f}", hidden
        table.add_row(p.workload, p.work, *cells, p.bound)
    return table
