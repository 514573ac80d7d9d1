"""A benchmark run: every implementation on every workload, each kept as soon as it is done.

Implementations of a workload share its inputs and run one after the other in one process; their order is
reversed from workload to workload, so that neither always meets the cooler or the more settled device.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from tbe.bench import gate, measure
from tbe.bench.implementations import Built, Implementation, failure_types, is_refusal, load
from tbe.bench.inputs import Inputs, make_input_sets
from tbe.bench.machine import machine_facts, software_facts
from tbe.bench.measure import Figure, first_line, synchronize
from tbe.bench.profile import Profile, profile
from tbe.bench.store import FAILED, NOT_RUN, OK, UNAVAILABLE, UNSUPPORTED, WRONG, Outcome, Store
from tbe.bench.workloads import Workload
from tbe.policy import settle


@dataclass(frozen=True)
class RunOptions:
    """What to run. ``scale`` in (0, 1] shrinks bags and rows, ``time_limit`` in seconds stops starting new
    measurements, ``graph`` adds the CUDA-graph step of our own implementations. Raises ``ValueError``."""

    workloads: tuple[Workload, ...]
    implementations: tuple[Implementation, ...]
    device: torch.device
    repeats: int = 11
    scale: float = 1.0
    seed: int = 0
    time_limit: float | None = None
    graph: bool = True

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats must be 1 or more, got {self.repeats}")
        if not 0 < self.scale <= 1:
            raise ValueError(f"scale must be in (0, 1], got {self.scale}")


@dataclass(frozen=True)
class _Batch:
    """What the implementations of one workload share."""

    sets: list[Inputs]
    facts: Profile
    sample: list[gate.FeatureSample]


Tick = Callable[[str, str], None]


@dataclass
class Runner:
    """Runs ``options`` into ``store``; ``tick(workload, implementation)`` is called before each
    measurement."""

    options: RunOptions
    store: Store
    tick: Tick = lambda workload, implementation: None
    _warm: set[str] = field(default_factory=set)
    _deadline: float | None = None

    def run(self) -> int:
        """Run everything and return the run's id. What an implementation raises is recorded with its result;
        anything else ends the run, and what was done by then is kept."""
        options = self.options
        if options.time_limit is not None:
            self._deadline = time.monotonic() + options.time_limit
        run = self.store.add_run(
            machine_facts(options.device),
            software_facts(),
            repeats=options.repeats,
            scale=options.scale,
            seed=options.seed,
            copy_bytes_per_second=measure.copy_speed(options.device),
        )
        for position, workload in enumerate(options.workloads):
            self._workload(run, position, workload.scaled(options.scale))
        self.store.finish_run(run)
        return run

    def _workload(self, run: int, position: int, workload: Workload) -> None:
        """All implementations on one workload. The inputs are made only if one of them will use them."""
        workload_id = self.store.add_workload(workload)
        batch: _Batch | None = None
        turns = list(self.options.implementations)
        for turn, implementation in enumerate(turns if position % 2 == 0 else reversed(turns)):
            self.tick(workload.name, implementation.name)
            outcome = self._refusal(implementation, workload)
            if outcome is None and batch is None:
                batch, outcome = self._batch(workload)
                if batch is not None:
                    self.store.add_batch(run, workload_id, position, batch.facts, workload.tags)
            if outcome is None and batch is not None:
                outcome = self._measure(implementation, workload, batch)
                self._release()
            assert outcome is not None
            version = implementation.version()
            known = self.store.add_implementation(implementation.name, version, implementation.ours)
            self.store.add_result(run, workload_id, known, turn, outcome)
        batch = None
        self._release()

    def _refusal(self, implementation: Implementation, workload: Workload) -> Outcome | None:
        """Why not even to try, or None."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return Outcome(NOT_RUN, f"time limit of {self.options.time_limit:g} s reached")
        reason = implementation.unavailable(self.options.device)
        if reason is not None:
            return Outcome(UNAVAILABLE, reason)
        reason = implementation.unsupported(workload)
        return None if reason is None else Outcome(UNSUPPORTED, reason)

    def _batch(self, workload: Workload) -> tuple[_Batch | None, Outcome | None]:
        """The shared inputs, or the failure to make them (a batch may be too large for the device)."""
        try:
            sets = make_input_sets(workload, self.options.device, self.options.seed)
            facts = profile(workload, sets[0])
            return _Batch(sets, facts, gate.draw(workload, sets[0], facts, self.options.seed)), None
        except (RuntimeError, MemoryError) as error:
            return None, Outcome(FAILED, f"making the inputs: {first_line(error)}")

    def _measure(self, implementation: Implementation, workload: Workload, batch: _Batch) -> Outcome:
        """Build, check, time. A failure after the gate voids the figures taken before it."""
        detail = ""
        try:
            built = implementation.build(workload, self.options.device)
            detail = built.detail
            load(built, self.options.seed)
            verdict, first = self._first_step(implementation, built, workload, batch)
            if verdict.reason is not None:
                return Outcome(WRONG, verdict.reason, detail, verdict)
            settle()
            graph = self.options.graph and implementation.ours and self.options.device.type == "cuda"
            rest = measure.figures(built, batch.sets, self.options.device, self.options.repeats, graph)
            return Outcome(OK, "", detail, verdict, (first, *rest))
        except failure_types() as error:
            if is_refusal(error):  # names every backend with its reasons: the whole text is the answer
                return Outcome(UNSUPPORTED, str(error), detail)
            return Outcome(FAILED, first_line(error), detail)

    def _first_step(
        self, implementation: Implementation, built: Built, workload: Workload, batch: _Batch
    ) -> tuple[gate.Verdict, Figure]:
        """The gate's step, timed: cold is the implementation's first of this process, and compiles what
        it has not got from a cache on disk; warm may compile for a new problem only."""
        device = self.options.device
        before = gate.remember(built, batch.sample)
        measure.wake_autograd(device)
        synchronize(device)
        begin = time.perf_counter()
        out = built.forward(batch.sets[0])
        built.backward(out, batch.sets[0].grad)
        synchronize(device)
        seconds = time.perf_counter() - begin
        metric = measure.FIRST_WARM if implementation.name in self._warm else measure.FIRST_COLD
        self._warm.add(implementation.name)
        verdict = gate.judge(built, workload, batch.sample, before, out.detach())
        return verdict, Figure(metric, measure.SECONDS, (seconds,))

    def _release(self) -> None:
        """Give the last operator's memory back before the next one is built."""
        gc.collect()
        if self.options.device.type != "cuda":
            return
        # After an illegal access every CUDA call fails, this one too: what follows is then recorded as
        # failed.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def planned(workloads: Sequence[Workload], implementations: Sequence[Implementation]) -> int:
    """How often a run of these will tick."""
    return len(workloads) * len(implementations)
