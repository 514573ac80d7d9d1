"""``tbe tune``: the search finds a planted optimum, trusts no noise and discards what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tune_problems import BAGS, BEST, KNOBS, START, STRETCH, UNROLL, planted

from tbe.tune import NOISE, Discarded, Found, OutOfTime, Search, Times, Trial, TuneError, relative
from tbe_core import DeviceConfig
from tbe_core.tuning import PASSES, Knob, Pass


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
