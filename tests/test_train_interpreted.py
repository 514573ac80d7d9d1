"""``tbe train`` on Triton's kernels, in the interpreter: the same losses as on the CPU backend."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers import environment

from tbe_core import tolerances

SMALL = ("--rows=40", "--dim=4", "--batch-size=8", "--rows-per-epoch=16", "--holdout=0.3", "--json")


def train(optimizer: str, **variables: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tbe.cli.main", "train", *SMALL, "--epochs", "2", "--lr", "0.5"]
    done = subprocess.run(
        [*command, "--sparse-optimizer", optimizer],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "sgd"])
def test_the_interpreter_s_losses_are_the_cpu_s(optimizer: str) -> None:
    eager = train(optimizer)
    interpreted = train(optimizer, TBE_BACKEND="triton", TRITON_INTERPRET="1")
    assert [line["backend"] for line in eager + interpreted] == ["cpu"] * 2 + ["triton"] * 2
    assert [line["step"] for line in interpreted] == [2, 4]
    limit = tolerances.weights(optimizer, torch.float32)
    for left, right in zip(eager, interpreted, strict=True):
        assert right["loss"] == pytest.approx(left["loss"], rel=limit)
        assert right["log_loss"] == pytest.approx(left["log_loss"], rel=limit)
        assert right["rows"] == left["rows"] == 16
    assert abs(eager[1]["loss"] - eager[0]["loss"]) > 100 * limit, "too little was learned to compare anything"
