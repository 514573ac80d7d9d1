"""Synthetic clicks of ``tbe train``: independence of batching, bags, skew, and the planted signal."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from tbe.train.clicks import Clicks
from tbe.train.synthetic import MAX_BAG, MULTI_HOT_FEATURES, SyntheticSource, make_feature

ROWS = 1_000


def same(left: list[Clicks], right: list[Clicks]) -> bool:
    def equal(a: Clicks, b: Clicks) -> bool:
        pairs = zip(vars(a).values(), vars(b).values(), strict=True)
        return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)

    return len(left) == len(right) and all(map(equal, left, right))


def synthetic(**changes: Any) -> SyntheticSource:
    options: dict[str, Any] = {
        "rows": ROWS,
        "batch_size": 64,
        "holdout": 0.1,
        "seed": 0,
        "rows_per_epoch": 1_000,
    }
    return SyntheticSource(**{**options, **changes})


def bags_of(clicks: Clicks) -> list[list[list[int]]]:
    size = len(clicks)
    flat = [part.tolist() for part in np.split(clicks.indices, clicks.offsets[1:-1])]
    return [[flat[t * size + b] for t in range(26)] for b in range(size)]


def test_synthetic_clicks_do_not_depend_on_batch_size() -> None:
    one = [bag for batch in synthetic(batch_size=64).train(1, 0) for bag in bags_of(batch)]
    two = [bag for batch in synthetic(batch_size=999).train(1, 0) for bag in bags_of(batch)]
    assert len(one) == 1_000 and one == two


def test_synthetic_order_skip_and_streams() -> None:
    whole = list(synthetic().train(0, 0))
    assert [len(batch) for batch in whole] == [64] * 15 + [40]
    for skip in (1, 15, 16):
        assert same(list(synthetic().train(0, skip)), whole[skip:])
    held_out = list(synthetic().held_out())
    assert sum(map(len, held_out)) == 100
    assert not np.array_equal(held_out[0].dense, whole[0].dense), "held-out clicks must not be trained on"
    clicks = synthetic()
    for other in (clicks.clicks(2, 0, 64), clicks.clicks(0, 0, 64), synthetic(seed=1).clicks(1, 0, 64)):
        assert not np.array_equal(other.dense, whole[0].dense)
    assert list(synthetic(holdout=0.0).held_out()) == []


def test_synthetic_bags() -> None:
    clicks = synthetic().clicks(1, 0, 2_000)
    lengths = np.diff(clicks.offsets).reshape(26, 2_000)
    assert (lengths[:-MULTI_HOT_FEATURES] == 1).all()
    multi = lengths[-MULTI_HOT_FEATURES:]
    assert multi.min() == 0 and multi.max() == MAX_BAG and 0.25 < (multi == 0).mean() < 0.42
    assert clicks.indices.min() >= 0 and clicks.indices.max() < ROWS
    assert clicks.dense.shape == (2_000, 13) and clicks.dense.min() >= 0
    assert 0.2 < clicks.labels.mean() < 0.6


@pytest.mark.parametrize("rows", [1, 2, 97, 1_000, 65_536])
def test_ids_are_zipf_and_scattered(rows: int) -> None:
    for number in range(26):
        feature = make_feature(number, rows, seed=3)
        ranks = np.arange(feature.cardinality)
        # The uniform that lands in the middle of each rank, from the CDF of x^-s on [1, n+1).
        power = 1.0 - feature.exponent
        middle = ((ranks + 1.5) ** power - 1.0) / ((feature.cardinality + 1.0) ** power - 1.0)
        ids = feature.ids(middle, rows)
        assert len(set(ids.tolist())) == feature.cardinality, "distinct ranks must keep distinct rows"
        assert ids.min() >= 0 and ids.max() < rows
        if rows >= 97:
            assert abs(int(ids[0]) - int(ids[1])) > 1, "the two hottest rows must not be neighbours"


def test_hot_ids_have_their_share() -> None:
    feature = make_feature(1, 10_000, seed=0)
    u = (np.arange(100_000) + 0.5) / 100_000
    counts = Counter(feature.ids(u, 10_000).tolist())
    power = 1.0 - feature.exponent
    share = (2.0**power - 1.0) / ((feature.cardinality + 1.0) ** power - 1.0)
    assert counts.most_common(1)[0][1] / 100_000 == pytest.approx(share, abs=0.001) and share > 0.1


def test_the_signal_is_in_the_ids() -> None:
    clicks = synthetic()
    block = clicks.clicks(1, 0, 2_000)
    scores = np.zeros(2_000)
    for row, bags in enumerate(bags_of(block)):
        for feature, bag in zip(clicks.features, bags, strict=True):
            scores[row] += feature.latent(np.array(bag, dtype=np.int64)).sum() / max(1, len(bag)) ** 0.5
    assert roc_auc_score(block.labels, scores) > 0.85
    assert 0.5 < roc_auc_score(block.labels, block.dense @ clicks._dense_weights) < 0.7
