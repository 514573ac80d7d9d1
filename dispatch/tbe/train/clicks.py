"""A block of clicks in the layout the operator takes, and what a source of them offers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tbe.train.errors import DataError

DENSE_FEATURES = 13
SPARSE_FEATURES = 26
SHOWN_MALFORMED = 10


@dataclass(frozen=True)
class Clicks:
    """B clicks with T categorical features.

    ``dense`` float32 [B, 13], already log-transformed; ``labels`` float32 [B], 0 or 1; ``indices`` int64 [N];
    ``offsets`` int64 [T*B+1], feature-major: bag (t, b) is ``indices[offsets[t*B+b] : offsets[t*B+b+1]]``.
    """

    dense: NDArray[np.float32]
    labels: NDArray[np.float32]
    indices: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def slice(self, start: int, stop: int) -> Clicks:
        """Clicks ``start`` up to ``stop`` (cut at the end), in the same layout."""
        size = len(self)
        stop = min(stop, size)
        features = (len(self.offsets) - 1) // size
        lengths = np.diff(self.offsets).reshape(features, size)[:, start:stop]
        parts = [
            self.indices[self.offsets[t * size + start] : self.offsets[t * size + stop]] for t in range(features)
        ]
        return Clicks(
            dense=self.dense[start:stop],
            labels=self.labels[start:stop],
            indices=np.concatenate(parts),
            offsets=offsets_of(lengths),
        )

    def batches(self, size: int) -> Iterator[Clicks]:
        """The clicks in order, ``size`` at a time; the last batch may be smaller, never empty."""
        for start in range(0, len(self), size):
            yield self.slice(start, start + size)


def offsets_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bag lengths [T, B] to feature-major offsets [T*B+1]."""
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths.reshape(-1), out=offsets[1:])
    return offsets


@dataclass
class MalformedLog:
    """Malformed rows of one epoch: all counted, the ten of lowest line number kept with their problem.

    ``add`` raises ``DataError`` naming ``source``, line and problem once more than ``limit`` were seen.
    """

    source: str
    limit: int
    count: int = 0
    examples: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, problem: str) -> None:
        self.count += 1
        # Sorted, since the held-out part is read after the training part.
        self.examples = sorted([*self.examples, (line, problem)])[:SHOWN_MALFORMED]
        if self.count > self.limit:
            raise DataError(
                f"{self.source}, line {line}: {problem}\n"
                f"This is malformed row {self.count} and --max-malformed is {self.limit}. {self.summary()}"
            )

    def summary(self) -> str:
        """A count and the first ten rows, a line each; empty when nothing was malformed."""
        if not self.count:
            return ""
        more = self.count - len(self.examples)
        lines = [f"Malformed rows in {self.source}: {self.count}"]
        lines += [f"line {line}: {problem}" for line, problem in self.examples]
        if more:
            lines.append(f"and {more} more")
        return "\n  ".join(lines)


class ClickSource(Protocol):
    """Where clicks come from. The order is a function of (seed, epoch), so that a resumed run repeats it."""

    @property
    def description(self) -> str:
        """One line for people."""

    @property
    def malformed(self) -> MalformedLog:
        """Malformed rows since the last ``train`` call began its epoch (training and held-out part)."""

    def identity(self) -> dict[str, int | float | str]:
        """What must be equal for a checkpoint of this source to be resumed."""

    def train(self, epoch: int, skip: int) -> Iterator[Clicks]:
        """Training batches of an epoch (from 0), without its first ``skip`` batches."""

    def held_out(self) -> Iterator[Clicks]:
        """Held-out batches, the same ones in the same order every time."""

    def fraction(self) -> float:
        """How much of the pass in progress has been read, 0 to 1."""
