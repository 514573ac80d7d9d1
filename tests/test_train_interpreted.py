"""``tbe train`` on Triton's kernels, in the interpreter: the same losses as on the CPU backend."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from helpers import environment

from tbe_core import tolerances

# One step an epoch, so that every step's loss is told; the interpreter takes seconds a step.
SMALL = ("--rows=20", "--dim=4", "--batch-size=4", "--rows-per-epoch=4", "--epochs=3", "--holdout=0", "--json")


def losses(backend: str, lr: float, **variables: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-m", "tbe.cli.main", "train", *SMALL, f"--lr={lr}"],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["backend"], line["step"], line["rows"]) for line in lines] == [
        (backend, n, 4) for n in (1, 2, 3)
    ]
    return [line["loss"] for line in lines]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_interpreter_s_losses_are_the_cpu_s() -> None:
    limit = tolerances.weights("rowwise_adagrad", torch.float32)
    eager = losses("cpu", lr=0.5)
    frozen = losses("cpu", lr=1e-9)
    assert all(abs(a - b) > 10 * limit for a, b in zip(eager[1:], frozen[1:], strict=True)), "updates must matter"
    interpreted = losses("triton", lr=0.5, TBE_BACKEND="triton", TRITON_INTERPRET="1")
    assert interpreted == pytest.approx(eager, rel=limit)
