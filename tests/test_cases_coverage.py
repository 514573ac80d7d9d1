"""Every named case of ``tbe_core.cases`` is covered by a test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tbe_core.cases import CASES

ROOT = Path(__file__).parent.parent

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


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_case_is_covered(name: str, marked: list[tuple[str, str, bool]]) -> None:
    everywhere = [test for case, test, gpu in marked if case == name and not gpu]
    assert everywhere, f"no test that runs without a GPU is marked case({name!r})"


def test_marks_name_known_cases(marked: list[tuple[str, str, bool]]) -> None:
    unknown = sorted({(case, test) for case, test, _ in marked if case not in {c.name for c in CASES}})
    assert not unknown, "marks of cases that are not listed"
