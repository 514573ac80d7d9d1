"""The examples of docs/state.md run, one after another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ROOT

PAGE = (ROOT / "docs" / "state.md").read_text(encoding="utf-8")


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/state.md", "exec"), names)
    assert names["schedule"].get_last_lr()[0] < 0.05
    assert [table.rows for table in names["emb"].spec.layout.tables] == [1500, 50]
    assert names["half"].split_embedding_weights()[0].dtype == torch.float16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_10.safetensors"]
