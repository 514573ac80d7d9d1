"""Timing of an operator that has passed the gate.

Device time is taken with launches queued ahead: the stream first waits in a long sleep kernel while the host
enqueues the pass between two events, so that host time between launches is not counted. Every sample checks
that the sleep was still running when the host had finished, and is repeated with a longer sleep if not.
On the CPU all times are wall time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tbe.bench.implementations import Built
from tbe.bench.inputs import Inputs

FORWARD, BACKWARD, TOGETHER, STEP, GRAPH = "forward", "backward", "together", "step", "graph"
MEMORY, FIRST_COLD, FIRST_WARM = "peak_memory", "first_step_cold", "first_step_warm"
SECONDS, BYTES = "s", "B"
PASSES = (FORWARD, BACKWARD, TOGETHER)

State = TypeVar("State")

REPLAYS = 10  # of a captured step between two synchronisations

_SHORTEST_SLEEP = 2_000_000  # cycles: about 1 ms, more than a step of most operators takes on the host
_LONGEST_SLEEP = 256_000_000
_CLONE_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}  # far more than any cache


@dataclass(frozen=True)
class Figure:
    """One metric of one operator on one workload: ``samples`` in ``unit``, none when it could not be had;
    ``note`` then says why, and otherwise qualifies the figure or is empty."""

    metric: str
    unit: str
    samples: tuple[float, ...]
    note: str = ""


def synchronize(device: torch.device) -> None:
    """Wait for ``device``; nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wake_autograd(device: torch.device) -> None:
    """A backward of torch's own with a given gradient: the first of a process starts torch's threads and imports
    some seconds of modules, which is no implementation's doing and which ``loss.backward()`` does not meet."""
    some = torch.ones(1, device=device, requires_grad=True)
    torch.autograd.backward(some * 2, torch.ones(1, device=device))


def step(built: Built, inputs: Inputs) -> None:
    """One forward and backward."""
    built.backward(built.forward(inputs), inputs.grad)


def figures(
    built: Built, sets: Sequence[Inputs], device: torch.device, repeats: int, graph: bool
) -> Iterator[Figure]:
    """Every metric of ``built``, each as it is taken; ``graph`` adds the step captured in a CUDA graph."""
    warm_up(built, sets)
    for metric in PASSES:
        yield pass_figure(metric, built, sets, device, repeats)
    yield Figure(STEP, SECONDS, wall(lambda: _every(built, sets), device, repeats, len(sets)))
    yield peak_memory(built, sets[0], device)
    if graph:
        yield graph_step(built, sets[0], device, repeats)


def warm_up(built: Built, sets: Sequence[Inputs]) -> None:
    """A step of each set. Sizes differ between sets: compile and allocate for each before timing any."""
    for inputs in sets:
        step(built, inputs)


def pass_figure(metric: str, built: Built, sets: Sequence[Inputs], device: torch.device, repeats: int) -> Figure:
    """Device time of one of ``PASSES``; wall time on the CPU."""
    timed = {FORWARD: _forward, BACKWARD: _backward, TOGETHER: _together}[metric]
    return Figure(metric, SECONDS, *timed(built, sets, device, repeats))


