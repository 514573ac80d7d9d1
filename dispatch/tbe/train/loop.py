"""The training loop: batches in order, one fused backward a step, evaluation and checkpoints."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from tbe.train.checkpoint import Checkpoint, checkpoint_path, load, save
from tbe.train.clicks import Clicks, ClickSource
from tbe.train.config import TrainConfig
from tbe.train.criteo import CriteoSource
from tbe.train.errors import CheckpointError, DataError, DivergedError
from tbe.train.metrics import HeldOut, RocAuc, load_roc_auc, score
from tbe.train.model import build_dense_optimizer, build_model, describe_tables
from tbe.train.report import EpochResult, Reporter, Tick
from tbe.train.synthetic import SyntheticSource

# Reading the loss waits for the device; often enough for a progress bar is rare enough for a GPU.
_TICK_SECONDS = 0.5


def make_source(config: TrainConfig) -> ClickSource:
    """The clicks that ``config`` asks for. Raises ``DataError`` when the file cannot be used."""
    if config.data is None:
        return SyntheticSource(
            rows=config.rows,
            batch_size=config.batch_size,
            holdout=config.holdout,
            seed=config.seed,
            rows_per_epoch=config.rows_per_epoch,
        )
    return CriteoSource(
        config.data,
        rows=config.rows,
        batch_size=config.batch_size,
        holdout=config.holdout,
        seed=config.seed,
        shuffle_rows=config.shuffle_rows,
        max_malformed=config.max_malformed,
    )


@dataclass
class Progress:
    """Where a run stands; ``Checkpoint`` documents the fields."""

    epoch: int = 0
    step: int = 0
    global_step: int = 0
    loss_rows: int = 0


class Trainer:
    """One run from start or checkpoint to its last epoch or ``max_steps``.

    On the CPU a run that was interrupted and resumed ends bit-identical to one that was not.
    Raises ``TrainError`` and ``tbe.BackendError`` for what the user can act on.
    """

    def __init__(self, config: TrainConfig, reporter: Reporter) -> None:
        self.config = config
        self.reporter = reporter
        self.checkpoint_file = None if config.checkpoint is None else checkpoint_path(config.checkpoint)
        # Before anything slow: what is sure to fail should fail at once.
        self.roc_auc: RocAuc | None = load_roc_auc() if config.holdout > 0 else None
        self.source = make_source(config)
        self.identity = {**config.identity(), **self.source.identity()}
        resumed = self._load()
        self.model = build_model(config)
        self.dense_optimizer = build_dense_optimizer(self.model, config)
        self.device = torch.device(config.device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.at = Progress()
        self._malformed_told = False
        if resumed is not None:
            self._restore(resumed)

    def run(self) -> None:
        """Train until the last epoch or ``max_steps`` is done, reporting every epoch."""
        self.reporter.start(
            [
                str(self.model.emb.plan),
                f"tables: {describe_tables(self.config)} on {self.device}",
                f"data: {self.source.description}",
            ]
        )
        if self.at.global_step:
            self.reporter.note(f"resuming at epoch {self.at.epoch + 1}, step {self.at.global_step}")
        if self.at.epoch >= self.config.epochs:
            self.reporter.note(f"nothing left to do: the checkpoint holds {self.at.epoch} finished epochs")
        elif self._steps_used_up():
            self.reporter.note(f"nothing left to do: the checkpoint is at step {self.at.global_step}")
        while self.at.epoch < self.config.epochs and not self._steps_used_up():
            self._epoch()

    def _epoch(self) -> None:
        began = time.monotonic()
        with self.reporter.progress(self.at.epoch, self.config.epochs) as tick:
            finished = self._train_epoch(tick)
            if not self.at.loss_rows:
                raise DataError(self._no_rows())
            loss = self._finite_loss()
            held_out = self._evaluate(tick)
        self._report(loss, held_out, time.monotonic() - began)
        if finished:
            self.at = Progress(epoch=self.at.epoch + 1, global_step=self.at.global_step)
            self.loss_sum.zero_()
        else:
            self.reporter.note(f"stopped in epoch {self.at.epoch + 1} by --max-steps {self.config.max_steps}")
        self._save()

    def _train_epoch(self, tick: Tick) -> bool:
        """Train the rest of the epoch; False when ``max_steps`` ended it early."""
        self.model.train()
        every = self.config.checkpoint_every
        next_tick = 0.0
        for batch in self.source.train(self.at.epoch, self.at.step):
            if self._steps_used_up():
                return False
            self._train_step(batch)
            if every is not None and self.at.global_step % every == 0:
                # Not over the last good checkpoint with one that diverged.
                self._finite_loss()
                self._save()
            if time.monotonic() >= next_tick:
                tick(self.source.fraction(), self.at.global_step, self._mean_loss())
                next_tick = time.monotonic() + _TICK_SECONDS
        return True

    def _train_step(self, batch: Clicks) -> None:
        labels = self._tensor(batch.labels)
        loss = binary_cross_entropy_with_logits(self._logits(batch), labels)
        self.dense_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.dense_optimizer.step()
        self.loss_sum += loss.detach().double() * len(batch)
        self.at.loss_rows += len(batch)
        self.at.step += 1
        self.at.global_step += 1

    @torch.no_grad()
    def _evaluate(self, tick: Tick) -> HeldOut:
        if self.roc_auc is None:
            return HeldOut(0, None, None)
        self.model.eval()
        labels, logits = [np.zeros(0)], [np.zeros(0)]
        for batch in self.source.held_out():
            logits.append(self._logits(batch).double().cpu().numpy())
            labels.append(batch.labels.astype(np.float64))
            tick(self.source.fraction(), self.at.global_step, None)
        scores = np.concatenate(logits)
        if not np.isfinite(scores).all():
            raise self._diverged("a held-out logit is not a finite number")
        return score(np.concatenate(labels), scores, self.roc_auc)

    def _logits(self, batch: Clicks) -> Tensor:
        logits: Tensor = self.model(
            self._tensor(batch.dense), self._tensor(batch.indices), self._tensor(batch.offsets)
        )
        return logits

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _mean_loss(self) -> float:
        return float(self.loss_sum) / max(1, self.at.loss_rows)

    def _finite_loss(self) -> float:
        loss = self._mean_loss()
        if not math.isfinite(loss):
            raise self._diverged(f"the training loss is {loss}")
        return loss

    def _diverged(self, what: str) -> DivergedError:
        return DivergedError(f"{what} by step {self.at.global_step}: lower --lr or --dense-lr")

    def _steps_used_up(self) -> bool:
        return self.config.max_steps is not None and self.at.global_step >= self.config.max_steps

    def _report(self, loss: float, held_out: HeldOut, seconds: float) -> None:
        malformed = self.source.malformed
        if malformed.count and not self._malformed_told:
            self.reporter.note(malformed.summary())
            self._malformed_told = True
        self.reporter.epoch(
            EpochResult(
                epoch=self.at.epoch + 1,
                step=self.at.global_step,
                loss=loss,
                auc=held_out.auc,
                log_loss=held_out.log_loss,
                rows=self.at.loss_rows,
                malformed=malformed.count,
                seconds=round(seconds, 3),
                backend=self.model.emb.plan.backend,
            )
        )

    def _no_rows(self) -> str:
        text = f"no rows to train on in {self.source.description} with --holdout {self.config.holdout}"
        summary = self.source.malformed.summary()
        return f"{text}\n{summary}" if summary else text

    def _load(self) -> Checkpoint | None:
        path = self.checkpoint_file
        if path is None:
            return None
        if self.config.resume:
            return load(path, self.identity)
        if path.exists():
            raise CheckpointError(f"{path} exists: pass --resume to continue it, or remove it to start over")
        return None

    def _restore(self, saved: Checkpoint) -> None:
        self.model.load_state_dict(saved.model)
        self.dense_optimizer.load_state_dict(saved.dense_optimizer)
        torch.set_rng_state(saved.rng)
        self.loss_sum.copy_(saved.loss_sum)
        self.at = Progress(saved.epoch, saved.step, saved.global_step, saved.loss_rows)

    def _save(self) -> None:
        if self.checkpoint_file is None:
            return
        save(
            Checkpoint(
                identity=self.identity,
                epoch=self.at.epoch,
                step=self.at.step,
                global_step=self.at.global_step,
                loss_sum=self.loss_sum.cpu(),
                loss_rows=self.at.loss_rows,
                model=self.model.state_dict(),
                dense_optimizer=self.dense_optimizer.state_dict(),
                rng=torch.get_rng_state(),
            ),
            self.checkpoint_file,
        )
