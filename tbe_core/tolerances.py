"""Tolerances against the fp64 reference: by dtype and accumulation, never by backend."""

from __future__ import annotations

import torch

FORWARD_FP32 = 1e-5
FORWARD_LOW_PRECISION = 8e-3
_WEIGHTS = {"sgd": 1e-5, "rowwise_adagrad": 1e-4, "adagrad": 1e-4}
_ADAM_WEIGHTS, _ADAM_STATE = 1e-3, 1e-4


def forward(weights_dtype: torch.dtype, output_dtype: torch.dtype) -> float:
    """Forward: the weights are exact inputs, so only a low-precision output costs accuracy."""
    return FORWARD_FP32 if output_dtype == torch.float32 else FORWARD_LOW_PRECISION


def weights(optimizer: str, weights_dtype: torch.dtype) -> float:
    """Updated rows: the optimizer's tolerance, or the rounding of a low-precision table."""
    if weights_dtype != torch.float32:
        return FORWARD_LOW_PRECISION
    return _WEIGHTS.get(optimizer, _ADAM_WEIGHTS)


def state(optimizer: str) -> float:
    return _WEIGHTS.get(optimizer, _ADAM_STATE)


def row_gradients(weights_dtype: torch.dtype) -> float:
    """Sparse gradients: fp32 sums, rounded once to the table's dtype."""
    return FORWARD_FP32 if weights_dtype == torch.float32 else FORWARD_LOW_PRECISION


def per_sample_weight_grad(output_dtype: torch.dtype) -> float:
    return FORWARD_FP32 if output_dtype == torch.float32 else FORWARD_LOW_PRECISION
