"""``tbe tune`` on a backend, behind the gate; and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import environment as clean_environment
from helpers import python
from tune_problems import BAGS, START, STRETCH, planted
from typer.testing import CliRunner

import tbe
from tbe import environment, policy, registry, tune_device
from tbe.bench import measure
from tbe.bench.workloads import Workload, select
from tbe.cli.main import app
from tbe.tune import Discarded, TuneError
from tbe.tune_device import Bench, TuneOptions, space
from tbe_core import Absent, Backend, Capabilities, DeviceConfig, Lookup
from tbe_core.assist import FEATURES
from tbe_core.device_files import read
from tbe_core.tuning import PASSES, Knob, Pass, Tunable
from tbe_cpu import CpuBackend
from tbe_tlx.backend import TlxBackend
from tbe_triton import TritonBackend


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)


# --- on a backend -------------------------------------------------------------------------------------------


class PlantedBackend(CpuBackend):
    """Right, but for 4 bags side by side, where the output is wrong, and stretch 32, where it fails."""

    name = "planted"

    def search_space(self, caps: Capabilities) -> tuple[Knob, ...]:
        return (BAGS, STRETCH)

    def configure(self, problem: Any, caps: Capabilities) -> tuple[DeviceConfig, tuple[str, ...]]:
        return START, ()

    def forward(self, lookup: Lookup, carry: bool) -> tuple[torch.Tensor, torch.Tensor]:
        out, kept = super().forward(lookup, carry)
        return out * (1.5 if lookup.plan.config.forward_bags == 4 else 1.0), kept

    def backward_update(self, lookup: Lookup, *rest: Any) -> None:
        if lookup.plan.config.stretch == 32:
            raise RuntimeError("out of shared memory\nand a long tail")
        super().backward_update(lookup, *rest)


SMALL = (Workload("one", (50,), (4,), 6, (3,)), Workload("two", (20, 9), (8, 4), 5, (2, 4)))


@pytest.fixture
def planted_backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """A backend that the registry knows, whose times are those of ``planted``."""
    backend, load = PlantedBackend(), registry.load

    def known(name: str) -> Backend | Absent:
        return backend if name == "planted" else load(name)

    def figure(metric: Pass, built: Any, sets: Any, device: Any, repeats: int) -> measure.Figure:
        assert policy._override is not None and len(sets) > 1
        seconds = planted(policy._override, metric)["small"]
        return measure.Figure(metric, measure.SECONDS, (9e9, seconds, 0.0), "a note")

    names = [*registry.names(), "planted"]
    monkeypatch.setattr(registry, "load", known)
    monkeypatch.setattr(registry, "names", lambda: names)
    monkeypatch.setattr(measure, "pass_figure", figure)
    policy._plan.cache_clear()
    return backend


def options(**changes: Any) -> TuneOptions:
    defaults = {"backend": "planted", "device": torch.device("cpu"), "workloads": SMALL, "repeats": 3}
    return TuneOptions(**{**defaults, **changes})


def test_a_backend_is_tuned_behind_the_gate(planted_backend: Backend) -> None:
    result = tune_device.tune(options(), lambda *tick: None)
    assert (result.config.forward_bags, result.config.stretch) == (8, 64)
    wrong, failed = (
        next(t for t in result.found.trials if (t.field, t.value) == key)
        for key in (("forward_bags", 4), ("stretch", 32))
    )
    assert wrong.verdict.startswith("discarded: one: wrong result: forward off by")
    assert failed.verdict == "discarded: one: RuntimeError: out of shared memory"
    assert result.final is not None and set(result.final) == set(PASSES)
    assert result.final["backward"] == {"one": 0.5, "two": 0.5}
    assert result.notes == tuple(sorted(f"{w}, {p}: a note" for w in ("one", "two") for p in PASSES))
    source = result.config.source
    assert source.startswith(f"tuned on {tbe.capabilities('cpu').name}, torch {torch.__version__}, ")
    assert source.endswith("tbe tune --device cpu --backend planted --workloads one,two --scale 1 --repeats 3")
    assert policy._override is None


def test_a_winner_that_fails_at_the_end_is_not_returned(
    planted_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Bench, config: DeviceConfig, passes: Any) -> Any:
        if len(passes) > 1 and config != START:
            raise Discarded("one: broke")
        return {which: planted(config, which) for which in passes}

    monkeypatch.setattr(Bench, "times", fails)
    with pytest.raises(TuneError, match="best configuration failed when it was measured again: one: broke"):
        tune_device.tune(options(), lambda *tick: None)


def test_a_limit_of_no_time_is_an_error(planted_backend: Backend) -> None:
    with pytest.raises(TuneError, match="time limit was reached before anything was tried"):
        tune_device.tune(options(time_limit=0.0), lambda *tick: None)


def test_fields_restrict_the_search(planted_backend: Backend) -> None:
    assert space(options()) == (BAGS, STRETCH)
    assert space(options(fields=("stretch",))) == (STRETCH,)
    with pytest.raises(TuneError, match=r"^--fields unroll,x: expected some of forward_bags, stretch$"):
        space(options(fields=("unroll", "stretch", "x")))
    with pytest.raises(TuneError, match=r"^--fields : expected some of"):
        space(options(fields=()))


def test_the_command_writes_a_file_that_is_read_back(
    planted_backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new" / "mine.json"
    words = ["--device", "cpu", "--backend", "planted", "--workloads", "small_batch", "--scale", "0.01"]
    told = CliRunner().invoke(app, ["tune", *words, "--out", str(out), "--json"])
    assert told.exit_code == 0, (told.output, told.exception)
    report = json.loads(told.stdout)
    assert report["file"] == str(out) and report["complete"]
    assert report["changed"] == {"forward_bags": [2, 8], "stretch": [128, 64]}
    written = read(out)
    assert written.backend == "planted" and written.config.to_dict() == report["winner"]
    assert written.fits("planted", tbe.capabilities("cpu"))
    text = CliRunner().invoke(app, ["tune", *words, "--out", str(out)])
    assert text.exit_code == 0, (text.output, text.exception)
    for row in ("adopted", "discarded: small_batch: wrong result", "stretch: 128 -> 64", "small_batch"):
        assert row in text.stdout
    assert f"TBE_CONFIG_DIR={out.parent}" in text.stdout


# --- the backends of this repository ------------------------------------------------------------------------


def test_which_backends_are_tunable() -> None:
    assert isinstance(TritonBackend(), Tunable) and not isinstance(CpuBackend(), Tunable)


ONLY_TLX = {"persistent_warps", "steal_stretches"}
UNSEARCHED = {"source", "reduce_programs"}
"""No number, and one that acts only where ``deterministic=False``, which no workload asks for."""
BLACKWELL = Capabilities(
    "cuda", "nvidia", "sm_100", processors=148, tlx_provider="fbtriton", tlx_features=frozenset(FEATURES)
)


@pytest.mark.parametrize("backend", (TritonBackend(), TlxBackend()))
def test_the_space_has_every_number_with_alternatives(backend: TritonBackend) -> None:
    """A number that nobody would search is no threshold of a device: new ones need their candidates."""
    knobs = backend.search_space(BLACKWELL)
    others = UNSEARCHED if isinstance(backend, TlxBackend) else UNSEARCHED | ONLY_TLX
    assert sorted(knob.field for knob in knobs) == sorted(START.to_dict().keys() - others)
    for knob in knobs:
        default = getattr(START, knob.field)
        assert len(set(knob.values)) == len(knob.values) > 1 and default in knob.values
        assert {type(value) for value in knob.values} == {type(default)}
    assert {knob.affects for knob in knobs} == set(PASSES)


def test_the_default_workloads_exist() -> None:
    assert len(select(tune_device.DEFAULT_WORKLOADS)) == 7


REFUSED = {
    "the cpu backend": (("--device", "cpu"), "nothing is worth tuning for backend 'cpu'"),
    "no interpreter": (("--backend", "triton"), "backend 'triton' cannot run on cpu: no GPU"),
    "unknown": (("--backend", "nosuch"), "backend 'nosuch' cannot run on cpu: unknown, expected one of"),
    "not here": (("--backend", "tlx"), "backend 'tlx' cannot run on cpu: for devices of nvidia only"),
    "scale": (("--scale", "2"), "--scale must be in (0, 1], got 2"),
    "workload": (("--workloads", "nosuch"), "unknown workload nosuch; valid: all, base"),
    "device": (("--device", "tpu"), "--device"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why_and_leave_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, message = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    words = words if "--device" in words else (*words, "--device", "cpu")
    told = CliRunner().invoke(app, ["tune", *words])
    assert told.exit_code == 2 and told.stdout == "" and not list(tmp_path.iterdir())
    assert told.stderr.startswith("tbe tune: ") and message in told.stderr


def test_tbe_backend_names_what_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBE_BACKEND", "triton")
    told = CliRunner().invoke(app, ["tune", "--device", "cpu"])
    assert told.exit_code == 2 and "backend 'triton' cannot run on cpu" in told.stderr


def test_end_to_end_in_the_interpreter(tmp_path: Path) -> None:
    """The real backend, the gate and the clock; the file then serves the next process."""
    out = tmp_path / "own.json"
    words = ["tune", "--device", "cpu", "--backend", "triton", "--workloads", "small_batch", "--scale", "0.001"]
    words += ["--repeats", "1", "--fields", "unroll,forward_streams", "--out", str(out), "--json"]
    code = f"import sys; from tbe.cli.main import app; sys.argv = ['tbe', *{words!r}]; app()"
    done = python(code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    tried = {(t["affects"], t["field"]) for t in report["trials"]}
    assert tried == {("backward", "unroll"), ("together", "forward_streams")}
    assert all(t["score"] > 0 for t in report["trials"]), "no value may fail in the interpreter"
    assert "wall time on the CPU" in done.stderr
    written = read(out)
    assert written.config.to_dict() == report["winner"]
    assert "in Triton's interpreter" in written.config.source
    code = "import tbe\nemb = tbe.TableBatchedEmbeddingBags([tbe.Table('a', 9, 4)], optimizer=tbe.SGD(),"
    code += "backend='triton', device='cpu')\nprint(emb.plan)"
    plan = python(code, TRITON_INTERPRET="1", TBE_CONFIG_DIR=str(tmp_path))
    assert f"[{written.config.source} (from {out})]" in plan.stdout, plan.stderr
    assert "TBE_CONFIG_DIR" not in clean_environment()
