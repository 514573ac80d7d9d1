"""``tbe train`` as its users see it: output, learning, errors, checkpoints, kills and resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import tbe
from tbe.cli.train import train
from tbe.train import checkpoint as checkpoints
from tbe.train.errors import CheckpointError
from tbe.train.loop import Trainer

KEYS = ["epoch", "step", "loss", "auc", "log_loss", "rows", "malformed", "seconds", "backend"]
SMALL = ["--rows", "300", "--dim", "4", "--rows-per-epoch", "640", "--batch-size", "64"]


def run(*options: Any) -> Any:
    app = typer.Typer()
    app.command()(train)
    return CliRunner().invoke(app, [str(option) for option in options])


def run_json(*options: Any) -> list[dict[str, Any]]:
    result = run(*options, "--json")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert all(list(line) == KEYS for line in lines)
    return lines


def refused(*options: Any) -> str:
    result = run(*options)
    assert result.exit_code == 2, (result.output, result.exception)
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return str(result.stderr)


def write_clicks(path: Path, count: int, *, label: str | None = None) -> Path:
    """Tab-separated clicks whose first category decides the label."""
    rows = []
    for i in range(count):
        clicked = str((i % 3 == 0 and 1) or 0)
        categories = [f"{clicked}{i % 2}", *[f"{(i * k) % 11:08x}" for k in range(1, 26)]]
        rows.append("\t".join([label or clicked, *[str(i % 5)] * 13, *categories]) + "\n")
    path.write_text("".join(rows))
    return path


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Every leaf of nested dicts and lists, by its path."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in leaves(item, f"{name}.{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for i, item in enumerate(value) for k, v in leaves(item, f"{name}[{i}]").items()}
    return {name: value}


def assert_same_bits(left: Path, right: Path) -> None:
    first, second = (leaves(torch.load(path, weights_only=True)) for path in (left, right))
    assert first.keys() == second.keys()
    tensors = 0
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            tensors += 1
            assert value.dtype == second[name].dtype and torch.equal(value, second[name]), name
        else:
            assert value == second[name], name
    # 12 of the MLPs with 2 or 3 of optimizer state each, tables, their state, loss, random state.
    assert tensors > 24


# --- learning -----------------------------------------------------------------------------------------------


def test_synthetic_clicks_are_learned_through_the_embeddings() -> None:
    options = ["--rows", 2_000, "--rows-per-epoch", 8_000, "--epochs", 2, "--dense-lr", 0.003]
    first, last = run_json(*options)
    assert last["loss"] < first["loss"] and last["auc"] > 0.75
    assert [first["rows"], first["step"], last["step"]] == [8_000, 63, 126]
    frozen = run_json(*options, "--lr", 1e-12)[-1]
    assert frozen["auc"] < last["auc"] - 0.1, "most of the signal must be in the tables"


def test_a_small_file_is_learned(tmp_path: Path) -> None:
    path = write_clicks(tmp_path / "clicks.tsv", 100)
    options = ["--rows", 500, "--dim", 4, "--holdout", 0.3, "--dense-lr", 0.01]
    lines = run_json("--data", path, "--epochs", 12, *options)
    assert [line["epoch"] for line in lines] == list(range(1, 13))
    assert lines[0]["rows"] < 100 < 128, "fewer rows than a batch must train"
    assert lines[-1]["step"] == 12
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert lines[-1]["auc"] > 0.9
    assert {line["backend"] for line in lines} == {tbe_backend()}


def tbe_backend() -> str:
    emb = tbe.TableBatchedEmbeddingBags([tbe.Table("C1", 4, 4)], optimizer=tbe.SGD(lr=0.1), device="cpu")
    return str(emb.plan.backend)


@pytest.mark.skipif("TBE_CRITEO_SAMPLE" not in os.environ, reason="TBE_CRITEO_SAMPLE is not set")
def test_the_criteo_sample() -> None:
    lines = run_json("--data", os.environ["TBE_CRITEO_SAMPLE"], "--epochs", 20, "--rows", 10_000)
    assert len(lines) == 20
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert all(0 <= line["auc"] <= 1 and line["malformed"] == 0 for line in lines)


@pytest.mark.parametrize(
    "options",
    [
        ["--sparse-optimizer", "sgd", "--lr", "1.0"],
        ["--dense-optimizer", "adagrad", "--dense-lr", "0.05"],
        ["--bottom-mlp", "", "--top-mlp", "16"],
    ],
)
def test_other_optimizers_and_shapes_train(tmp_path: Path, options: list[str]) -> None:
    path = write_clicks(tmp_path / "clicks.tsv", 60)
    lines = run_json("--data", path, "--epochs", 8, "--rows", 500, "--dim", 4, "--batch-size", 16, *options)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.01


def test_a_run_repeats_itself_and_the_seed_matters() -> None:
    def numbers(*options: Any) -> list[Any]:
        return [{k: v for k, v in line.items() if k != "seconds"} for line in run_json(*SMALL, *options)]

    assert numbers("--epochs", 2) == numbers("--epochs", 2) != numbers("--epochs", 2, "--seed", 1)


# --- output -------------------------------------------------------------------------------------------------


def test_output_for_people() -> None:
    result = run(*SMALL, "--epochs", 2)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    header = next(i for i, line in enumerate(lines) if line.split()[:4] == ["epoch", "step", "loss", "AUC"])
    assert tbe_backend() in "\n".join(lines[:header]), "the plan comes first"
    assert [line.split()[:2] for line in lines[header + 1 :]] == [["1", "10"], ["2", "20"]]


def test_json_keeps_stdout_clean() -> None:
    result = run(*SMALL, "--epochs", 1, "--json")
    assert len(result.stdout.splitlines()) == 1
    assert tbe_backend() in result.stderr and "synthetic clicks" in result.stderr


def test_one_class_is_undefined_not_a_crash(tmp_path: Path) -> None:
    path = write_clicks(tmp_path / "clicks.tsv", 60, label="0")
    options = ["--data", path, "--epochs", 1, "--rows", 100, "--dim", 4]
    (line,) = run_json(*options)
    assert line["auc"] is None and line["log_loss"] > 0
    assert "undefined" in run(*options).stdout
    (line,) = run_json(*options, "--holdout", 0)
    assert line["auc"] is line["log_loss"] is None and line["rows"] == 60


def test_malformed_rows_are_reported_with_line_numbers(tmp_path: Path) -> None:
    path = write_clicks(tmp_path / "clicks.tsv", 40)
    path.write_text(path.read_text() + "1\t2\n" + "7" * 5 + "\n" * 12)
    options = ["--data", path, "--epochs", 2, "--rows", 100, "--dim", 4]
    result = run(*options, "--json")
    assert [json.loads(line)["malformed"] for line in result.stdout.splitlines()] == [13, 13]
    assert result.stderr.count("line 41: 2 columns, expected 40") == 1, "told once, not every epoch"
    assert "and 3 more" in result.stderr

    assert "line 50: 1 columns" in result.stderr and "line 51" not in result.stderr

    result = run(*options, "--max-malformed", 5)
    assert result.exit_code == 2
    assert f"{path}, line" in result.stderr and "--max-malformed is 5" in result.stderr


# --- errors -------------------------------------------------------------------------------------------------


def test_bad_files_and_options_are_one_message(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    assert "does not exist" in refused("--data", tmp_path / "absent")
    assert "is empty" in refused("--data", empty)
    assert "--epochs must be 1 or more" in refused("--epochs", 0)
    assert "--top-mlp must be widths" in refused("--top-mlp", "a")
    assert "--resume needs --checkpoint" in refused("--resume")


def test_no_usable_row_lists_the_problems(tmp_path: Path) -> None:
    path = tmp_path / "bad.tsv"
    path.write_text("1\t2\n" * 3)
    result = run("--data", path, "--rows", 10, "--dim", 4, "--holdout", 0)
    assert result.exit_code == 2
    assert "no rows to train on" in result.stderr and "line 3: 2 columns, expected 40" in result.stderr


def test_an_impossible_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no-such-backend" in refused(*SMALL, "--backend", "no-such-backend")
    monkeypatch.setenv("TBE_BACKEND", "no-such-backend")
    assert "no-such-backend" in refused(*SMALL)


def test_a_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "this torch sees no GPU" in refused(*SMALL, "--device", "cuda")


def test_tables_that_do_not_fit_are_refused() -> None:
    message = refused(*SMALL, "--rows", 10**14)
    assert "out of memory" in message and f"{10**14} rows" in message and "lower --rows or --dim" in message


def test_a_bug_is_not_dressed_up_as_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Trainer) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Trainer, "run", broken)
    result = run(*SMALL)
    assert isinstance(result.exception, ValueError) and result.exit_code == 1


def test_interrupt_exits_130_with_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(self: Trainer) -> None:
        raise KeyboardInterrupt

    run_json(*SMALL, "--epochs", 1, "--checkpoint", tmp_path)
    monkeypatch.setattr(Trainer, "__init__", lambda *arguments: None)
    monkeypatch.setattr(Trainer, "run", interrupted)
    for options, hint in (
        ([], "--checkpoint PATH"),
        (["--checkpoint", tmp_path / "none.pt"], "no checkpoint was written yet"),
        (["--checkpoint", tmp_path], f"--resume --checkpoint {tmp_path}"),
    ):
        result = run(*SMALL, *options)
        assert result.exit_code == 130
        assert "interrupted" in result.stderr and hint in result.stderr


def test_divergence_is_told_and_never_saved(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    options = [*SMALL, "--checkpoint", path, "--sparse-optimizer", "sgd", "--lr", "1e30"]
    result = run(*options, "--max-steps", 1)
    assert result.exit_code == 2 and "a held-out logit is not a finite number by step 1" in result.stderr
    assert not path.exists()
    result = run(*options, "--checkpoint-every", 1)
    assert result.exit_code == 2 and "lower --lr or --dense-lr" in result.stderr
    saved = torch.load(path, weights_only=True)
    assert torch.isfinite(saved["loss_sum"]) and saved["global_step"] < 10


# --- checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [1, 4, 10, 13])
@pytest.mark.parametrize("kind", ["synthetic", "file"])
def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path, kind: str, stop: int) -> None:
    options = [*SMALL, "--epochs", "2", "--seed", "5"]
    if kind == "file":
        path = write_clicks(tmp_path / "clicks.tsv", 200)
        options += ["--data", str(path), "--batch-size", "20", "--shuffle-rows", "60"]
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    expected = run_json(*options, "--checkpoint", whole)
    stopped = run_json(*options, "--checkpoint", parts, "--max-steps", stop)
    assert stopped[-1]["step"] == stop
    resumed = run_json(*options, "--checkpoint", parts, "--resume")
    assert {**resumed[-1], "seconds": 0} == {**expected[-1], "seconds": 0}
    assert_same_bits(whole, parts)


def test_a_finished_run_can_be_extended(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.pt", tmp_path / "new" / "parts.pt"
    run_json(*SMALL, "--epochs", 3, "--checkpoint", whole)
    run_json(*SMALL, "--epochs", 1, "--checkpoint", parts)
    run_json(*SMALL, "--epochs", 3, "--checkpoint", parts, "--resume")
    assert_same_bits(whole, parts)
    done = run(*SMALL, "--epochs", 3, "--checkpoint", parts, "--resume", "--json")
    assert done.exit_code == 0 and done.stdout == "" and "nothing left to do" in done.stderr


def test_the_random_state_is_restored(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    run_json(*SMALL, "--epochs", 1, "--checkpoint", path)
    content = torch.load(path, weights_only=True)
    content["rng"] = torch.Generator().manual_seed(99).get_state()
    torch.save(content, path)
    run_json(*SMALL, "--epochs", 2, "--checkpoint", path, "--resume")
    # Training draws nothing, so the state must come out as it went in.
    assert torch.equal(torch.load(path, weights_only=True)["rng"], content["rng"])


def test_resuming_another_run_names_every_difference(tmp_path: Path) -> None:
    path = write_clicks(tmp_path / "clicks.tsv", 60)
    saved = tmp_path / "run.pt"
    options = ["--data", path, "--rows", 100, "--dim", 4, "--epochs", 1, "--checkpoint", saved]
    run_json(*options)
    message = refused(*options, "--resume", "--dim", 8, "--lr", 0.1)
    assert "--dim: checkpoint 4, now 8" in message and "--lr: checkpoint 0.05, now 0.1" in message
    assert "--rows" not in message
    write_clicks(path, 61)
    assert "size of the data file" in refused(*options, "--resume")
    assert "data: checkpoint file, now synthetic" in refused(*options[2:], "--resume")


def test_checkpoints_in_the_way_missing_or_damaged(tmp_path: Path) -> None:
    saved = tmp_path / "last.pt"
    assert "no checkpoint at" in refused(*SMALL, "--checkpoint", tmp_path, "--resume")
    run_json(*SMALL, "--epochs", 1, "--checkpoint", tmp_path)
    content = saved.read_bytes()
    assert "pass --resume to continue it" in refused(*SMALL, "--checkpoint", tmp_path)
    assert saved.read_bytes() == content
    for damaged in (b"", b"garbage", content[: len(content) // 2]):
        saved.write_bytes(damaged)
        assert "is not a readable checkpoint" in refused(*SMALL, "--checkpoint", tmp_path, "--resume")
    torch.save({"weights": torch.zeros(1)}, saved)
    assert "is not a checkpoint of this version" in refused(*SMALL, "--checkpoint", tmp_path, "--resume")


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.pt"
    run_json(*SMALL, "--epochs", 1, "--checkpoint", path)
    saved = checkpoints.Checkpoint(**torch.load(path, weights_only=True))
    before = path.read_bytes()

    def full_disk(content: object, file: Any) -> None:
        file.write(b"half of")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoints.save(saved, path)
    assert path.read_bytes() == before


def subprocess_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def command(*options: Any) -> list[str]:
    return [sys.executable, "-m", "tbe.cli.main", "train", *map(str, options)]


def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """SIGKILL at an arbitrary moment after a checkpoint exists, twice, in real processes."""
    options = [
        *SMALL,
        "--rows-per-epoch",
        6_400,
        "--epochs",
        3,
        "--seed",
        2,
        "--checkpoint-every",
        7,
        "--json",
    ]
    whole, killed = tmp_path / "whole.pt", tmp_path / "killed.pt"
    environment = subprocess_environment()
    for resume in ([], ["--resume"]):
        before = killed.stat().st_mtime_ns if killed.exists() else 0
        process = subprocess.Popen(
            command(*options, "--checkpoint", killed, *resume), env=environment, stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while not killed.exists() or killed.stat().st_mtime_ns == before:
            assert process.poll() is None and time.monotonic() < deadline, "no new checkpoint"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert torch.load(killed, weights_only=True)["epoch"] < 3, "killed too late to prove anything"

    for path, resume in ((killed, ["--resume"]), (whole, [])):
        done = subprocess.run(
            command(*options, "--checkpoint", path, *resume), env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["step"] == 300
    assert_same_bits(whole, killed)


def test_help_loads_neither_trainer_nor_scikit_learn() -> None:
    code = (
        "import sys, tbe.cli.train; "
        "print([m for m in ('sklearn', 'tbe.train.loop', 'tbe.train.model') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=subprocess_environment(), capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr
