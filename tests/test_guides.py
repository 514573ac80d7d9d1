"""The guides and the examples do what they say: their code is run, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, environment, python


def blocks(page: str) -> list[str]:
    """The Python blocks of a page, in order."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("page", "count"), [("add_optimizer.md", 3), ("compile_and_export.md", 4)])
def test_the_code_of_a_guide_runs(page: str, count: int) -> None:
    found = blocks(page)
    assert len(found) == count
    done = python("\n".join([*found, "print('ran to its end')"]))
    assert done.stdout.endswith("ran to its end\n"), done.stderr


def test_the_guide_s_backend_serves(tmp_path: Path) -> None:
    """Installed as pip would leave it: a module and a folder of metadata with the guide's entry point."""
    package, use = blocks("add_backend.md")
    (tmp_path / "bag_backend.py").write_text(package)
    text = (ROOT / "docs" / "add_backend.md").read_text(encoding="utf-8")
    (entry,) = re.findall(r'^\[project\.entry-points\."tbe\.backends"\]\nbags = "(.+)"$', text, re.MULTILINE)
    metadata = tmp_path / "bag_backend-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bag_backend\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[tbe.backends]\nbags = {entry}\n")
    done = python(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{use}\nprint('ran to its end')")
    assert done.stdout == "ran to its end\n", done.stderr


def example(*command: str) -> list[str]:
    """What an example prints, line by line."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / command[0]), *command[1:]],
        env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def losses(lines: list[str]) -> list[float]:
    return [float(found[1]) for line in lines if (found := re.fullmatch(r"step \d+: loss ([\d.]+)", line))]


def test_the_dlrm_learns_from_its_ids() -> None:
    """Below 0.6: what the dense features alone allow is 0.69."""
    found = losses(example("dlrm.py", "--steps", "60", "--batch", "256"))
    assert len(found) == 10 and found[-1] < 0.6 < found[0]


def test_the_fbgemm_program_trains() -> None:
    lines = example("fbgemm_script.py", "--steps", "20")
    found = losses(lines)
    assert len(found) == 5 and found[-1] < 0.5 * found[0]
    assert "'weights_host': [19200]" in lines[-1]


def test_inference_from_a_graph_equals_a_call() -> None:
    lines = example("cuda_graph_inference.py", "--batches", "10", "--batch", "8")
    captured = "replaying a CUDA graph"
    uncaptured = "not captured: a CUDA graph needs a GPU, and the device is cpu"
    assert lines[0] == (captured if torch.cuda.is_available() else uncaptured)
    assert lines[1].startswith("10 batches, mean score 0.")
    assert lines[2] == "largest difference from an uncaptured call: 0.0"


def test_every_example_is_run_and_listed() -> None:
    names = {path.name for path in (ROOT / "examples").glob("*.py")}
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert names and names <= set(re.findall(r"^\| `(\w+\.py)` \|", index, re.MULTILINE))


def test_the_pictures_are_those_that_the_script_draws(tmp_path: Path) -> None:
    images = ROOT / "docs" / "images"
    (tmp_path / "draw.py").write_text((images / "draw.py").read_text())
    subprocess.run([sys.executable, str(tmp_path / "draw.py")], check=True, env=dict(os.environ))
    drawn = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert drawn == sorted(path.name for path in images.glob("*.svg")) and len(drawn) >= 3
    for name in drawn:
        assert (tmp_path / name).read_text() == (images / name).read_text(), name
