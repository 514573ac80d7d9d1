"""Pages name files that exist, and every environment variable; a logged plan is seen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tbe
from tbe.environment import VARIABLES

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Markdown renderers make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
        waiting += [(page.parent / link).resolve() for link in links if not link.startswith("https://")]
    assert set(PAGES) <= reached


def test_every_variable_is_on_the_page_and_no_other() -> None:
    text = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8").partition("## For tests")[0]
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(VARIABLES)


def test_everything_public_is_in_the_api_reference() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    described = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    assert set(tbe.__all__) <= described


def test_every_page_is_in_the_site_s_navigation() -> None:
    listed = set(re.findall(r"(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("value", [None, "0", "1"])
def test_a_logged_plan_is_seen_once(value: str | None, configured: bool) -> None:
    program = [
        "import logging, tbe",
        "logging.basicConfig(format='%(name)s %(levelname)s %(message)s')" if configured else "",
        "emb = tbe.TableBatchedEmbeddingBags([tbe.Table('a', 4, 4)], optimizer=tbe.SGD(), device='cpu')",
        "emb.plan, emb.plan",
    ]
    environment = {k: v for k, v in os.environ.items() if k not in ("TBE_LOG", "TBE_BACKEND", "TBE_DISABLE")}
    if value is not None:
        environment["TBE_LOG"] = value
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(program)], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stderr.count("cpu serves") == (value == "1"), result.stderr
    assert result.stderr.startswith("tbe INFO cpu serves" if configured else "cpu serves") == (value == "1")
    assert result.stdout == ""
