"""``tbe tune`` on a device: measures configurations of a backend on bench workloads, and keeps the best."""

from __future__ import annotations

import datetime
import gc
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from tbe.bench import gate, measure
from tbe.bench.implementations import Built, Ours, failure_types, load
from tbe.bench.inputs import Inputs, make_input_sets
from tbe.bench.profile import profile
from tbe.bench.workloads import Workload
from tbe_core import (
    Absent,
    BackendError,
    Capabilities,
    DeviceConfig,
    Layout,
    RowwiseAdagrad,
    Spec,
    Table,
)
from tbe_core.tuning import PASSES, Knob, Pass, Tunable

from . import environment, policy, probe, registry
from .tune import Discarded, Found, OutOfTime, Search, Tick, Times, TuneError

DEFAULT_WORKLOADS = "fbgemm_default,small_batch,band_10k,zipf_1m,hot_100,mixed_dims,wide_1024"
"""Every regime of run lengths and widths at sizes that a device of 16 GB holds; several minutes on a GPU."""


@dataclass(frozen=True)
class TuneOptions:
    """What to tune and on what. ``scale`` in (0, 1] shrinks bags and rows; ``time_limit`` in seconds stops
    starting new measurements; ``fields`` restricts the search to some fields of ``DeviceConfig``."""

    backend: str
    device: torch.device
    workloads: tuple[Workload, ...]
    repeats: int = 11
    scale: float = 1.0
    seed: int = 0
    time_limit: float | None = None
    fields: tuple[str, ...] | None = None


@dataclass(frozen=True)
class _Batch:
    """What every configuration of one workload is measured with."""

    workload: Workload
    sets: list[Inputs]
    sample: list[gate.FeatureSample]


