"""The search behind ``tbe tune``: coordinate descent over a backend's knobs, pass by pass.

A score is the geometric mean, over the workloads, of a pass's time relative to the configuration that the
search began with: below 1 is faster. What measures is a function, so that the search is tested without a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tbe_core import DeviceConfig
from tbe_core.tuning import PASSES, Knob, Pass

NOISE = 0.01
"""Relative difference below which two times count as the same: the present value is then kept."""
ROUNDS = 3
"""At most so often all knobs of a pass are gone through; a round that adopts nothing is the last."""

Times = dict[str, float]
"""Workload name to seconds."""
Value = int | bool


class Discarded(Exception):
    """A configuration that failed, or whose result was wrong, on a workload; the message says how."""


class OutOfTime(Exception):
    """The time limit was reached before a measurement was complete."""


class TuneError(Exception):
    """What the user can act on; complete by itself."""


Measure = Callable[[DeviceConfig, Pass], Times]
"""Times of one pass on every workload. Raises ``Discarded`` or ``OutOfTime``."""


@dataclass(frozen=True)
class Trial:
    """One value of one knob, tried. ``score`` is None when it was discarded."""

    affects: Pass
    field: str
    value: Value
    present: Value
    """The value that it was tried against."""
    score: float | None
    present_score: float
    verdict: str
    """``adopted``, ``slower``, ``within noise``, ``faster, not the best``, ``not confirmed``, ``time was up`` or
    ``discarded: why``."""


@dataclass
class Found:
    """What a search ends with."""

    start: DeviceConfig
    best: DeviceConfig
    trials: list[Trial] = field(default_factory=list)
    complete: bool = True
    """False: the time limit ended it."""

    @property
    def changed(self) -> dict[str, tuple[Value, Value]]:
        """Field to its value at the start and now."""
        before, after = self.start.to_dict(), self.best.to_dict()
        return {
            name: (before[name], after[name])  # type: ignore[misc]
            for name in before
            if name != "source" and before[name] != after[name]
        }


Tick = Callable[[int, int, str], None]


class Search:
    """Finds the configuration with the least scores from ``start``, by ``measure``.

    ``tick(done, expected, what)`` is called before every trial. ``run`` is called once.
    """

    def __init__(
        self,
        start: DeviceConfig,
        knobs: Sequence[Knob],
        measure: Measure,
        tick: Tick = lambda done, expected, what: None,
        noise: float = NOISE,
    ) -> None:
        self.found = Found(start, start)
        self._knobs, self._measure, self._tick, self._noise = knobs, measure, tick, noise
        self._start_times: dict[Pass, Times] = {}
        self._scores: dict[tuple[Pass, DeviceConfig], float] = {}
        self._seen: set[tuple[object, ...]] = set()
        values = start.to_dict()
        self._expected = sum(v != values[k.field] for k in knobs for v in k.values)

    def run(self) -> Found:
        """Search until nothing improves or time is up.

        Raises:
            TuneError: the configuration at the start could not be measured.
        """
        try:
            for which in (p for p in PASSES if any(k.affects == p for k in self._knobs)):
                self._announce(f"{which}: the present configuration")
                self._begin(which)
                for _ in range(ROUNDS):
                    before = self.found.best
                    for knob in (k for k in self._knobs if k.affects == which):
                        self._try(knob)
                    if self.found.best == before:
                        break
        except OutOfTime:
            self.found.complete = False
        return self.found

    def _announce(self, what: str) -> None:
        done = len(self.found.trials)
        self._tick(done, max(self._expected, done), what)

    def _begin(self, which: Pass) -> None:
        start, best = self.found.start, self.found.best
        self._seen |= {_key(which, config.to_dict()) for config in (start, best)}
        try:
            self._start_times[which] = self._measure(start, which)
            self._scores[which, start] = 1.0
            if best != start:
                self._scores[which, best] = self._fresh(best, which)
        except Discarded as error:
            raise TuneError(f"the present configuration cannot be measured: {error}") from None
        except OutOfTime:
            if self.found.trials:
                raise
            raise TuneError("the time limit was reached before anything was tried") from None

    def _fresh(self, config: DeviceConfig, which: Pass) -> float:
        return relative(self._measure(config, which), self._start_times[which])

    def _try(self, knob: Knob) -> None:
        """Measure every value of ``knob`` that has not been, and adopt the best when it is better for certain."""
        which, present = knob.affects, self.found.best
        old, present_score = getattr(present, knob.field), self._scores[which, present]
        scored: list[tuple[float, Value, DeviceConfig]] = []

        def note(value: Value, score: float | None, verdict: str) -> None:
            self.found.trials.append(Trial(which, knob.field, value, old, score, present_score, verdict))

        try:
            for value in (v for v in knob.values if v != old):
                # What was measured before lost against a present configuration that was no faster than this one.
                key = _key(which, {**present.to_dict(), knob.field: value})
                if key in self._seen:
                    continue
                self._announce(f"{which}: {knob.field}={value}")
                try:
                    candidate = _candidate(present, knob.field, value)
                    scored.append((self._fresh(candidate, which), value, candidate))
                except Discarded as error:
                    note(value, None, f"discarded: {error}")
                self._seen.add(key)
            scored.sort(key=lambda s: s[0])
            while scored:
                score, value, candidate = scored[0]
                self._scores[which, candidate] = score
                verdict = self._judge(which, present, candidate)
                note(value, score, verdict)
                del scored[0]
        except OutOfTime:
            for score, value, _ in scored:
                note(value, score, "time was up")
            raise

    def _judge(self, which: Pass, present: DeviceConfig, candidate: DeviceConfig) -> str:
        """The verdict on a candidate against ``present``, and its adoption; called best candidate first."""
        score, present_score = self._scores[which, candidate], self._scores[which, present]
        if score > present_score * (1 + self._noise):
            return "slower"
        if score >= present_score * (1 - self._noise):
            return "within noise"
        if self.found.best != present:
            return "faster, not the best"
        try:
            if not self._confirm(which, present, candidate):
                return "not confirmed"
        except Discarded as error:
            return f"discarded: when measured again, {error}"
        self.found.best = candidate
        return "adopted"

    def _confirm(self, which: Pass, present: DeviceConfig, candidate: DeviceConfig) -> bool:
        """Measure both again, one after the other: neither a lucky sample, nor a clock that has risen since the
        present configuration was measured, may decide. What is measured now replaces what was."""
        for config in (present, candidate):
            self._scores[which, config] = self._fresh(config, which)
        return self._scores[which, candidate] < self._scores[which, present] * (1 - self._noise)


def _key(which: Pass, values: dict[str, Any]) -> tuple[object, ...]:
    """Tells a pass of a configuration, or of what is none, from every other."""
    return (which, *values.values())


def _candidate(present: DeviceConfig, name: str, value: Value) -> DeviceConfig:
    changes: dict[str, Any] = {name: value}
    try:
        return replace(present, **changes)
    except ValueError as error:
        raise Discarded(f"not a configuration: {error}") from None


def relative(times: Times, base: Times) -> float:
    """Geometric mean of the times over those of ``base``, workload by workload."""
    return math.exp(sum(math.log(times[name] / base[name]) for name in base) / len(base))
