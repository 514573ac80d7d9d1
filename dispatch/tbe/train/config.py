"""Every option of a training run, checked once. Standard library only, so that the CLI can read defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from tbe.train.errors import ConfigError

SPARSE_OPTIMIZERS = ("rowwise_adagrad", "sgd")
DENSE_OPTIMIZERS = ("adam", "adagrad")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class TrainConfig:
    """Options of one run. Raises ``ConfigError`` when a value is out of range.

    ``rows`` is rows an embedding table, ``dim`` the width of all of them. ``rows_per_epoch`` counts synthetic
    training clicks and is unused with ``data``. ``holdout`` is the share of clicks kept for evaluation.
    ``shuffle_rows`` bounds the shuffle buffer of a file, in clicks. ``max_steps`` counts from the first step
    of the first epoch, across resumes.
    """

    data: Path | None = None
    epochs: int = 3
    batch_size: int = 128
    dim: int = 16
    rows: int = 100_000
    bottom_mlp: tuple[int, ...] = (64, 32)
    top_mlp: tuple[int, ...] = (64, 32)
    sparse_optimizer: str = "rowwise_adagrad"
    lr: float = 0.05
    dense_optimizer: str = "adam"
    dense_lr: float = 0.001
    seed: int = 0
    device: str = "cpu"
    backend: str | None = None
    holdout: float = 0.1
    rows_per_epoch: int = 40_000
    shuffle_rows: int = 16_384
    max_malformed: int = 100
    checkpoint: Path | None = None
    resume: bool = False
    checkpoint_every: int | None = None
    max_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "dim", "rows", "rows_per_epoch", "shuffle_rows"):
            _at_least(name, getattr(self, name), 1)
        for name in ("checkpoint_every", "max_steps"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("seed", "max_malformed"):
            _at_least(name, getattr(self, name), 0)
        for name in ("lr", "dense_lr"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{_option(name)} must be a positive number, got {value}")
        if not 0 <= self.holdout < 1:
            raise ConfigError(f"--holdout must be in [0, 1), got {self.holdout}")
        for name in ("bottom_mlp", "top_mlp"):
            if any(width < 1 for width in getattr(self, name)):
                raise ConfigError(f"{_option(name)} must hold widths of 1 or more, got {getattr(self, name)}")
        _one_of("sparse_optimizer", self.sparse_optimizer, SPARSE_OPTIMIZERS)
        _one_of("dense_optimizer", self.dense_optimizer, DENSE_OPTIMIZERS)
        _one_of("device", self.device.partition(":")[0], DEVICES)
        if self.checkpoint is None and (self.resume or self.checkpoint_every is not None):
            option = "--resume" if self.resume else "--checkpoint-every"
            raise ConfigError(f"{option} needs --checkpoint PATH")

    def identity(self) -> dict[str, int | float | str]:
        """The options that decide the bits of the result, by option name; a resume must repeat them.

        Left out on purpose: ``epochs`` and ``max_steps`` (a run may be extended), ``device`` and ``backend``
        (a run may move), and whatever only concerns reporting or files.
        """
        fields: dict[str, int | float | str] = {
            "--batch-size": self.batch_size,
            "--dim": self.dim,
            "--rows": self.rows,
            "--bottom-mlp": ",".join(map(str, self.bottom_mlp)),
            "--top-mlp": ",".join(map(str, self.top_mlp)),
            "--sparse-optimizer": self.sparse_optimizer,
            "--lr": self.lr,
            "--dense-optimizer": self.dense_optimizer,
            "--dense-lr": self.dense_lr,
            "--seed": self.seed,
            "--holdout": self.holdout,
        }
        if self.data is None:
            fields["--rows-per-epoch"] = self.rows_per_epoch
        else:
            fields["--shuffle-rows"] = self.shuffle_rows
        return fields


def parse_widths(option: str, text: str) -> tuple[int, ...]:
    """``"64,32"`` to ``(64, 32)``; an empty text is no hidden layer. Raises ``ConfigError`` otherwise."""
    if not text.strip():
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} must be widths such as 64,32, got {text!r}") from None


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{_option(name)} must be {least} or more, got {value}")


def _one_of(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ConfigError(f"{_option(name)} must be one of {', '.join(valid)}, got {value!r}")