@dataclass
class Bench:
    """Measures configurations on the device; each must pass the gate on every workload."""

    options: TuneOptions
    deadline: float = float("inf")
    notes: set[str] = field(default_factory=set)
    """What qualifies the times, such as host time that could not be kept out."""
    _batches: list[_Batch] = field(default_factory=list)

    def prepare(self) -> None:
        """Make the inputs of every workload, before any is measured. Raises ``OutOfTime``, ``TuneError``."""
        options = self.options
        for workload in (w.scaled(options.scale) for w in options.workloads):
            self._check_time()
            try:
                sets = make_input_sets(workload, options.device, options.seed)
                sample = gate.draw(workload, sets[0], profile(workload, sets[0]), options.seed)
            except (RuntimeError, MemoryError) as error:
                raise TuneError(f"inputs of {workload.name}: {measure.first_line(error)}") from None
            self._batches.append(_Batch(workload, sets, sample))

    def __call__(self, config: DeviceConfig, which: Pass) -> Times:
        """Median seconds of a pass on every workload. Raises ``Discarded`` or ``OutOfTime``."""
        return self.times(config, (which,))[which]

    def times(self, config: DeviceConfig, passes: tuple[Pass, ...]) -> dict[Pass, Times]:
        """The same of several passes, by pass."""
        found: dict[Pass, Times] = {which: {} for which in passes}
        for batch in self._batches:
            self._check_time()
            try:
                with policy.override_config(config):
                    self._measure(batch, passes, found)
            except failure_types() as error:
                raise Discarded(f"{batch.workload.name}: {measure.first_line(error)}") from None
            finally:
                self._release()
        return found

    def _measure(self, batch: _Batch, passes: tuple[Pass, ...], found: dict[Pass, Times]) -> None:
        options, workload = self.options, batch.workload
        built = Ours(options.backend).build(workload, options.device)
        load(built, options.seed)
        self._gate(built, batch)
        policy.settle()
        if (
            options.device.type == "cuda"
        ):  # nothing compiles on a CPU, and a step in the interpreter takes seconds
            measure.warm_up(built, batch.sets)
        for which in passes:
            self._check_time()
            figure = measure.pass_figure(which, built, batch.sets, options.device, options.repeats)
            found[which][workload.name] = sorted(figure.samples)[len(figure.samples) // 2]
            if figure.note:
                self.notes.add(f"{workload.name}, {which}: {figure.note}")

    def _gate(self, built: Built, batch: _Batch) -> None:
        before = gate.remember(built, batch.sample)
        out = built.forward(batch.sets[0])
        built.backward(out, batch.sets[0].grad)
        measure.synchronize(self.options.device)
        verdict = gate.judge(built, batch.workload, batch.sample, before, out.detach())
        if verdict.reason is not None:
            raise Discarded(f"{batch.workload.name}: wrong result: {verdict.reason}")

    def _check_time(self) -> None:
        if time.monotonic() >= self.deadline:
            raise OutOfTime

    def _release(self) -> None:
        """Give the last operator's memory back before the next one is built."""
        gc.collect()
        if self.options.device.type != "cuda":
            return
        with suppress(RuntimeError):  # after an illegal access every CUDA call fails: what follows is discarded
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Result:
    """A search's end. ``final`` has the best configuration's time over the start's, by pass and workload, from
    one measurement of both at the end; None where time was up."""

    found: Found
    caps: Capabilities
    config: DeviceConfig
    """The best configuration with its new source."""
    final: dict[Pass, Times] | None
    notes: tuple[str, ...]


def chosen_backend(name: str | None, device: torch.device) -> str:
    """``name``, or what ``TBE_BACKEND`` names, or what the library prefers on ``device``."""
    asked = name or environment.backend()
    if asked is not None:
        return asked
    usable = [b for b in policy.backends(device) if b.unavailable is None and b.preference >= 0]
    if not usable:
        raise TuneError(f"no backend can run on {device}: see tbe doctor")
    return max(usable, key=lambda b: b.preference).name


def space(options: TuneOptions) -> tuple[Knob, ...]:
    """The knobs to search. Raises ``TuneError`` when the backend cannot run there, or has none."""
    name, caps = options.backend, probe.capabilities(options.device)
    backend = registry.load(name)
    reason = backend.reason if isinstance(backend, Absent) else backend.unavailable(caps)
    if reason is not None:
        raise TuneError(f"backend {name!r} cannot run on {options.device}: {reason}")
    if not isinstance(backend, Tunable):
        raise TuneError(f"nothing is worth tuning for backend {name!r}: no setting changes its speed")
    knobs = backend.search_space(caps)
    if options.fields is None:
        return knobs
    valid = [knob.field for knob in knobs]
    unknown = [name for name in options.fields if name not in valid]
    if unknown or not options.fields:
        raise TuneError(f"--fields {','.join(unknown)}: expected some of {', '.join(valid)}")
    return tuple(knob for knob in knobs if knob.field in options.fields)


def present_config(options: TuneOptions) -> DeviceConfig:
    """The configuration that the backend has on the device now. Raises ``TuneError``."""
    workload = options.workloads[0]
    shapes = zip(workload.rows, workload.dims, strict=True)
    layout = Layout.make([Table(f"t{number}", *shape) for number, shape in enumerate(shapes)], None)
    dtypes = (workload.weights_dtype, workload.output_dtype)
    problem = Spec(layout, RowwiseAdagrad(), workload.pooling, *dtypes).problem(weighted=workload.weighted)
    try:
        return policy.plan_for(problem, options.device, f"backend=|{options.backend}").config
    except BackendError as error:
        raise TuneError(str(error)) from None


def tune(options: TuneOptions, tick: Tick) -> Result:
    """Search and measure the winner once more, beside the present configuration. Raises ``TuneError``."""
    bench = Bench(options)
    if options.time_limit is not None:
        bench.deadline = time.monotonic() + options.time_limit
    knobs, start = space(options), present_config(options)
    try:
        bench.prepare()
    except OutOfTime:
        raise TuneError("the time limit was reached before anything was tried") from None
    found = Search(start, knobs, bench, tick).run()
    final = _final(bench, found) if found.changed else None
    caps = probe.capabilities(options.device)
    config = replace(found.best, source=_source(options, caps, found.complete))
    return Result(found, caps, config, final, tuple(sorted(bench.notes)))


def _final(bench: Bench, found: Found) -> dict[Pass, Times] | None:
    try:
        before, after = bench.times(found.start, PASSES), bench.times(found.best, PASSES)
    except OutOfTime:
        return None
    except Discarded as error:
        raise TuneError(f"the best configuration failed when it was measured again: {error}") from None
    return {p: {name: seconds / before[p][name] for name, seconds in after[p].items()} for p in PASSES}


def _source(options: TuneOptions, caps: Capabilities, complete: bool) -> str:
    parts = [f"tuned on {caps.name}", f"torch {caps.torch_version}"]
    parts += [f"triton {caps.triton_version}"] if caps.triton_version else []
    parts += ["in Triton's interpreter"] if caps.triton_interpret else []
    parts += [datetime.date.today().isoformat(), command(options)]
    return ", ".join(parts if complete else [*parts, "ended by its time limit"])


def command(options: TuneOptions) -> str:
    """The command line that repeats a run."""
    words = ["tbe tune", f"--device {options.device.type}", f"--backend {options.backend}"]
    words += [f"--workloads {','.join(w.name for w in options.workloads)}"]
    words += [f"--scale {options.scale:g}", f"--repeats {options.repeats}"]
    words += [] if options.time_limit is None else [f"--time-limit {options.time_limit:g}"]
    words += [] if options.fields is None else [f"--fields {','.join(options.fields)}"]
    return " ".join(words)
