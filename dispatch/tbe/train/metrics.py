"""Held-out metrics. scikit-learn is imported on first use: it is an extra, and slow to import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tbe.train.errors import ConfigError


@dataclass(frozen=True)
class HeldOut:
    """``auc`` is None where it is undefined (only one class, or no rows); ``log_loss`` in nats, None likewise
    for no rows."""

    rows: int
    auc: float | None
    log_loss: float | None


RocAuc = Callable[[NDArray[np.float64], NDArray[np.float64]], float]


def load_roc_auc() -> RocAuc:
    """``sklearn.metrics.roc_auc_score``. Raises ``ConfigError`` saying what to install when it is missing."""
    try:
        # Through importlib: scikit-learn ships no types.
        metrics = import_module("sklearn.metrics")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "sklearn":
            raise
        raise ConfigError(
            "held-out AUC needs scikit-learn: pip install 'portable-tbe[train]', or pass --holdout 0"
        ) from None
    return cast(RocAuc, metrics.roc_auc_score)


def score(labels: NDArray[np.float64], logits: NDArray[np.float64], roc_auc: RocAuc) -> HeldOut:
    """AUC and log loss of logits [N] against labels [N] of 0 and 1."""
    if not len(labels):
        return HeldOut(0, None, None)
    both = 0 < labels.sum() < len(labels)
    # log(1 + e^x) - y*x, the cross entropy in a form that cannot overflow.
    log_loss = float(np.mean(np.logaddexp(0.0, logits) - labels * logits))
    return HeldOut(len(labels), float(roc_auc(labels, logits)) if both else None, log_loss)
