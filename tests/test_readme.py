"""The README does what it says: its example runs and is right, its commands are the ones that are kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tbe
from tbe_core import tolerances
from tbe_core.reference import Reference

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The README's fenced blocks of a language, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for of, text in found if of == language]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the example leaves behind; ``before`` is a module with the weights that it started from."""
    for variable in ("TBE_BACKEND", "TBE_DISABLE"):
        monkeypatch.delenv(variable, raising=False)
    (source,) = blocks("python")
    assert len(source.splitlines()) <= 10
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(source, "README.md", "exec"), names)
    spec = names["emb"].spec
    torch.manual_seed(0)
    names["before"] = tbe.TableBatchedEmbeddingBags(spec.layout.tables, optimizer=spec.optimizer, device="cpu")
    return names


def test_the_example_is_right(example: dict[str, Any]) -> None:
    emb, before, out = example["emb"], example["before"], example["out"]
    indices, offsets = example["indices"], example["offsets"]
    spec = emb.spec
    reference = Reference.of(spec, before.split_embedding_weights(), before.split_optimizer_states())
    assert out.shape == (2, 80), "the comment says 2 bags, 64 + 16 columns"
    bound = tolerances.forward(spec.weights_dtype, spec.output_dtype)
    torch.testing.assert_close(
        out.detach().double(), reference.forward(indices, offsets), rtol=bound, atol=bound * 0.01
    )
    assert torch.equal(out[0, 64:], torch.zeros(16)), "geo's first bag is empty"

    touched = reference.backward_update(
        torch.ones_like(out), indices, offsets, None, spec.optimizer.hyper_values()
    )
    assert touched == [[7, 9_999], [2, 5]], "the rows that the comment names"
    bound = tolerances.weights(spec.optimizer.NAME, spec.weights_dtype)
    for new, old, expected, rows in zip(
        emb.split_embedding_weights(),
        before.split_embedding_weights(),
        reference.tables,
        touched,
        strict=True,
    ):
        torch.testing.assert_close(new.double(), expected, rtol=bound, atol=bound * 0.01)
        assert (new != old).any(dim=1).nonzero().squeeze(1).tolist() == rows
    bound = tolerances.state(spec.optimizer.NAME)
    for state, wanted in zip(emb.split_optimizer_states(), reference.states, strict=True):
        torch.testing.assert_close(state["sum"].double(), wanted["sum"], rtol=bound, atol=0.0)


def test_the_example_shows_its_plan(example: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert example["emb"].plan.backend == "cpu"
    (source,) = blocks("python")
    exec(compile(source, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("cpu serves sum D=16,64 fp32->fp32")


def test_the_test_command_is_what_ci_runs() -> None:
    commands = [line for block in blocks("") for line in block.splitlines()]
    assert len(commands) == 2
    last = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1]
    assert commands[-1] == last
    assert (ROOT / "ci" / "test.sh").is_file()


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < 120
