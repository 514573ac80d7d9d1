"""``tbe tune``: the search finds a planted optimum, trusts no noise, discards what is wrong; and the command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import environment as clean_environment
from helpers import python
from typer.testing import CliRunner

import tbe
from tbe import environment, policy, registry, tune_device
from tbe.bench import measure
from tbe.bench.workloads import Workload, select
from tbe.cli.main import app
from tbe.tune import NOISE, Discarded, Found, OutOfTime, Search, Times, Trial, TuneError, relative
from tbe.tune_device import Bench, TuneOptions, space
from tbe_core import Absent, Backend, Capabilities, DeviceConfig, Lookup
from tbe_core.device_files import read
from tbe_core.tuning import PASSES, Knob, Pass, Tunable
from tbe_cpu import CpuBackend
from tbe_triton import TritonBackend

START = DeviceConfig()
BAGS = Knob("forward_bags", (1, 2, 4, 8), "forward")
UNROLL = Knob("forward_unroll", (2, 4, 8, 16), "forward")
STRETCH = Knob("stretch", (32, 64, 128, 256), "backward")
STREAMS = Knob("forward_streams", (False, True), "together")
KNOBS = (BAGS, UNROLL, STRETCH, STREAMS)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def distance(value: int, best: int) -> float:
    return abs(math.log2(value / best))


def planted(config: DeviceConfig, which: Pass) -> Times:
    """Fastest at 4 bags, unroll 16, stretch 64, streams on. On one workload all is ten times as slow."""
    seconds = {
        "forward": {1: 3.0, 2: 2.0, 4: 1.0, 8: 1.5}[config.forward_bags] + distance(config.forward_unroll, 16),
        "backward": 1 + distance(config.stretch, 64),
        "together": 1.0 if config.forward_streams else 2.0,
    }[which]
    return {"small": seconds, "large": 10 * seconds}


BEST = replace(START, forward_bags=4, forward_unroll=16, stretch=64, forward_streams=True)


class Counting:
    """A measure that remembers what it was asked, and fails where told."""

    def __init__(self, times: Callable[[DeviceConfig, Pass], Times] = planted, limit: int = 10**6) -> None:
        self.times, self.limit = times, limit
        self.asked: list[tuple[Pass, DeviceConfig]] = []

    def __call__(self, config: DeviceConfig, which: Pass) -> Times:
        if len(self.asked) >= self.limit:
            raise OutOfTime
        self.asked.append((which, config))
        return self.times(config, which)


def search(times: Callable[[DeviceConfig, Pass], Times], *knobs: Knob) -> Found:
    return Search(START, knobs or KNOBS, times).run()


def verdicts(found: Found, name: str) -> dict[int | bool, str]:
    """Of the first round."""
    first: dict[int | bool, str] = {}
    for trial in (t for t in found.trials if t.field == name):
        first.setdefault(trial.value, trial.verdict)
    return first


# --- the search ---------------------------------------------------------------------------------------------


def test_the_planted_optimum_is_found() -> None:
    found = search(planted)
    assert found.best == BEST and found.complete and found.start == START
    assert found.changed == {
        "forward_bags": (2, 4),
        "forward_unroll": (8, 16),
        "stretch": (128, 64),
        "forward_streams": (False, True),
    }
    # The second round, with another unroll, tries the start's value again.
    assert verdicts(found, "forward_bags") == {1: "slower", 4: "adopted", 8: "faster, not the best", 2: "slower"}
    assert verdicts(found, "stretch") == {32: "within noise", 64: "adopted", 256: "slower"}


@pytest.mark.parametrize("start", [START, BEST, replace(START, forward_bags=8, forward_unroll=2, stretch=256)])
def test_it_is_found_from_anywhere(start: DeviceConfig) -> None:
    found = Search(start, KNOBS, planted).run()
    assert found.best == BEST
    assert [trial.verdict for trial in found.trials].count("adopted") == len(found.changed)


def test_a_pass_judges_its_own_knobs_in_order() -> None:
    counting = Counting()
    found = search(counting)
    assert {trial.field: trial.affects for trial in found.trials} == {k.field: k.affects for k in KNOBS}
    order = [which for which, _ in counting.asked]
    assert order == sorted(order, key=PASSES.index)
    # A pass of which no knob is searched is not measured.
    counting = Counting()
    search(counting, STRETCH)
    assert {which for which, _ in counting.asked} == {"backward"}


def test_nothing_is_measured_again_but_what_is_confirmed() -> None:
    counting = Counting()
    found = search(counting)
    again = len(counting.asked) - len(set(counting.asked))
    assert again == 2 * len(found.changed)


def test_knobs_that_depend_on_each_other_take_a_second_round() -> None:
    def times(config: DeviceConfig, which: Pass) -> Times:
        # More bags help only once the unroll is 4, which comes second.
        good = config.forward_unroll == 4 and config.forward_bags == 8
        return {"w": 1.0 if good else 1.8 if config.forward_unroll == 4 else 2.0}

    found = search(times, BAGS, UNROLL)
    assert (found.best.forward_bags, found.best.forward_unroll) == (8, 4)
    assert found.trials[-1].present_score <= 0.9


@pytest.mark.parametrize(("gain", "adopted"), [(0.5 * NOISE, False), (2 * NOISE, True)])
def test_a_tie_within_noise_keeps_the_present_value(gain: float, adopted: bool) -> None:
    def times(config: DeviceConfig, which: Pass) -> Times:
        return {"w": 1.0 - gain * (config.forward_bags == 4)}

    found = search(times, BAGS)
    assert (found.best.forward_bags == 4) == adopted
    assert verdicts(found, "forward_bags")[4] == ("adopted" if adopted else "within noise")


def test_one_lucky_sample_adopts_nothing() -> None:
    lucky = {4}

    def times(config: DeviceConfig, which: Pass) -> Times:
        if config.forward_bags in lucky:
            lucky.clear()
            return {"w": 0.9}
        return {"w": 1.0 if config.forward_bags != 4 else 1.2}

    found = search(times, BAGS)
    assert found.best == START and verdicts(found, "forward_bags")[4] == "not confirmed"


def test_a_clock_that_rises_adopts_nothing() -> None:
    calls = [0]

    def times(config: DeviceConfig, which: Pass) -> Times:
        calls[0] += 1
        return {"w": 1.0 if calls[0] == 1 else 0.9}  # all is faster from the second measurement on

    assert search(times, BAGS, UNROLL).best == START


def test_the_score_is_a_geometric_mean_over_workloads() -> None:
    assert relative({"a": 2.0, "b": 0.02}, {"a": 1.0, "b": 0.04}) == pytest.approx(1.0)
    assert relative({"a": 2.0, "b": 8.0}, {"a": 1.0, "b": 1.0}) == pytest.approx(4.0)


def test_the_discarded_are_reported_and_never_adopted() -> None:
    def times(config: DeviceConfig, which: Pass) -> Times:
        if config.forward_bags == 4:
            raise Discarded("w: wrong result: forward off")
        return planted(config, which)

    found = search(times, BAGS)
    assert found.best.forward_bags == 8
    (bad,) = [trial for trial in found.trials if trial.value == 4]
    assert bad == Trial("forward", "forward_bags", 4, 2, None, 1.0, "discarded: w: wrong result: forward off")


def test_what_fails_when_measured_again_is_discarded() -> None:
    measured: set[DeviceConfig] = set()

    def times(config: DeviceConfig, which: Pass) -> Times:
        if config.forward_bags == 4 and config in measured:
            raise Discarded("w: broke")
        measured.add(config)
        return planted(config, which)

    found = search(times, replace(BAGS, values=(2, 4)))
    assert found.best == START
    assert verdicts(found, "forward_bags") == {4: "discarded: when measured again, w: broke"}


def test_what_is_no_configuration_is_passed_over() -> None:
    counting = Counting()
    found = search(counting, Knob("unroll", (4, 32), "backward"))
    assert verdicts(found, "unroll")[32].startswith("discarded: not a configuration: unroll=32")
    assert {config for _, config in counting.asked} == {START}


@pytest.mark.parametrize("limit", range(2, 21))
def test_a_limit_keeps_what_was_adopted_by_then(limit: int) -> None:
    counting, whole = Counting(limit=limit), Counting()
    found = search(counting)
    steps = [START]
    for trial in (t for t in search(whole).trials if t.verdict == "adopted"):
        steps.append(replace(steps[-1], **{trial.field: trial.value}))
    assert found.best in steps and found.complete == (len(whole.asked) <= limit)
    measured = {(t.field, t.value) for t in found.trials if t.score is not None}
    tried = {(which, c) for which, c in counting.asked}
    assert len(measured) >= len(tried) - len(PASSES) * 2, "what was measured is listed, also when time was up"


@pytest.mark.parametrize("limit", [0, 1])
def test_a_limit_before_anything_is_an_error_or_no_change(limit: int) -> None:
    if limit == 0:
        with pytest.raises(TuneError, match="time limit was reached before anything was tried"):
            search(Counting(limit=0))
    else:
        found = search(Counting(limit=1))
        assert found.best == START and not found.complete and not found.trials


def test_a_start_that_cannot_be_measured_is_an_error() -> None:
    def times(config: DeviceConfig, which: Pass) -> Times:
        raise Discarded("w: out of memory")

    with pytest.raises(TuneError, match=r"^the present configuration cannot be measured: w: out of memory$"):
        search(times)


def test_progress_never_passes_what_is_expected() -> None:
    ticks: list[tuple[int, int, str]] = []
    found = Search(START, KNOBS, planted, lambda *tick: ticks.append(tick)).run()
    assert ticks[0] == (0, 10, "forward: the present configuration")
    assert all(done <= expected for done, expected, _ in ticks)
    assert [done for done, _, _ in ticks] == sorted(done for done, _, _ in ticks)
    assert any("stretch=64" in what for _, _, what in ticks) and len(found.trials) >= 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("strech", (1,), "forward"), "field='strech': expected one of .*stretch"),
        (("source", (1,), "forward"), "field='source'"),
        (("stretch", (32,), "sideways"), "affects='sideways' of stretch"),
        (("stretch", (), "forward"), "values of stretch"),
    ],
)
def test_a_wrong_knob_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Knob(*options)


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


def test_the_triton_space_has_every_number_with_alternatives() -> None:
    """A number that nobody would search is no threshold of a device: new ones need their candidates."""
    knobs = TritonBackend().search_space(tbe.capabilities("cpu"))
    assert sorted(knob.field for knob in knobs) == sorted(START.to_dict().keys() - {"source"})
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
    "not here": (("--backend", "tlx"), "backend 'tlx' cannot run on cpu: package tbe_tlx is not part"),
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
