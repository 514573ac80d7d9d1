"""On a GPU: repeats of a step at full size are bit-identical, and a captured step replays right with new inputs.

Usage: python ci/gpu_repeat.py [REPEATS] [WORKLOAD ...]; workloads are those of ``tbe bench``.
"""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any

import torch

import tbe
from tbe.bench.implementations import Built, Ours, load
from tbe.bench.inputs import make_input_sets
from tbe.bench.measure import step
from tbe.bench.workloads import Workload, select

DEFAULT = ("band_10k", "zipf_1m", "hot_100", "mixed_dims", "small_batch")


def snapshot(built: Built) -> list[torch.Tensor]:
    return [t.clone() for t in (*built.tables(), *chain.from_iterable(built.states()))]


def repeats(workload: Workload, device: torch.device, times: int) -> None:
    """Output, tables and state of ``times`` steps from one start are equal, bit for bit."""
    built, inputs = Ours().build(workload, device), make_input_sets(workload, device, 0)[0]
    load(built, 0)
    step(built, inputs)
    tbe.settle()
    first: list[torch.Tensor] | None = None
    for number in range(times):
        load(built, 0)
        out = built.forward(inputs)
        built.backward(out, inputs.grad)
        found = [out.detach(), *snapshot(built)]
        if first is None:
            first = found
        elif not all(map(torch.equal, found, first)):
            raise SystemExit(f"{workload.name}: repeat {number} differs from the first")
        del out
    print(f"{workload.name}: {times} steps bit-identical")


def replays(workload: Workload, device: torch.device) -> None:
    """A step captured in a CUDA graph gives, with new inputs in its buffers, what an eager step gives."""
    built, sets = Ours().build(workload, device), make_input_sets(workload, device, 0)
    buffers, other = sets[0], sets[1]
    load(built, 0)
    for _ in range(3):
        step(built, buffers)
    tbe.settle()
    cuda: Any = torch.cuda
    side = cuda.Stream(device)
    side.wait_stream(cuda.current_stream(device))
    with cuda.stream(side):
        for _ in range(3):
            step(built, buffers)
    cuda.current_stream(device).wait_stream(side)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        step(built, buffers)
    load(built, 0)
    step(built, other)
    eager = snapshot(built)
    for mine, theirs in ((buffers.indices, other.indices), (buffers.offsets, other.offsets)):
        mine.copy_(theirs)
    buffers.grad.copy_(other.grad)
    load(built, 0)
    graph.replay()
    torch.cuda.synchronize(device)
    if not all(map(torch.equal, snapshot(built), eager)):
        raise SystemExit(f"{workload.name}: the replayed graph differs from the eager step")
    print(f"{workload.name}: a captured step replays right with new inputs")


def main() -> None:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    device = torch.device("cuda", torch.cuda.current_device())
    for name in sys.argv[2:] or DEFAULT:
        workload = select(name)[0]
        repeats(workload, device, times)
        if not workload.varying:
            replays(workload, device)


if __name__ == "__main__":
    main()
