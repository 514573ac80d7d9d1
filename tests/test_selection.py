"""Who decides the backend: the module, ``use_backend``, the environment; and backends of third parties."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from helpers import environment, make, python, step

import tbe
from tbe import BackendError, Table, policy

SMALL = """
import torch, tbe
def small(**options):
    torch.manual_seed(0)
    tables = [tbe.Table("a", 9, 4)]
    return tbe.TableBatchedEmbeddingBags(tables, optimizer=tbe.SGD(lr=0.1), device="cpu", **options)
def train(emb):
    emb(torch.tensor([1, 2, 1]), torch.tensor([0, 1, 3])).square().sum().backward()
    return emb.weights.detach().clone()
"""


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TBE_BACKEND", "TBE_DISABLE", "TBE_LOG", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)


# --- messages of the environment ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("nosuch", ["TBE_BACKEND='nosuch': no such backend, expected one of tlx, rocm, triton, cpu"]),
        (
            "triton",
            [
                "TBE_BACKEND='triton' cannot serve sum D=4 fp32->fp32",
                "no GPU: move the module to a GPU, or set TRITON_INTERPRET=1",
            ],
        ),
    ],
)
def test_a_wrong_choice_ends_the_program_with_what_to_do(name: str, messages: list[str]) -> None:
    done = python(SMALL + "small()", TBE_BACKEND=name)
    assert done.returncode == 1
    error = done.stderr.strip().rpartition("BackendError: ")[2]
    assert not [message for message in messages if message not in error], done.stderr


def test_the_environment_s_choice_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBE_BACKEND", " cpu ")
    emb = make()
    step(emb)
    assert str(emb.plan).startswith("cpu serves") and emb.plan.rejected == ()


def test_disabled_backends_never_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBE_DISABLE", "triton,,nosuch")
    emb = make()
    assert "passed over triton: disabled by TBE_DISABLE" in str(emb.plan)
    monkeypatch.setenv("TBE_DISABLE", "triton, cpu")
    with pytest.raises(BackendError) as caught:
        step(emb)
    for told in ("no backend serves sum D=4", "triton: disabled by TBE_DISABLE", "cpu: disabled by TBE_DISABLE"):
        assert told in str(caught.value)
    monkeypatch.setenv("TBE_BACKEND", "cpu")
    with pytest.raises(BackendError, match=r"^TBE_BACKEND='cpu' cannot serve .*: disabled by TBE_DISABLE$"):
        step(emb)


def test_the_interpreter_runs_when_asked() -> None:
    code = """
eager, interpreted = small(backend="cpu"), small()
assert interpreted.plan.backend == "triton", interpreted.plan
torch.testing.assert_close(train(eager), train(interpreted), rtol=1e-5, atol=1e-7)
print("close")
"""
    done = python(SMALL + code, TBE_BACKEND="triton", TRITON_INTERPRET="1")
    assert done.stdout == "close\n", done.stderr


def test_tbe_log_shows_every_plan_once() -> None:
    code = """
