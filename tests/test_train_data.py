"""Click sources of ``tbe train``: parsing, hashing, split, order; metrics and options."""

from __future__ import annotations

import gzip
import itertools
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from tbe.train.clicks import Clicks, MalformedLog, offsets_of
from tbe.train.config import TrainConfig, parse_widths
from tbe.train.criteo import COLUMNS, CriteoSource, hash_categories
from tbe.train.errors import ConfigError, DataError
from tbe.train.hashing import is_held_out, mix, mix_array, shuffled
from tbe.train.metrics import HeldOut, load_roc_auc, score

ROWS = 1_000


def make_rows(count: int, seed: int = 0) -> list[list[str]]:
    """Valid rows as fields; some integers and categories missing. I1 is the row number."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        integers = [str(number), *(rng.choice(["", "-1", "0", str(rng.randrange(5_000))]) for _ in range(12))]
        categories = [rng.choice(["", f"{rng.randrange(1 << 32):08x}"]) for _ in range(26)]
        rows.append([str(rng.randrange(2)), *integers, *categories])
    return rows


def write_tsv(path: Path, rows: list[list[str]]) -> Path:
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    return path


def write_csv(path: Path, rows: list[list[str]]) -> Path:
    path.write_text("".join(",".join(row) + "\n" for row in [list(COLUMNS), *rows]))
    return path


def source(path: Path, **changes: Any) -> CriteoSource:
    options: dict[str, Any] = {
        "rows": ROWS,
        "batch_size": 16,
        "holdout": 0.0,
        "seed": 0,
        "shuffle_rows": 64,
        "max_malformed": 100,
    }
    return CriteoSource(path, **{**options, **changes})


def same(left: list[Clicks], right: list[Clicks]) -> bool:
    def equal(a: Clicks, b: Clicks) -> bool:
        pairs = zip(vars(a).values(), vars(b).values(), strict=True)
        return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)

    return len(left) == len(right) and all(map(equal, left, right))


def row_numbers(batches: list[Clicks]) -> list[int]:
    return [round(value) for batch in batches for value in np.expm1(batch.dense[:, 0].astype(np.float64))]


# --- one row ------------------------------------------------------------------------------------------------


def test_a_row_becomes_log_values_and_salted_rows(tmp_path: Path) -> None:
    integers = ["3", "", "-2", "0", "260.0", *[""] * 8]
    categories = ["68fd1e64", "68fd1e64", "", "not hex", *[""] * 22]
    path = write_tsv(tmp_path / "one.tsv", [["1", *integers, *categories]])
    (click,) = list(source(path).train(0, 0))

    assert click.labels.tolist() == [1.0]
    expected = np.log1p(np.array([3, 0, 0, 0, 260, *[0] * 8], dtype=np.float64)).astype(np.float32)
    assert np.array_equal(click.dense, expected[None])
    assert click.offsets.tolist() == list(range(27))
    assert click.indices.min() >= 0 and click.indices.max() < ROWS
    assert click.indices[0] != click.indices[1], "equal texts of two columns must be unrelated"
    assert len(set(click.indices[4:].tolist())) > 15, "a missing category is salted by column too"


def test_hashes_never_change() -> None:
    """Pinned: a trained table is worthless when these move."""
    # The first output of the published SplitMix64 for seed 0.
    assert mix(0) == 0xE220A8397B1DCDAF
    values = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    assert mix_array(values).tolist() == [mix(int(value)) for value in values]
    crc = np.arange(26, dtype=np.uint32)[None] * 1_000_003
    assert hash_categories(crc, 100_000)[0, [0, 1, 25]].tolist() == PINNED_ROWS
    assert shuffled(8, 12345).tolist() == PINNED_ORDER
    assert [row for row in range(60) if is_held_out(row, 0.1)] == PINNED_HELD_OUT


PINNED_ROWS = [10150, 10973, 95927]
PINNED_ORDER = [0, 4, 2, 5, 7, 6, 3, 1]
PINNED_HELD_OUT = [10, 18, 21, 41, 48]


def test_hashed_rows_fill_the_table_evenly() -> None:
    crc = np.arange(20_000, dtype=np.uint32)[:, None].repeat(26, axis=1)
    counts = np.bincount(hash_categories(crc, 100)[:, 7], minlength=100)
    assert counts.sum() == 20_000 and counts.min() > 130 and counts.max() < 270


# --- file shapes --------------------------------------------------------------------------------------------


def test_every_file_shape_gives_the_same_clicks(tmp_path: Path) -> None:
    rows = make_rows(50)
    plain = write_tsv(tmp_path / "plain.txt", rows)
    expected = list(source(plain).train(0, 0))
    assert sum(map(len, expected)) == 50

    # Gzip under a name that says otherwise, and plain text under a name that says gzip.
    zipped = tmp_path / "zipped.csv"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    misnamed = write_tsv(tmp_path / "plain.gz", rows)
    windows = tmp_path / "windows.txt"
    windows.write_bytes(plain.read_bytes().replace(b"\n", b"\r\n"))
    bom = tmp_path / "bom.txt"
    bom.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    unterminated = tmp_path / "unterminated.txt"
    unterminated.write_bytes(plain.read_bytes().rstrip(b"\n"))
    for path in (zipped, misnamed, windows, bom, unterminated):
        assert same(list(source(path).train(0, 0)), expected), path.name

    # The header shifts line numbers, not clicks: with nothing held out they are the same.
    assert same(list(source(write_csv(tmp_path / "header.csv", rows)).train(0, 0)), expected)
    quoted = tmp_path / "quoted.csv"
    quoted.write_text("".join(",".join(f'"{field}"' for field in row) + "\n" for row in [list(COLUMNS), *rows]))
    assert same(list(source(quoted).train(0, 0)), expected)
    shuffled_columns = tmp_path / "columns.csv"
    names = ["row", *reversed(COLUMNS)]
    lines = [names, *([str(i), *reversed(row)] for i, row in enumerate(rows))]
    shuffled_columns.write_text("".join(",".join(line) + "\n" for line in lines))
    assert same(list(source(shuffled_columns).train(0, 0)), expected)


GOOD = ["0", *["1"] * 13, *["a"] * 26]
BAD_ROWS = {
    "too few": (GOOD[:-1], "39 columns, expected 40"),
    "too many": ([*GOOD, "x"], "41 columns, expected 40"),
    "blank": ([""], "1 columns, expected 40"),
    "label": (["2", *GOOD[1:]], "label is '2', expected 0 or 1"),
    "no label": (["", *GOOD[1:]], "label is '', expected 0 or 1"),
    "number": ([*GOOD[:3], "7x", *GOOD[4:]], "I3 is '7x', expected a number or nothing"),
    "nan": ([*GOOD[:13], "nan", *GOOD[14:]], "I13 is 'nan', expected a finite number or nothing"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_malformed_row_is_named_and_skipped(tmp_path: Path, kind: str) -> None:
    row, problem = BAD_ROWS[kind]
    clicks = source(write_tsv(tmp_path / "bad.tsv", [GOOD, row, GOOD]))
    assert sum(map(len, clicks.train(0, 0))) == 2
    assert clicks.malformed.count == 1
    assert clicks.malformed.examples == [(2, problem)]


def test_a_stray_quote_damages_its_own_row_only(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "quote.csv", [GOOD, [*GOOD[:-1], '"open'], GOOD, GOOD])
    clicks = source(path)
    assert sum(map(len, clicks.train(0, 0))) == 3
    ((line, problem),) = clicks.malformed.examples
    assert line == 3 and problem.startswith("not a valid comma-separated row")


def test_malformed_rows_past_the_limit_stop_the_run(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "bad.tsv", [GOOD, *[["9", *GOOD[1:]]] * 12, GOOD])
    assert sum(map(len, source(path, max_malformed=12).train(0, 0))) == 2
    with pytest.raises(DataError) as caught:
        list(source(path, max_malformed=11).train(0, 0))
    text = str(caught.value)
    assert text.startswith(f"{path}, line 13: label is '9', expected 0 or 1")
    assert "--max-malformed is 11" in text
    assert "line 11: label" in text and "line 12: label" not in text and "and 2 more" in text


def test_malformed_rows_are_counted_once_an_epoch(tmp_path: Path) -> None:
    rows = [row if i % 7 != 3 else ["x"] for i, row in enumerate(make_rows(70))]
    clicks = source(write_tsv(tmp_path / "bad.tsv", rows), holdout=0.3)
    for epoch in range(2):
        trained = sum(map(len, clicks.train(epoch, 0)))
        counted = clicks.malformed.count
        held_out = sum(map(len, clicks.held_out()))
        assert 0 < counted < 10 == clicks.malformed.count
        assert trained + held_out == 60


def test_summary_is_empty_without_malformed_rows() -> None:
    assert MalformedLog("file", 3).summary() == ""


def test_files_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    prose = tmp_path / "prose"
    prose.write_text("hello\n")
    short = tmp_path / "short.csv"
    short.write_text(",".join(COLUMNS[:-2]) + "\n")
    twice = tmp_path / "twice.csv"
    twice.write_text(",".join([*COLUMNS, "I4"]) + "\n")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\0\t" * 70_000)
    for path, problem in (
        (tmp_path / "absent", "does not exist"),
        (tmp_path, "cannot be read"),
        (empty, "is empty"),
        (prose, "line 1: neither tabs nor commas"),
        (short, "the header lacks C25, C26"),
        (twice, "the header repeats I4"),
        (binary, "not a click log"),
    ):
        with pytest.raises(DataError) as caught:
            source(path)
        assert str(path) in str(caught.value) and problem in str(caught.value)


def test_a_truncated_gzip_file_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "cut.gz"
    packed = gzip.compress(write_tsv(tmp_path / "whole", make_rows(400)).read_bytes())
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"line \d{2,}: damaged gzip data"):
        list(source(path).train(0, 0))


# --- split and order ----------------------------------------------------------------------------------------


def test_split_is_a_partition_that_options_do_not_move(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "rows.tsv", make_rows(300))
    clicks = source(path, holdout=0.2)
    trained, held_out = (
        row_numbers(list(clicks.train(0, 0))),
        row_numbers(list(clicks.held_out())),
    )
    assert sorted(trained + held_out) == list(range(300))
    assert 30 < len(held_out) < 90
    other = source(path, holdout=0.2, seed=9, batch_size=7, shuffle_rows=20)
    assert row_numbers(list(other.held_out())) == held_out == sorted(held_out)


def test_held_out_share() -> None:
    for share in (0.0, 0.1, 0.5):
        assert np.mean([is_held_out(row, share) for row in range(50_000)]) == pytest.approx(share, abs=0.01)


def test_order_is_a_function_of_seed_and_epoch(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "rows.tsv", make_rows(200))
    first = list(source(path).train(0, 0))
    assert same(list(source(path).train(0, 0)), first)
    orders = {tuple(row_numbers(list(source(path, seed=s).train(e, 0)))) for s in (0, 1) for e in (0, 1)}
    assert len(orders) == 4
    assert all(sorted(order) == list(range(200)) for order in orders)
    # Bounded: a buffer of 64 clicks cannot carry a row past its block.
    assert sorted(row_numbers(first)[:64]) == list(range(64)) != row_numbers(first)[:64]


def test_skipping_equals_reading_and_dropping(tmp_path: Path) -> None:
    rows = [row if i != 5 else ["x"] for i, row in enumerate(make_rows(130))]
    clicks = source(write_tsv(tmp_path / "rows.tsv", rows))
    whole = list(clicks.train(3, 0))
    assert [len(batch) for batch in whole] == [16] * 8 + [1]
    for skip in (1, 4, 5, 9):
        assert same(list(clicks.train(3, skip)), whole[skip:])
        assert clicks.malformed.count == 1


def test_a_file_is_streamed(tmp_path: Path) -> None:
    clicks = source(write_tsv(tmp_path / "long.tsv", make_rows(5_000)))
    assert clicks.size > 800_000
    batches = clicks.train(0, 0)
    next(batches)
    assert 0 < clicks.fraction() < 0.2
    assert len(list(batches)) > 0 and clicks.fraction() > 0.9


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_slices_keep_bags(data: st.DataObject) -> None:
    features, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    lengths = np.array(
        data.draw(st.lists(st.integers(0, 3), min_size=features * size, max_size=features * size)),
        dtype=np.int64,
    ).reshape(features, size)
    offsets = offsets_of(lengths)
    indices = np.arange(offsets[-1], dtype=np.int64)
    whole = Clicks(np.zeros((size, 13), np.float32), np.arange(size, dtype=np.float32), indices, offsets)
    width = data.draw(st.integers(1, 10))
    bags: dict[tuple[int, int], list[int]] = {}
    for batch in whole.batches(width):
        for t, (b, label) in itertools.product(range(features), enumerate(batch.labels)):
            at = t * len(batch) + b
            bags[t, int(label)] = batch.indices[batch.offsets[at] : batch.offsets[at + 1]].tolist()
    for t, b in itertools.product(range(features), range(size)):
        at = t * size + b
        assert bags[t, b] == indices[offsets[at] : offsets[at + 1]].tolist()


# --- metrics and options ------------------------------------------------------------------------------------


def test_metrics_against_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=200)
    labels = (rng.random(200) < 0.4).astype(np.float64)
    result = score(labels, logits, load_roc_auc())
    assert result.rows == 200
    assert result.auc == roc_auc_score(labels, logits)
    assert result.log_loss == pytest.approx(log_loss(labels, 1 / (1 + np.exp(-logits))), rel=1e-12)


def test_metrics_where_they_are_undefined_or_extreme() -> None:
    roc_auc = load_roc_auc()
    assert score(np.zeros(0), np.zeros(0), roc_auc) == HeldOut(0, None, None)
    for label in (0.0, 1.0):
        one_class = score(np.full(3, label), np.array([1.0, 2.0, 3.0]), roc_auc)
        assert one_class.auc is None and one_class.log_loss is not None
    assert score(np.array([0.0, 1.0]), np.array([1e5, -1e5]), roc_auc).log_loss == pytest.approx(1e5)


def test_missing_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    with pytest.raises(ConfigError, match=r"pip install 'portable-tbe\[train\]'"):
        load_roc_auc()


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"epochs": 0}, "--epochs"),
        ({"batch_size": 0}, "--batch-size"),
        ({"dim": -1}, "--dim"),
        ({"rows": 0}, "--rows"),
        ({"rows_per_epoch": 0}, "--rows-per-epoch"),
        ({"shuffle_rows": 0}, "--shuffle-rows"),
        ({"max_malformed": -1}, "--max-malformed"),
        ({"seed": -1}, "--seed"),
        ({"max_steps": 0}, "--max-steps"),
        ({"checkpoint": Path("x"), "checkpoint_every": 0}, "--checkpoint-every"),
        ({"lr": 0.0}, "--lr"),
        ({"dense_lr": float("nan")}, "--dense-lr"),
        ({"holdout": 1.0}, "--holdout"),
        ({"bottom_mlp": (64, 0)}, "--bottom-mlp"),
        ({"sparse_optimizer": "adam"}, "--sparse-optimizer must be one of rowwise_adagrad, sgd"),
        ({"dense_optimizer": "sgd"}, "--dense-optimizer"),
        ({"device": "tpu"}, "--device"),
        ({"resume": True}, "--resume needs --checkpoint"),
        ({"checkpoint_every": 5}, "--checkpoint-every needs --checkpoint"),
    ],
)
def test_options_out_of_range_are_named(changes: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**changes)
    assert str(caught.value).startswith(option)


def test_widths() -> None:
    assert parse_widths("--top-mlp", "64, 32") == (64, 32)
    assert parse_widths("--top-mlp", "") == ()
    with pytest.raises(ConfigError, match="--top-mlp must be widths"):
        parse_widths("--top-mlp", "64;32")
