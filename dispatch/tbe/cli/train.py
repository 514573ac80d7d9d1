"""``tbe train``: the options. The program itself is imported when the command runs, not for ``--help``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tbe.train.config import DENSE_OPTIMIZERS, DEVICES, SPARSE_OPTIMIZERS, TrainConfig, parse_widths
from tbe.train.errors import ConfigError, TrainError

_D = TrainConfig
_Int = int | None
_One = " | ".join
_BOTTOM_MLP = ",".join(map(str, _D.bottom_mlp))
_TOP_MLP = ",".join(map(str, _D.top_mlp))

Data = Annotated[Path | None, typer.Option(help="Criteo-format file, plain or gzip; else synthetic clicks.")]
Epochs = Annotated[int, typer.Option(help="Passes over the training part.")]
BatchSize = Annotated[int, typer.Option(help="Clicks a step.")]
Dim = Annotated[int, typer.Option(help="Width of the embedding tables.")]
Rows = Annotated[int, typer.Option(help="Rows an embedding table; categories are hashed into them.")]
BottomMlp = Annotated[str, typer.Option(help="Hidden widths of the bottom MLP, comma-separated.")]
TopMlp = Annotated[str, typer.Option(help="Hidden widths of the top MLP, comma-separated.")]
SparseOptimizer = Annotated[str, typer.Option(help=f"Fused into the backward: {_One(SPARSE_OPTIMIZERS)}.")]
Lr = Annotated[float, typer.Option(help="Learning rate of the tables.")]
DenseOptimizer = Annotated[str, typer.Option(help=f"For the MLPs: {_One(DENSE_OPTIMIZERS)}.")]
DenseLr = Annotated[float, typer.Option(help="Learning rate of the MLPs.")]
Seed = Annotated[int, typer.Option(help="Decides initial weights, data order and synthetic clicks.")]
Device = Annotated[str, typer.Option(help=f"{_One(DEVICES)}, or cuda:N.")]
Backend = Annotated[str | None, typer.Option(help="Embedding backend; never replaced silently.")]
Holdout = Annotated[float, typer.Option(help="Share of clicks kept for evaluation; 0 for none.")]
RowsPerEpoch = Annotated[int, typer.Option(help="Synthetic training clicks an epoch.")]
ShuffleRows = Annotated[int, typer.Option(help="Clicks of a file shuffled at a time; bounds memory.")]
MaxMalformed = Annotated[int, typer.Option(help="Malformed rows an epoch to skip before giving up.")]
CheckpointPath = Annotated[Path | None, typer.Option(help="File, or directory for last.pt in it.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from --checkpoint.")]
CheckpointEvery = Annotated[_Int, typer.Option(help="Save every so many steps, besides every epoch's end.")]
MaxSteps = Annotated[_Int, typer.Option(help="Stop after so many steps, counted across resumes.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object an epoch on stdout, nothing else.")]


def train(
    data: Data = _D.data,
    epochs: Epochs = _D.epochs,
    batch_size: BatchSize = _D.batch_size,
    dim: Dim = _D.dim,
    rows: Rows = _D.rows,
    bottom_mlp: BottomMlp = _BOTTOM_MLP,
    top_mlp: TopMlp = _TOP_MLP,
    sparse_optimizer: SparseOptimizer = _D.sparse_optimizer,
    lr: Lr = _D.lr,
    dense_optimizer: DenseOptimizer = _D.dense_optimizer,
    dense_lr: DenseLr = _D.dense_lr,
    seed: Seed = _D.seed,
    device: Device = _D.device,
    backend: Backend = _D.backend,
    holdout: Holdout = _D.holdout,
    rows_per_epoch: RowsPerEpoch = _D.rows_per_epoch,
    shuffle_rows: ShuffleRows = _D.shuffle_rows,
    max_malformed: MaxMalformed = _D.max_malformed,
    checkpoint: CheckpointPath = _D.checkpoint,
    resume: Resume = _D.resume,
    checkpoint_every: CheckpointEvery = _D.checkpoint_every,
    max_steps: MaxSteps = _D.max_steps,
    as_json: Json = False,
) -> None:
    """Train a DLRM on Criteo-format clicks, or on synthetic ones, and report held-out AUC every epoch."""
    options = {name: value for name, value in locals().items() if name != "as_json"}
    try:
        options["bottom_mlp"] = parse_widths("--bottom-mlp", bottom_mlp)
        options["top_mlp"] = parse_widths("--top-mlp", top_mlp)
        config = TrainConfig(**options)
    except ConfigError as error:
        raise _refused(error) from None
    _run(config, as_json)


def _run(config: TrainConfig, as_json: bool) -> None:
    """Run the trainer; turn what the user can act on into one message and an exit code."""
    import tbe
    from tbe.train.loop import Trainer
    from tbe.train.report import Reporter

    try:
        Trainer(config, Reporter(as_json=as_json)).run()
    except (TrainError, tbe.BackendError) as error:
        raise _refused(error) from None
    except KeyboardInterrupt:
        typer.echo(f"interrupted; {_resume_hint(config)}", err=True)
        raise typer.Exit(130) from None


def _resume_hint(config: TrainConfig) -> str:
    from tbe.train.checkpoint import checkpoint_path

    if config.checkpoint is None:
        return "with --checkpoint PATH and --checkpoint-every STEPS a run can be resumed"
    if not checkpoint_path(config.checkpoint).exists():
        return "no checkpoint was written yet; --checkpoint-every STEPS writes them more often"
    return f"continue from the last checkpoint with --resume --checkpoint {config.checkpoint}"


def _refused(error: Exception) -> typer.Exit:
    typer.echo(f"tbe train: {error}", err=True)
    return typer.Exit(2)