def copy_speed(device: torch.device, repeats: int = 7) -> float:
    """Bytes a second of a large clone, reads and writes counted: the speed behind every floor."""
    source = torch.zeros(_CLONE_BYTES.get(device.type, _CLONE_BYTES["cpu"]), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    samples, _ = passes(lambda i: None, lambda i, state: target.copy_(source), device, repeats)
    return 2 * source.numel() / sorted(samples)[len(samples) // 2]


def _every(built: Built, sets: Sequence[Inputs]) -> None:
    for inputs in sets:
        step(built, inputs)


def _forward(
    built: Built, sets: Sequence[Inputs], device: torch.device, repeats: int
) -> tuple[tuple[float, ...], str]:
    def timed(number: int, state: None) -> Tensor:
        return built.forward(sets[number % len(sets)])

    with torch.no_grad():  # inference: what a training forward does for its backward counts in TOGETHER
        return passes(lambda number: None, timed, device, repeats)


def _together(
    built: Built, sets: Sequence[Inputs], device: torch.device, repeats: int
) -> tuple[tuple[float, ...], str]:
    def timed(number: int, state: None) -> None:
        step(built, sets[number % len(sets)])

    return passes(lambda number: None, timed, device, repeats)


def _backward(
    built: Built, sets: Sequence[Inputs], device: torch.device, repeats: int
) -> tuple[tuple[float, ...], str]:
    def prepare(number: int) -> Tensor:
        return built.forward(sets[number % len(sets)])

    def timed(number: int, out: Tensor) -> None:
        built.backward(out, sets[number % len(sets)].grad)

    return passes(prepare, timed, device, repeats)


def passes(
    prepare: Callable[[int], State],
    timed: Callable[[int, State], object],
    device: torch.device,
    repeats: int,
) -> tuple[tuple[float, ...], str]:
    """Seconds of ``timed(i, prepare(i))`` for i in 0..repeats-1, without what ``prepare`` takes, and a
    note."""
    if device.type == "cuda":
        return _queued(prepare, timed, repeats)
    samples = []
    for number in range(repeats):
        state = prepare(number)
        begin = time.perf_counter()
        timed(number, state)
        samples.append(time.perf_counter() - begin)
    return tuple(samples), ""


def _queued(
    prepare: Callable[[int], State], timed: Callable[[int, State], object], repeats: int
) -> tuple[tuple[float, ...], str]:
    """Device seconds between two events around ``timed``, enqueued while the device sleeps before them."""
    cuda: Any = torch.cuda  # its events, streams and sleep have no annotations
    cycles, behind = _SHORTEST_SLEEP, 0
    samples: list[float] = []
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    while len(samples) < repeats:
        state = prepare(len(samples))
        cuda._sleep(cycles)
        start.record()
        timed(len(samples), state)
        end.record()
        ahead = not start.query()  # still asleep: all of the pass was enqueued before it began
        end.synchronize()
        del state
        if not ahead and cycles < _LONGEST_SLEEP:
            cycles *= 4
            continue
        behind += not ahead
        samples.append(start.elapsed_time(end) * 1e-3)
    note = f"host time included: the device caught up in {behind} of {repeats} samples" if behind else ""
    return tuple(samples), note


def wall(batch: Callable[[], object], device: torch.device, repeats: int, steps: int) -> tuple[float, ...]:
    """Wall seconds a step of ``batch``, which does ``steps`` of them between two synchronisations."""
    samples = []
    for _ in range(repeats):
        synchronize(device)
        begin = time.perf_counter()
        batch()
        synchronize(device)
        samples.append((time.perf_counter() - begin) / steps)
    return tuple(samples)


def peak_memory(built: Built, inputs: Inputs, device: torch.device) -> Figure:
    """Most bytes that torch's allocator held during a step over what it held before; the output counts,
    and so does workspace, unless it is kept from step to step."""
    if device.type != "cuda":
        return Figure(MEMORY, BYTES, (), "torch does not count memory on the CPU")
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step(built, inputs)
    synchronize(device)
    return Figure(MEMORY, BYTES, (float(torch.cuda.max_memory_allocated(device) - before),))


def graph_step(built: Built, inputs: Inputs, device: torch.device, repeats: int) -> Figure:
    """Wall seconds a replay of one whole step captured in a CUDA graph; without samples when that fails."""
    if device.type != "cuda":
        return Figure(GRAPH, SECONDS, (), "CUDA graphs need a CUDA device")
    cuda: Any = torch.cuda
    current = cuda.current_stream(device)
    try:
        side = cuda.Stream(device)
        side.wait_stream(current)
        with cuda.stream(side):
            for _ in range(3):
                step(built, inputs)
        current.wait_stream(side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            step(built, inputs)
    except RuntimeError as error:
        cuda.set_stream(current)  # a capture that fails at its end leaves its own stream current
        return Figure(GRAPH, SECONDS, (), f"capture failed: {first_line(error)}")

    def replay() -> None:
        for _ in range(REPLAYS):
            graph.replay()

    return Figure(GRAPH, SECONDS, wall(replay, device, repeats, REPLAYS))


def first_line(error: BaseException) -> str:
    """Type and first line of an error's message: CUDA and Triton errors go on for pages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
