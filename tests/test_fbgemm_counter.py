"""Row-wise Adagrad with counter beside FBGEMM_GPU's own on the CPU; the drop-in refuses these modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_modules import MAP, REAL, SPECS, assert_near, batch, make, needs_fbgemm

import tbe

pytestmark = needs_fbgemm

DECAYS = {"none": "NONE", "l2": "L2", "decoupled": "DECOUPLE", "adagradw": "ADAGRADW"}
COUNTER = (
    {"weight_decay_mode": "l2", "counter_halflife": 3, "weight_decay": 0.1},
    {"weight_decay_mode": "decoupled", "counter_halflife": 10, "weight_decay": 0.1, "adjustment_iter": 2},
    {"weight_decay_mode": "adagradw", "counter_halflife": -1, "weight_decay": 0.1},
    {"weight_decay_mode": "adagradw", "counter_halflife": -2, "weight_decay": 0.1, "adjustment_ub": 0.15},
    {"weight_decay_mode": "adagradw", "counter_halflife": 2, "weight_decay": 0.1, "adjustment_iter": 3},
    {"learning_rate_mode": "tail_id_lr_decrease", "adjustment_ub": 0.5, "tail_id_threshold": 1.0},
    {"learning_rate_mode": "tail_id_lr_increase", "adjustment_ub": 0.5, "tail_id_threshold": 0.1,
     "tail_id_threshold_is_ratio": True},
    {"learning_rate_mode": "counter_sgd", "adjustment_ub": 2.0, "counter_halflife": 4},
)  # fmt: skip
COWCLIP = (
    {"weight_norm_coefficient": 0.1, "lower_bound": 0.05},
    {"weight_norm_coefficient": 0.02, "weight_decay_mode": "l2", "weight_decay": 0.1, "counter_halflife": 3},
    {"lower_bound": 0.3, "weight_decay_mode": "decoupled", "weight_decay": 0.1, "counter_halflife": 0},
)
LARGEST = 20.0
"""``max_counter``, which FBGEMM_GPU's CPU module leaves at 1."""
CASES = [("counter", o) for o in COUNTER] + [("cowclip", o) for o in COWCLIP]


def theirs(regularization: str, options: dict[str, Any]) -> Any:
    from fbgemm_gpu.tbe.config import optimizer_config as config

    given = dict(options)
    decay = config.CounterWeightDecayMode[DECAYS[given.pop("weight_decay_mode", "none")]]
    common = {"counter_weight_decay_mode": decay, "counter_halflife": given.pop("counter_halflife", -1)}
    more: dict[str, Any] = {"weight_decay": given.pop("weight_decay", 0.0)}
    if regularization == "cowclip":
        more["cowclip_regularization"] = config.CowClipDefinition(**common, **given)
    else:
        mode = config.LearningRateMode[given.pop("learning_rate_mode", "equal").upper()]
        tail = config.TailIdThreshold(
            given.pop("tail_id_threshold", 0.0), given.pop("tail_id_threshold_is_ratio", False)
        )
        more["counter_based_regularization"] = config.CounterBasedRegularizationDefinition(
            **common, learning_rate_mode=mode, tail_id_threshold=tail, **given
        )
    kind = REAL.OptimType.EXACT_ROWWISE_ADAGRAD
    weight_decay_mode = REAL.WeightDecayMode[regularization.upper()]
    return make(REAL, optimizer=kind, learning_rate=0.1, eps=0.01, weight_decay_mode=weight_decay_mode, **more)


@pytest.mark.parametrize("regularization, options", CASES, ids=str)
def test_numbers(regularization: str, options: dict[str, Any]) -> None:
    real = theirs(regularization, options)
    real.max_counter.fill_(LARGEST)
    options = {**options, "regularization": regularization, "max_counter": LARGEST}
    optimizer = tbe.RowwiseAdagradWithCounter(lr=0.1, eps=0.01, **options)
    tables = [tbe.Table(f"t{i}", *size) for i, size in enumerate(SPECS)]
    emb = tbe.TableBatchedEmbeddingBags(tables, MAP, optimizer=optimizer, device="cpu")
    plain = tbe.RowwiseAdagrad(lr=0.1, eps=0.01)
    without = tbe.TableBatchedEmbeddingBags(tables, MAP, optimizer=plain, device="cpu")
    with torch.no_grad():
        for each in (emb, without):
            for mine, other in zip(each.split_embedding_weights(), real.split_embedding_weights(), strict=True):
                mine.copy_(other)
    for seed in range(6):
        indices, offsets, _ = batch(seed)
        for module in (emb, real, without):
            out = module(indices, offsets)
            out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)))
    assert_near(emb.split_embedding_weights(), list(real.split_embedding_weights()), 1e-5)
    moved = zip(emb.split_embedding_weights(), without.split_embedding_weights(), strict=True)
    assert any(not torch.equal(mine, other) for mine, other in moved), "the counter must show"
    pairs = emb.split_optimizer_states()
    counts = torch.cat([of_table["count_and_step"][:, 0] for of_table in pairs])
    last = torch.cat([of_table["count_and_step"][:, 1] for of_table in pairs])
    assert_near([counts, last], [real.row_counter_host, real.prev_iter_host], 1e-5)
