"""``tbe``: the command line's root. Commands import what they need when they run."""

from __future__ import annotations

import typer

from .bench import bench_app
from .compile import compile_kernels
from .doctor import doctor
from .predict import predict_times
from .train import train
from .tune import tune

app = typer.Typer(help="Portable table-batched embeddings.", no_args_is_help=True, add_completion=False)
app.command("doctor")(doctor)
app.command("train")(train)
app.command("tune")(tune)
app.command("compile")(compile_kernels)
app.command("predict")(predict_times)
app.add_typer(bench_app, name="bench")

if __name__ == "__main__":
    app()
