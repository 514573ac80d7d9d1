"""docs/inference.md: its example runs, and its memory table is that of real modules."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers import ROOT

import tbe
from tbe_core.quantization import QUANTIZATIONS

PAGE = (ROOT / "docs" / "inference.md").read_text(encoding="utf-8")


def test_the_example_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TBE_BACKEND", "TBE_DISABLE"):
        monkeypatch.delenv(variable, raising=False)
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "docs/inference.md", "exec"), names)
    assert names["out"].shape == (2, 80)
    printed = capsys.readouterr().out
    (quoted,) = re.findall(r"prints `(all: .*)`", PAGE)
    assert quoted in printed.splitlines() and "cpu serves sum D=16,64 int8->fp32" in printed


def test_the_memory_table_is_measured() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 7
    for dim, fp32, fp16, packed in rows:
        assert (int(fp32), int(fp16)) == (4 * int(dim), 2 * int(dim))
        found = []
        for quantization in QUANTIZATIONS:
            table = tbe.Table("t", 100, int(dim))
            module = tbe.QuantizedTableBatchedEmbeddingBags([table], quantization=quantization, device="cpu")
            assert module.memory().packed == module.storage.nbytes
            found.append(f"{module.storage.nbytes // 100} ({module.storage.nbytes / int(fp32):.0f} %)")
        assert packed.split(" | ") == found