import os
os.environ["TBE_LOG"] = "0"
small(pooling="mean")
os.environ["TBE_LOG"] = "1"
train(small())
train(small())
"""
    lines = python(SMALL + code).stderr.splitlines()
    assert [line.partition(" fp32")[0] for line in lines if "serves" in line] == ["cpu serves sum D=4"]


def test_tbe_log_goes_through_logging_where_it_is_set_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TBE_LOG", "1")
    handlers = list(policy.logger.handlers)
    with caplog.at_level(logging.INFO, logger="tbe"):
        make(tables=[Table("only_here", 11, 13)])
    assert [(r.name, r.levelno) for r in caplog.records] == [("tbe", logging.INFO)]
    assert caplog.records[0].getMessage().startswith("cpu serves sum D=13")
    assert policy.logger.handlers == handlers


# --- order of precedence ------------------------------------------------------------------------------------


def test_use_backend_nests_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    emb = make()
    monkeypatch.setenv("TBE_BACKEND", "triton")
    with pytest.raises(BackendError, match=r"^TBE_BACKEND='triton' cannot serve"):
        step(emb)
    with tbe.use_backend("cpu"):
        step(emb)
        with tbe.use_backend("triton"), pytest.raises(BackendError, match=r"^use_backend='triton' cannot serve"):
            step(emb)
        assert emb.plan.backend == "cpu"
        with pytest.raises(KeyError), tbe.use_backend("triton"):
            raise KeyError
        assert emb.plan.backend == "cpu"
    with pytest.raises(BackendError, match=r"^TBE_BACKEND='triton' cannot serve"):
        emb.plan  # noqa: B018


def test_a_module_s_own_backend_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    emb = make(backend="cpu")
    monkeypatch.setenv("TBE_BACKEND", "nosuch")
    with tbe.use_backend("triton"):
        step(emb)
        assert emb.plan.backend == "cpu"
    with tbe.use_backend("cpu"), pytest.raises(BackendError, match=r"^backend='triton' cannot serve"):
        make(backend="triton")


def test_use_backend_refuses_an_unknown_name() -> None:
    with (
        pytest.raises(BackendError, match=r"^use_backend\('nosuch'\): expected one of .*cpu"),
        tbe.use_backend("nosuch"),
    ):
        raise AssertionError("the block ran")


def test_a_backward_uses_the_backend_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    emb = make()
    out = emb(torch.tensor([1, 2]), torch.tensor([0, 1, 2]))
    before = emb.weights.clone()
    monkeypatch.setenv("TBE_BACKEND", "nosuch")
    out.sum().backward()
    assert not torch.equal(before, emb.weights)


def test_backends_tells_every_backend_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBE_DISABLE", "triton")
    found = {status.name: status for status in tbe.backends("cpu")}
    assert {"tlx", "rocm", "triton", "cpu"} <= set(found)
    assert found["cpu"].unavailable is None and found["cpu"].preference == 0
    assert found["triton"].unavailable == "disabled by TBE_DISABLE"
    assert all(status.unavailable for name, status in found.items() if name in ("tlx", "rocm"))


# --- third parties ------------------------------------------------------------------------------------------

MINE = """
from tbe_cpu import CpuBackend
class Mine(CpuBackend):
    name = "mine"
    def preference(self, caps):
        return 5
backend = Mine()
other = object()
"""


def install(folder: Path, points: str) -> dict[str, str]:
    """A distribution with entry points, as pip would leave it; the environment that sees it."""
    (folder / "mine_tbe.py").write_text(MINE)
    info = folder / "mine_tbe-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine-tbe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tbe.backends]\n{points}")
    return {"PYTHONPATH": f"{folder}:{environment()['PYTHONPATH']}"}


def test_a_third_party_s_backend_is_found_loaded_when_needed_and_preferred(tmp_path: Path) -> None:
    variables = install(tmp_path, "mine = mine_tbe:backend\n")
    code = """
import os, sys
from tbe import registry
print(registry.names(), "mine_tbe" in sys.modules)
emb = small()
print(torch.equal(train(emb), train(small(backend="cpu"))), small(backend="mine").plan.backend)
print(str(emb.plan).replace("\\n", ";"))
os.environ["TBE_DISABLE"] = "mine"
print(str(emb.plan).replace("\\n", ";"))
"""
    done = python(SMALL + code, **variables)
    names, same, plan, without = done.stdout.splitlines()
    assert names == "['tlx', 'rocm', 'triton', 'cpu', 'mine'] False"
    assert same == "True mine"
    assert plan.startswith("mine serves") and "passed over cpu: can serve, but mine is preferred here" in plan
    assert without.startswith("cpu serves") and "passed over mine: disabled by TBE_DISABLE" in without


def test_entry_points_that_cannot_serve_are_told_and_passed_over(tmp_path: Path) -> None:
    points = {
        "absent": "nosuch_package:backend",
        "empty": "mine_tbe:nosuch",
        "odd": "mine_tbe:other",
        "alias": "mine_tbe:backend",
        "cpu": "mine_tbe:backend",
    }
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    done = python(SMALL + "print(small().plan)", **install(tmp_path, lines))
    assert done.stdout.startswith("cpu serves"), done.stderr
    for told in (
        "absent: its entry point nosuch_package:backend cannot be loaded: No module named 'nosuch_package'",
        "empty: its entry point mine_tbe:nosuch cannot be loaded: module 'mine_tbe' has no attribute 'nosuch'",
        "odd: <object object",
        "alias: <mine_tbe.Mine object",
    ):
        assert f"passed over {told}" in done.stdout
    assert done.stdout.count("is not a backend of that name") == 2
    assert "entry point 'cpu' (mine_tbe:backend) is not used: the name is taken" in done.stderr
