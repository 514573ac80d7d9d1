"""Every named case of ``tbe_core.cases`` is covered by a test, or its feature is absent."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tbe
from tbe_core import Spec
from tbe_core.cases import CASES, LATER
from tbe_core.optimizers import REGISTRY

ROOT = Path(__file__).parent.parent
NOW = [case for case in CASES if LATER not in case.tags]

COLLECT = """
import json, pytest, sys
class Collector:
    def pytest_collection_finish(self, session):
        self.found = [
            [mark.args[0], item.nodeid, item.get_closest_marker("gpu") is not None]
            for item in session.items
            for mark in item.iter_markers("case")
        ]
collector = Collector()
code = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "tests"], plugins=[collector])
print("found=" + json.dumps(collector.found))
sys.exit(code)
"""


@pytest.fixture(scope="module")
def marked() -> list[tuple[str, str, bool]]:
    """Every test marked with a case: the case, the test, and whether it needs a GPU."""
    done = subprocess.run([sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("found="))
    return [tuple(entry) for entry in json.loads(line.removeprefix("found="))]


def test_cases_are_numbered_and_named_once() -> None:
    assert [case.number for case in CASES] == list(range(1, len(CASES) + 1))
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.statement.endswith(".") and case.tags for case in CASES)


@pytest.mark.parametrize("name", [case.name for case in NOW])
def test_case_is_covered(name: str, marked: list[tuple[str, str, bool]]) -> None:
    everywhere = [test for case, test, gpu in marked if case == name and not gpu]
    assert everywhere, f"no test that runs without a GPU is marked case({name!r})"


def test_marks_name_known_cases(marked: list[tuple[str, str, bool]]) -> None:
    unknown = sorted({(case, test) for case, test, _ in marked if case not in {c.name for c in NOW}})
    assert not unknown, "marks of cases that are not listed, or are tagged as later"


def _parameters() -> set[str]:
    return {
        *inspect.signature(tbe.TableBatchedEmbeddingBags).parameters,
        *(f.name for f in dataclasses.fields(Spec)),
    }


PRESENT = {
    "stochastic_rounding": lambda: any("rounding" in name or "stochastic" in name for name in _parameters()),
    "adam_resumes": lambda: any("adam" in name for name in REGISTRY),
}
"""Whether the feature of a later case exists."""


@pytest.mark.parametrize("name", [case.name for case in CASES if LATER in case.tags])
def test_feature_of_a_later_case_is_absent(name: str) -> None:
    assert not PRESENT[name](), f"the feature of case {name!r} has landed: cover it and drop its tag {LATER!r}"


def test_only_later_cases_are_excused() -> None:
    assert PRESENT.keys() == {case.name for case in CASES if LATER in case.tags}
