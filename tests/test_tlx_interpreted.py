"""The TLX update's own Python in Triton's interpreter, judged by the reference.

The interpreter has no TLX: what is one instruction on a device is replaced, and only that. The fence becomes
nothing (programs run one after another there), the store-reduce a load, an addition and a store, and launch
control a list of the programs that have not started. What is checked is the rest: slots, turns, phases, rows of
sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from conftest import INTERPRETED
from problems import Trial, from_runs, offsets_of, run_and_compare
from test_values import STRETCH, boundary_runs

import tbe
from tbe_core import DeviceConfig, Table
from tbe_core.assist import CLC, FEATURES
from tbe_core.assist import assist as rule

pytestmark = [
    pytest.mark.values,
    pytest.mark.skipif(not INTERPRETED, reason="for Triton's interpreter: TRITON_INTERPRET is not 1"),
]

SPLIT = DeviceConfig(
    stretch=STRETCH,
    stretch_small=STRETCH,
    fused_programs=0,
    persistent_warps=3,
    steal_stretches=1,
    reduce_programs=1,
)
FUSED = replace(SPLIT, fused_programs=1 << 20)
ADAGRAD = tbe.RowwiseAdagrad(lr=0.5)
RUNS = boundary_runs()


@dataclass
class Programs:
    """Launch control of one launch: the program that runs takes all the others, one after another."""

    waiting: list[tuple[int, int]]
    phase: int = 0
    asked: bool = False
    refused: bool = False
    taken: list[tuple[int, int]] = field(default_factory=list)

    def request(self) -> None:
        assert not self.asked and not self.refused, "a request beside another, or after one that found nothing"
        self.asked = True

    def wait(self, phase: Any) -> tuple[int, int] | None:
        assert self.asked and int(phase) == self.phase, f"waits for phase {int(phase)} in phase {self.phase}"
        self.asked, self.phase = False, self.phase ^ 1
        if not self.waiting:
            self.refused = True
            return None
        self.taken.append(self.waiting.pop(0))
        return self.taken[-1]


class Recorder:
    """What the replaced launches were."""

    def __init__(self) -> None:
        self.works: list[str] = []
        self.reduces: list[bool] = []
        self.queues: list[Programs] = []
        self.combines = 0


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """``tbe_triton`` updates by ``TlxUpdate`` on a device that has everything but launch control."""
    return plant(monkeypatch, frozenset(FEATURES) - {CLC})


def plant(monkeypatch: pytest.MonkeyPatch, has: frozenset[str], deterministic: bool = False) -> Recorder:
    import triton.language as tl

    from tbe_tlx import update
    from tbe_tlx.kernels import update as kernels
    from tbe_triton import TritonBackend
    from tbe_triton.launcher import run

    told = Recorder()

    def fence() -> None:
        """One program after another needs none."""

    def add(sums: Any, slot: Any, acc: Any, width: Any) -> None:
        at = sums + slot * int(width) + tl.arange(0, int(width))
        tl.store(at, tl.load(at) + acc)

    def take(response: tuple[int, int], axis: int) -> Any:
        return tl.zeros([], tl.int32) + response[axis]

    class Interpreted(update.TlxUpdate):
        def _descriptor(self, shape: Any) -> Any:
            assert self.sums is None or self.cut.widest == shape.block, "one width, since a pointer has no blocks"
            return self.space.partials if self.sums is None else self.sums

        def combine(self) -> None:
            told.combines += 1
            super().combine()

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        told.works.append(options.get("WORK", ""))
        told.reduces.append(options.get("REDUCES", False))
        if options.get("WORK") == "stolen":
            told.queues.append(Programs([(x, y) for y in range(grid[1]) for x in range(grid[0])][1:]))
            grid = (1, 1)
        run(kernel, grid, *args, **options)

    queue = {
        "clc_open": lambda: None,
        "clc_request": lambda _: told.queues[-1].request(),
        "clc_wait": lambda _, phase: told.queues[-1].wait(phase.handle.data.item()),
        "clc_found": lambda response: response is not None,
        "clc_place": take,
    }
    for name, replacement in {"fenced": fence, "add_to_sum": add, **queue}.items():
        monkeypatch.setattr(kernels, name, replacement)
    monkeypatch.setattr(
        update, "assist", lambda r, caps, c, _, *w: rule(r, replace(caps, tlx_features=has), c, deterministic, *w)
    )
    monkeypatch.setattr("tbe_triton.update.run", launch)
    monkeypatch.setattr(TritonBackend, "_update", lambda _, *args: Interpreted(*args).launch())
    return told


@pytest.mark.parametrize("config", [SPLIT, FUSED], ids=["split", "fused"])
def test_a_static_grid_takes_every_stretch(config: DeviceConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    told = plant(monkeypatch, frozenset(FEATURES) - {CLC}, deterministic=True)
    run_and_compare(from_runs(RUNS, bags=9, dim=8, optimizer=ADAGRAD), "triton", "cpu", config=config)
    assert "static" in told.works and not any(told.reduces) and bool(told.combines) == (config is SPLIT)


@pytest.mark.parametrize("config", [SPLIT, FUSED], ids=["split", "fused"])
def test_stolen_programs_do_their_stretch_once(config: DeviceConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    told = plant(monkeypatch, frozenset(FEATURES), deterministic=True)
    run_and_compare(from_runs(RUNS, bags=9, dim=8, optimizer=ADAGRAD), "triton", "cpu", config=config)
    assert told.queues
    for queue in told.queues:
        assert queue.refused and not queue.waiting and len(queue.taken) == len(set(queue.taken))


def test_partials_are_added_to_their_run_s_sum(planted: Recorder) -> None:
    run_and_compare(from_runs(RUNS, bags=9, dim=8, optimizer=ADAGRAD), "triton", "cpu", config=SPLIT)
    assert any(planted.reduces) and planted.combines


@pytest.mark.parametrize(
    "runs",
    (
        (3 * STRETCH + 1,),
        (1, 3 * STRETCH - 1),
        (5, 4 * STRETCH - 5),
        (2 * STRETCH, 4 * STRETCH, 1),
        (2 * STRETCH - 1, 5 * STRETCH + 2, 2 * STRETCH),
    ),
    ids=str,
)
def test_sums_of_runs_that_end_with_the_lookups(planted: Recorder, runs: tuple[int, ...]) -> None:
    run_and_compare(from_runs(list(runs), bags=3, dim=8, optimizer=ADAGRAD), "triton", "cpu", config=SPLIT)
    assert any(planted.reduces)


@pytest.mark.parametrize("steals", [False, True], ids=["static", "stolen"])
def test_several_groups_of_one_width(steals: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dims 5 and 8 share a launch, stretches begin anew at every group, and so do slots."""
    told = plant(monkeypatch, frozenset(FEATURES) - (frozenset() if steals else {CLC}))
    tables = (Table("a", 4, 8), Table("b", 3, 5), Table("c", 5, 8))
    generator = torch.Generator().manual_seed(3)
    lengths = [40, 35, 60, 30, 50, 44]
    rows = (4, 4, 3, 3, 5, 5)
    ids = torch.cat(
        [torch.randint(r, (n,), generator=generator) ** 2 % r for r, n in zip(rows, lengths, strict=True)]
    )
    trial = Trial(tables, (0, 1, 2), ids, offsets_of(lengths), None, "sum", ADAGRAD)
    run_and_compare(trial, "triton", "cpu", config=SPLIT)
    assert any(told.reduces) and (("stolen" in told.works) == steals)


def test_a_row_of_less_than_16_bytes_is_not_reduced(planted: Recorder) -> None:
    run_and_compare(from_runs(RUNS, bags=9, dim=2, optimizer=ADAGRAD), "triton", "cpu", config=SPLIT)
    assert planted.works and not any(planted.reduces)
