"""Checkpoints of a training run: one file, replaced atomically, loaded without running code from it."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tbe.train.errors import CheckpointError

FORMAT = 1
DEFAULT_NAME = "last.pt"


@dataclass
class Checkpoint:
    """Everything a run needs to go on as if it had never stopped.

    ``step`` counts batches done within ``epoch`` (both from 0), ``global_step`` those of the run.
    ``loss_sum`` (float64 scalar) and ``loss_rows`` are the accumulators of the epoch in progress. The place
    in the data is (seed, epoch, step): sources repeat their order, so no buffer is stored. ``model`` includes
    the tables, their optimizer state and its step count.
    """

    identity: dict[str, int | float | str]
    epoch: int
    step: int
    global_step: int
    loss_sum: Tensor
    loss_rows: int
    model: dict[str, Any]
    dense_optimizer: dict[str, Any]
    rng: Tensor
    format: int = FORMAT


def checkpoint_path(path: Path) -> Path:
    """The file meant by ``--checkpoint``: ``path``, or ``last.pt`` in it when it is a directory."""
    return path / DEFAULT_NAME if path.is_dir() else path


def save(checkpoint: Checkpoint, path: Path) -> None:
    """Write ``path`` so that a crash at any moment leaves the old file or the new one, never part of one.

    Raises ``CheckpointError`` when the file system refuses.
    """
    # ``asdict`` would deep-copy every tensor.
    content = {name: getattr(checkpoint, name) for name in Checkpoint.__dataclass_fields__}
    # A fixed name: what a killed run leaves behind is overwritten by the next save, not collected.
    temporary = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint {path}: {error.strerror}") from error


def load(path: Path, identity: dict[str, int | float | str]) -> Checkpoint:
    """Read a checkpoint to the CPU and check that it is of the run that ``identity`` describes.

    Raises ``CheckpointError`` when the file is missing or damaged, and when it belongs to a different run;
    then every difference is named with both values.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint at {path}: leave --resume out to start a run") from None
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is not a readable checkpoint: {reason}") from error
    expected = set(Checkpoint.__dataclass_fields__)
    if not isinstance(content, dict) or set(content) != expected or content["format"] != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of this version of tbe train (format {FORMAT})")
    checkpoint = Checkpoint(**content)
    differences = [
        f"{name}: checkpoint {checkpoint.identity.get(name, 'none')}, now {identity.get(name, 'none')}"
        for name in sorted(checkpoint.identity.keys() | identity.keys())
        if checkpoint.identity.get(name) != identity.get(name)
    ]
    if differences:
        raise CheckpointError(
            f"{path} is of a different run and cannot be resumed:\n  " + "\n  ".join(differences)
        )
    return checkpoint
