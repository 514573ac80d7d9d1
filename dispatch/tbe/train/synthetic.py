"""Synthetic clicks with a planted signal, a pure function of (seed, stream, row number).

Nothing is drawn in sequence: every value is a hash of its coordinates. So the clicks do not depend on batch
size, a resumed run skips ahead at no cost, and every platform generates the same ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tbe.train.clicks import DENSE_FEATURES, SPARSE_FEATURES, Clicks, MalformedLog, offsets_of
from tbe.train.hashing import U64, combine, mix, mix_array, uniform

MULTI_HOT_FEATURES = 6
MAX_BAG = 8
# Exponents above 1 give a few hot rows most of the traffic, as click logs do.
ZIPF_EXPONENTS = (1.05, 1.2, 1.4)
# Real logs mix tiny and huge vocabularies. The last kind is as large as the table.
CARDINALITIES = (20, 300, 5_000, None)
_SIGNAL = 0.75
_DENSE_SIGNAL = 0.15
_BIAS = -1.2
_BLOCK_ROWS = 4_096
# Field numbers of the hash; one a value that a click needs, MAX_BAG ids a feature.
_LABEL_FIELD = 0
_DENSE_FIELD = 1
_LENGTH_FIELD = _DENSE_FIELD + DENSE_FEATURES
_ID_FIELD = _LENGTH_FIELD + SPARSE_FEATURES


@dataclass(frozen=True)
class Feature:
    """One categorical feature: Zipf(``exponent``) over ``cardinality`` ids that lie scattered in a table."""

    cardinality: int
    exponent: float
    multi_hot: bool
    stride: int
    shift: int
    salt: int

    def ids(self, u: NDArray[np.float64], rows: int) -> NDArray[np.int64]:
        """Uniforms [N] in [0, 1) to row numbers [N], by the inverse CDF of the bounded power law."""
        power = 1.0 - self.exponent
        x = (1.0 + u * (float(self.cardinality + 1) ** power - 1.0)) ** (1.0 / power)
        rank = np.minimum(x.astype(np.int64) - 1, self.cardinality - 1)
        # ``stride`` is coprime to ``rows``: distinct ranks keep distinct rows and hot rows lie far apart.
        return np.asarray((rank * self.stride + self.shift) % rows, dtype=np.int64)

    def latent(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """The planted weight of each id: uniform with mean 0 and variance 1."""
        bits = combine(ids.astype(np.uint64), np.array([self.salt], dtype=np.uint64))
        return (uniform(bits) - 0.5) * math.sqrt(12.0)


def make_feature(number: int, rows: int, seed: int) -> Feature:
    """Feature ``number`` of 26 for tables of ``rows`` rows; the last six hold 0 to 8 ids a bag."""
    cardinality = CARDINALITIES[number % len(CARDINALITIES)]
    salt = mix(mix(seed) ^ number)
    stride = max(1, int(rows * 0.6180339887) + salt % 7)
    while math.gcd(stride, rows) != 1:
        stride += 1
    return Feature(
        cardinality=rows if cardinality is None else min(cardinality, rows),
        exponent=ZIPF_EXPONENTS[number % len(ZIPF_EXPONENTS)],
        multi_hot=number >= SPARSE_FEATURES - MULTI_HOT_FEATURES,
        stride=stride,
        shift=salt % rows,
        salt=salt,
    )


class SyntheticSource:
    """``rows_per_epoch`` new training clicks every epoch and a fixed held-out set; a ``ClickSource``.

    The held-out set is ``round(rows_per_epoch * holdout)`` clicks of a stream of their own. The click
    probability is a logistic function of a weight per (feature, id), averaged over a bag as sum/sqrt(length),
    and of the dense values. ``rows`` is rows a table.
    """

    def __init__(self, *, rows: int, batch_size: int, holdout: float, seed: int, rows_per_epoch: int) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.rows_per_epoch = rows_per_epoch
        self.held_out_rows = round(rows_per_epoch * holdout)
        self.features = [make_feature(number, rows, seed) for number in range(SPARSE_FEATURES)]
        self.malformed = MalformedLog("synthetic clicks", 0)
        signs = uniform(mix_array(np.arange(DENSE_FEATURES, dtype=np.uint64) ^ np.uint64(mix(seed))))
        self._dense_weights = (signs - 0.5) * math.sqrt(12.0) * _DENSE_SIGNAL
        self._fraction = 0.0

    @property
    def description(self) -> str:
        return (
            f"synthetic clicks, {self.rows_per_epoch} new ones an epoch and {self.held_out_rows} held out "
            f"(seed {self.seed})"
        )

    def identity(self) -> dict[str, int | float | str]:
        return {"data": "synthetic"}

    def fraction(self) -> float:
        return self._fraction

    def train(self, epoch: int, skip: int) -> Iterator[Clicks]:
        # Stream 0 is the held-out set.
        yield from self._stream(epoch + 1, self.rows_per_epoch, skip)

    def held_out(self) -> Iterator[Clicks]:
        yield from self._stream(0, self.held_out_rows, 0)

    def _stream(self, stream: int, total: int, skip: int) -> Iterator[Clicks]:
        block = self.batch_size * max(1, _BLOCK_ROWS // self.batch_size)
        for start in range(skip * self.batch_size, total, block):
            count = min(block, total - start)
            self._fraction = start / total
            yield from self.clicks(stream, start, count).batches(self.batch_size)
        self._fraction = 1.0

    def clicks(self, stream: int, start: int, count: int) -> Clicks:
        """Clicks ``start`` up to ``start + count`` of a stream."""
        base = np.uint64(mix(mix(self.seed) ^ stream))
        keys = mix_array(np.arange(start, start + count, dtype=np.uint64) ^ base)
        dense = np.log1p(np.floor(np.expm1(5.0 * _draw(keys, _DENSE_FIELD, DENSE_FEATURES))))
        # 2.4 is close to the mean of a dense value; the shift keeps the click rate near that of ``_BIAS``.
        logits = _BIAS + (dense - 2.4) @ self._dense_weights
        lengths = np.ones((SPARSE_FEATURES, count), dtype=np.int64)
        indices = []
        for number, feature in enumerate(self.features):
            ids, signal, lengths[number] = self._bags(feature, number, keys)
            indices.append(ids)
            logits = logits + signal
        clicked = _draw(keys, _LABEL_FIELD, 1)[:, 0] < 1.0 / (1.0 + np.exp(-logits))
        return Clicks(
            dense=dense.astype(np.float32),
            labels=clicked.astype(np.float32),
            indices=np.concatenate(indices),
            offsets=offsets_of(lengths),
        )

    def _bags(
        self, feature: Feature, number: int, keys: U64
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Ids [N] in bag order, the signal of each bag [B] and the bag lengths [B]."""
        width = MAX_BAG if feature.multi_hot else 1
        ids = feature.ids(_draw(keys, _ID_FIELD + number * MAX_BAG, width), self.rows)
        latent = feature.latent(ids)
        if not feature.multi_hot:
            return ids[:, 0], _SIGNAL * latent[:, 0], np.ones(len(keys), dtype=np.int64)
        # Squaring favours short bags; a third of them are empty.
        lengths = ((MAX_BAG + 1) * _draw(keys, _LENGTH_FIELD + number, 1)[:, 0] ** 2).astype(np.int64)
        present = np.arange(width) < lengths[:, None]
        signal = (latent * present).sum(axis=1) / np.sqrt(np.maximum(lengths, 1))
        return ids[present], _SIGNAL * signal, lengths


def _draw(keys: U64, first_field: int, count: int) -> NDArray[np.float64]:
    """Uniforms [len(keys), count] of the fields from ``first_field`` on."""
    fields = np.arange(first_field, first_field + count, dtype=np.uint64)
    return uniform(combine(keys[:, None], fields[None, :]))
