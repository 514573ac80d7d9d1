"""What several test files share: a small module, its inputs, snapshots, and Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import tbe

ROOT = Path(__file__).parents[1]
TABLES = (tbe.Table("ad", 10, 4), tbe.Table("geo", 5, 8))
INDICES = (1, 2, 9, 0, 4)
OFFSETS = (0, 2, 3, 3, 5)
"""Two features, two bags each; the third bag is empty."""


def make(**changes: Any) -> tbe.TableBatchedEmbeddingBags:
    """Two tables of different dims with row-wise Adagrad on the CPU, the same bits every time."""
    torch.manual_seed(7)
    options: dict[str, Any] = {"tables": TABLES, "optimizer": tbe.RowwiseAdagrad(lr=0.1), "device": "cpu"}
    return tbe.TableBatchedEmbeddingBags(**{**options, **changes})


def inputs(**changes: Any) -> dict[str, Any]:
    """A good call of ``make()``: keyword arguments of ``forward``."""
    return {"indices": torch.tensor(INDICES), "offsets": torch.tensor(OFFSETS), **changes}


def tensors(emb: tbe.TableBatchedEmbeddingBags) -> dict[str, torch.Tensor]:
    """A copy of everything that a step may change, the padding between tables included."""
    named = {"weights": emb.weights, "hyper": emb.hyper, "bad": emb.bad}
    named |= {} if emb.counter is None else {"counter": emb.counter}
    named |= {f"state {i}": state for i, state in enumerate(emb.states)}
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors are not the same bits."""
    assert left.keys() == right.keys()
    return [name for name, tensor in left.items() if not torch.equal(tensor, right[name])]


def step(emb: Any, seed: int = 0, **changes: Any) -> torch.Tensor:
    """One forward and backward with a seeded output gradient; returns the output."""
    out: torch.Tensor = emb(**inputs(**changes))
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype))
    return out.detach()


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without the library's variables, with the import path and ``variables``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TBE_", "TRITON_"))}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new interpreter with the environment ``variables``."""
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(**variables), capture_output=True, text=True, timeout=120
    )
