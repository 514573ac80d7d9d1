"""Criteo-format click files, streamed: format detection, row parsing, hashing, a bounded shuffle.

Two shapes are read, each plain or gzip: tab-separated without a header (the Kaggle and Terabyte files: label,
13 integers, 26 categories) and comma-separated with a header (label, I1..I13, C1..C26, in any order).
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

import numpy as np
from numpy.typing import NDArray

from tbe.train.clicks import DENSE_FEATURES, SPARSE_FEATURES, Clicks, MalformedLog, offsets_of
from tbe.train.errors import DataError
from tbe.train.hashing import is_held_out, mix, mix_array, shuffled

COLUMNS = (
    "label",
    *(f"I{i + 1}" for i in range(DENSE_FEATURES)),
    *(f"C{i + 1}" for i in range(SPARSE_FEATURES)),
)
_LABELS = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0}
_GZIP_MAGIC = b"\x1f\x8b"
# A row of the real files is about 350 characters. Without a bound a binary file is one endless line.
_MAX_LINE = 1 << 16
_HEAD_BYTES = 1 << 16
# One salt a column: equal category texts of two columns are unrelated ids.
_SALTS = np.array([mix(zlib.crc32(name.encode())) for name in COLUMNS[1 + DENSE_FEATURES :]], dtype=np.uint64)


class RowError(ValueError):
    """A row that cannot be used; the text is the problem, without file and line."""


@dataclass(frozen=True)
class RawClick:
    """One parsed row: ``dense`` 13 raw values, ``categories`` 26 CRC-32 values before salting."""

    label: float
    dense: list[float]
    categories: list[int]


@dataclass(frozen=True)
class RowFormat:
    """How a file writes its rows. ``order`` gives, for each of ``COLUMNS``, its position in a row."""

    delimiter: str
    header: bool
    width: int
    order: tuple[int, ...]

    def parse(self, line: str) -> RawClick:
        """One line without its newline. Raises ``RowError`` naming the first problem found."""
        fields = self.split(line)
        if len(fields) != self.width:
            raise RowError(f"{len(fields)} columns, expected {self.width}")
        if self.header:
            fields = [fields[position] for position in self.order]
        label = _LABELS.get(fields[0].strip())
        if label is None:
            raise RowError(f"label is {fields[0]!r}, expected 0 or 1")
        first = 1 + DENSE_FEATURES
        dense = [_number(fields[i], COLUMNS[i]) for i in range(1, first)]
        # CRC-32 is fast and spelled out in the standard library; the salted 64-bit mix comes by the block.
        crc32 = zlib.crc32
        categories = [crc32(text.strip().encode("utf-8", "surrogateescape")) for text in fields[first:]]
        return RawClick(label, dense, categories)

    def split(self, line: str) -> list[str]:
        """The fields of a line. Quotes mean something in comma-separated rows only, within one line."""
        if self.delimiter == "\t" or '"' not in line:
            return line.split(self.delimiter)
        try:
            return next(csv.reader([line], delimiter=self.delimiter, strict=True))
        except csv.Error as error:
            raise RowError(f"not a valid comma-separated row ({error})") from None


def _number(text: str, column: str) -> float:
    if not text or text.isspace():
        return 0.0
    try:
        value = float(text)
    except ValueError:
        raise RowError(f"{column} is {text!r}, expected a number or nothing") from None
    if not math.isfinite(value):
        raise RowError(f"{column} is {text!r}, expected a finite number or nothing")
    return value


def detect_format(first_line: str, path: Path) -> RowFormat:
    """The row format of a file, from its first line. Raises ``DataError`` when it cannot be one of ours."""
    delimiter = "\t" if "\t" in first_line else ","
    if delimiter not in first_line:
        raise DataError(
            f"{path}, line 1: neither tabs nor commas. Expected Criteo format: label, {DENSE_FEATURES} "
            f"integers, {SPARSE_FEATURES} categories, with tabs and no header or with commas and a header"
        )
    names = [name.strip().strip('"') for name in first_line.split(delimiter)]
    if not {"label", "I1", "C1"} & set(names):
        return RowFormat(delimiter, False, len(COLUMNS), tuple(range(len(COLUMNS))))
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise DataError(f"{path}, line 1: the header lacks {', '.join(missing)}")
    repeated = sorted({name for name in names if name in COLUMNS and names.count(name) > 1})
    if repeated:
        raise DataError(f"{path}, line 1: the header repeats {', '.join(repeated)}")
    return RowFormat(delimiter, True, len(names), tuple(names.index(name) for name in COLUMNS))


def hash_categories(crc: NDArray[np.uint32], rows: int) -> NDArray[np.int64]:
    """CRC-32 of category texts [B, 26] to row numbers [B, 26] in ``range(rows)``, salted by column."""
    mixed = mix_array(crc.astype(np.uint64) ^ _SALTS)
    return (mixed % np.uint64(rows)).astype(np.int64)


class CriteoSource:
    """Clicks of one Criteo-format file; a ``ClickSource``. Memory is bounded by ``shuffle_rows`` clicks.

    A missing integer is 0 and a negative one counts as 0: the value used is ``log1p(max(x, 0))``. A missing
    category is hashed like any other text, so that each column learns a row for "missing".
    Raises ``DataError`` at once when the file is missing, empty or not of this format, and while iterating
    when more than ``max_malformed`` rows of an epoch cannot be used.
    """

    def __init__(
        self,
        path: Path,
        *,
        rows: int,
        batch_size: int,
        holdout: float,
        seed: int,
        shuffle_rows: int,
        max_malformed: int,
    ) -> None:
        self.path = path
        self.rows = rows
        self.batch_size = batch_size
        self.holdout = holdout
        self.seed = seed
        # A whole number of batches a block: then only the last batch of an epoch can be short.
        self.block_rows = batch_size * max(1, shuffle_rows // batch_size)
        self.max_malformed = max_malformed
        self.malformed = MalformedLog(str(path), max_malformed)
        self._raw: BinaryIO | None = None
        self._fraction = 0.0
        with self._open() as text:
            first_line = self._read_line(text, 1)
        if not first_line:
            raise DataError(f"{path} is empty")
        self.format = detect_format(first_line.rstrip("\n"), path)
        self.size = path.stat().st_size

    @property
    def description(self) -> str:
        kind = "tab-separated" if self.format.delimiter == "\t" else "comma-separated"
        header = "with" if self.format.header else "without"
        return f"{self.path} ({kind}, {header} header, {self.size / 2**20:.1f} MiB)"

    def identity(self) -> dict[str, int | float | str]:
        with self.path.open("rb") as file:
            head = zlib.crc32(file.read(_HEAD_BYTES))
        return {"data": "file", "size of the data file": self.size, "start of the data file (CRC-32)": head}

    def fraction(self) -> float:
        # Remembered, so that a pass that has ended and closed its file still answers.
        if self._raw is not None and self.size:
            self._fraction = min(1.0, self._raw.tell() / self.size)
        return self._fraction

    def train(self, epoch: int, skip: int) -> Iterator[Clicks]:
        # Skipped batches are read again, not seeked over: malformed rows must be counted as in the first run.
        self.malformed = MalformedLog(str(self.path), self.max_malformed)
        for block_number, block in enumerate(self._blocks(held_out=False)):
            order = shuffled(len(block), mix(mix(mix(self.seed) ^ epoch) ^ block_number))
            for batch in self._clicks(block, order).batches(self.batch_size):
                if skip > 0:
                    skip -= 1
                    continue
                yield batch

    def held_out(self) -> Iterator[Clicks]:
        if self.holdout == 0:
            return
        for block in self._blocks(held_out=True):
            yield from self._clicks(block, np.arange(len(block))).batches(self.batch_size)

    def _clicks(self, block: list[RawClick], order: NDArray[np.int64]) -> Clicks:
        dense = np.array([click.dense for click in block], dtype=np.float64)[order]
        labels = np.array([click.label for click in block], dtype=np.float32)[order]
        crc = np.array([click.categories for click in block], dtype=np.uint32)[order]
        return Clicks(
            dense=np.log1p(np.maximum(dense, 0.0)).astype(np.float32),
            labels=labels,
            indices=hash_categories(crc, self.rows).T.reshape(-1),
            offsets=offsets_of(np.ones((SPARSE_FEATURES, len(block)), dtype=np.int64)),
        )

    def _blocks(self, *, held_out: bool) -> Iterator[list[RawClick]]:
        block: list[RawClick] = []
        for number, line in self._lines():
            if is_held_out(number, self.holdout) != held_out:
                continue
            try:
                block.append(self.format.parse(line))
            except RowError as problem:
                self.malformed.add(number, str(problem))
                continue
            if len(block) == self.block_rows:
                yield block
                block = []
        if block:
            yield block

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Line numbers (from 1, a header counts) and lines without newline; the header itself is left out."""
        with self._open() as text:
            number = 0
            while line := self._read_line(text, number + 1):
                number += 1
                if number > 1 or not self.format.header:
                    yield number, line.rstrip("\n")
            self.fraction()

    def _read_line(self, text: TextIO, number: int) -> str:
        try:
            line = text.readline(_MAX_LINE)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{self.path}, line {number}: damaged gzip data ({error})") from error
        except OSError as error:
            raise DataError(f"{self.path}, line {number}: cannot be read ({error.strerror})") from error
        if len(line) == _MAX_LINE:
            raise DataError(f"{self.path}, line {number}: {_MAX_LINE} characters or more; not a click log")
        return line

    @contextmanager
    def _open(self) -> Iterator[TextIO]:
        try:
            raw = self.path.open("rb")
        except FileNotFoundError:
            raise DataError(f"{self.path} does not exist") from None
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from error
        with raw:
            # By content, not by name: the files are renamed as often as they are unpacked.
            zipped = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            self._raw = raw
            binary = gzip.GzipFile(fileobj=raw) if zipped else raw
            try:
                with io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape") as text:
                    yield text
            finally:
                self._raw = None
