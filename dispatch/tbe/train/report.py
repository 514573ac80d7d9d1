"""What a training run tells: the plan once, a line an epoch, notes and a progress bar.

Results go to stdout and everything else to stderr, so that ``--json`` output is only JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_HEADER = "epoch      step      loss       AUC  log loss        rows malformed        s"


@dataclass(frozen=True)
class EpochResult:
    """One line of output.

    ``epoch`` counts from 1, ``step`` from the start of the run. ``loss`` is the mean training loss of the
    epoch's ``rows`` clicks, ``auc`` and ``log_loss`` are held-out and None when undefined. ``seconds`` is the
    time this process spent on the epoch, evaluation included.
    """

    epoch: int
    step: int
    loss: float
    auc: float | None
    log_loss: float | None
    rows: int
    malformed: int
    seconds: float
    backend: str


Tick = Callable[[float, int, float | None], None]


class Reporter:
    """Prints a run to the terminal, or as JSON lines to stdout with ``as_json``."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(stderr=True)
        self._header_due = True

    def start(self, lines: list[str]) -> None:
        """Plan, data and the like, once."""
        stream = sys.stderr if self.as_json else sys.stdout
        print(*lines, sep="\n", file=stream, flush=True)

    def note(self, text: str) -> None:
        """Something worth knowing that is not a result."""
        print(text, file=sys.stderr, flush=True)

    def epoch(self, result: EpochResult) -> None:
        """One epoch's line."""
        if self.as_json:
            print(json.dumps(asdict(result), allow_nan=False), flush=True)
            return
        if self._header_due:
            print(_HEADER)
            self._header_due = False
        print(
            f"{result.epoch:>5} {result.step:>9} {result.loss:>9.4f} {_metric(result.auc)} "
            f"{_metric(result.log_loss)} {result.rows:>11} {result.malformed:>9} {result.seconds:>8.1f}",
            flush=True,
        )

    @contextmanager
    def progress(self, epoch: int, epochs: int) -> Iterator[Tick]:
        """A bar for one epoch; call what it yields with (fraction read, step, mean loss or None)."""
        bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%  step {task.fields[step]}  {task.fields[loss]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        with bar:
            task = bar.add_task("", total=1.0, epoch=f"{epoch + 1}/{epochs}", step=0, loss="")

            def tick(fraction: float, step: int, loss: float | None) -> None:
                text = "evaluating" if loss is None else f"loss {loss:.4f}"
                bar.update(task, completed=fraction, step=step, loss=text)

            yield tick


def _metric(value: float | None) -> str:
    return f"{'undefined':>9}" if value is None else f"{value:>9.4f}"
