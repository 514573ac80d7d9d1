"""What a report says is what the database holds: ratios, means, floors, memory and bars by hand-made runs.

Every time here is invented; none was measured.
"""

from __future__ import annotations

import io
import json
import math
import sqlite3
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tbe.bench import gate
from tbe.bench.bars import Standing, standings
from tbe.bench.errors import StoreError
from tbe.bench.inputs import make_inputs
from tbe.bench.machine import machine_facts, software_facts
from tbe.bench.measure import (
    BACKWARD,
    BYTES,
    FIRST_COLD,
    FIRST_WARM,
    FORWARD,
    GRAPH,
    MEMORY,
    SECONDS,
    STEP,
    TOGETHER,
    Figure,
)
from tbe.bench.page import render
from tbe.bench.profile import RunBin, profile
from tbe.bench.queries import RunView
from tbe.bench.report import as_json, print_report, print_short
from tbe.bench.store import OK, WRONG, Outcome, Store
from tbe.bench.tables import Section, sections
from tbe.bench.targets import CUEMBED_FORWARD, DEVICE, TORCHREC_BACKWARD, TORCHREC_FORWARD
from tbe.bench.workloads import Workload, catalogue, select

CPU = torch.device("cpu")
MEMORY_ONLY = Path(":memory:")  # SQLite's name for a database without a file
KNOWN = {workload.name: workload for workload in catalogue()}
SMALL = replace(KNOWN["zipf_1m"], rows=(4000, 300), dims=(16, 4), lengths=(30, 5), batch=50)
FACTS = replace(
    profile(SMALL, make_inputs(SMALL, CPU, 0)),
    lookups=(900, 100),
    bins=(RunBin(1, 1, 100, 100), RunBin(32, 63, 20, 900)),
    forward_bytes=40_000_000,
    backward_bytes=80_000_000,
    output_bytes=4000,
)
BASE = [workload.name for workload in select("base")]

# Microseconds by metric; peak memory in bytes.
Values = Mapping[str, float]
Times = Mapping[str, Mapping[str, Values]]


def values(forward: float, backward: float, together: float, step: float, **more: float) -> Values:
    return {FORWARD: forward, BACKWARD: backward, TOGETHER: together, STEP: step, **more}


def made_up(name: str) -> Workload:
    return KNOWN.get(name, replace(SMALL, name=name))


def add_run(store: Store, times: Times, device: str = "chip", scale: float = 1.0) -> int:
    """A finished run with ``times`` by implementation, workload and metric; copy speed 4 TB/s."""
    machine = {**machine_facts(CPU), "device": device}
    settings = {"repeats": 11, "seed": 0, "copy_bytes_per_second": 4e12}
    run = store.add_run(machine, software_facts(), scale=scale, **settings)  # type: ignore[arg-type]
    names = list(dict.fromkeys(name for by_workload in times.values() for name in by_workload))
    for position, name in enumerate(names):
        workload = store.add_workload(made_up(name))
        store.add_batch(run, workload, position, FACTS, made_up(name).tags)
        for turn, (maker, by_workload) in enumerate(times.items()):
            if name in by_workload:
                known = store.add_implementation(maker, "1", maker.startswith("ours"))
                outcome = Outcome(OK, "", "", gate.Verdict(1e-7, 0.5, 1e-6, None), figures(by_workload[name]))
                store.add_result(run, workload, known, turn, outcome)
    store.finish_run(run)
    return run


def figures(found: Values) -> tuple[Figure, ...]:
    return tuple(
        Figure(metric, BYTES, (value,)) if metric == MEMORY else Figure(metric, SECONDS, (value * 1e-6,))
        for metric, value in found.items()
    )


TIMES = {
    "ours": {"one": values(10, 20, 30, 40), "two": values(10, 100, 110, 200)},
    "peer": {"one": values(20, 160, 180, 180), "two": values(5, 200, 220, 200)},
}


def test_report_shows_the_database_s_numbers() -> None:
    pytest.importorskip("matplotlib")
    with Store(MEMORY_ONLY, create=True) as store:
        view = RunView(store, add_run(store, TIMES))
        found = {r["metric"]: (r["geomean"], r["worst"], r["worst_workload"]) for r in view.summary()}
        assert found[FORWARD] == pytest.approx((1.0, 0.5, "two"))
        assert found[BACKWARD] == pytest.approx((4.0, 2.0, "two"))
        assert found[TOGETHER] == pytest.approx((math.sqrt(12), 2.0, "two"))
        assert found[STEP] == pytest.approx((math.sqrt(4.5), 1.0, "two"))
        floors = {(r["workload"], r["implementation"], r["metric"]): r["ratio"] for r in view.floors()}
        assert floors["one", "peer", FORWARD] == pytest.approx(0.5)  # 40 MB at 4 TB/s are 10 us
        assert floors["two", "ours", BACKWARD] == pytest.approx(0.2)
        shares = [(r["low"], r["share"]) for r in view.run_lengths() if r["workload"] == "one"]
        assert shares == [(1, pytest.approx(0.1)), (32, pytest.approx(0.9))]
        tables = {section.title: section for section in sections(view)}
        table = tables["ours against peer"]
        assert table.rows[0] == (
            *("one", "10.0", "20.0", "2.00x", "20.0", "160", "8.00x"),
            *("30.0", "180", "6.00x", "40.0", "180", "4.50x"),
        )
        assert sum(span for _, span in table.groups) == len(table.head)
        page = render(view)
    for row in table.rows + tables["Speed-up summary"].rows:
        assert all(f">{cell}</td>" in page for cell in row)
    assert page.count("<svg") == 3 and "#0101" not in page and "#0102" not in page
    for outside in ('src="', 'href="http', "url(http", "@import", "<script", "<link", "DOCTYPE svg"):
        assert outside not in page


def test_means_are_of_each_group_of_workloads() -> None:
    ours = {name: values(1, 1, 1, 1) for name in ("hot_100", "zipf_1m", "hot_100.weighted", "zipf_1m.weighted")}
    peer = dict(zip(ours, (values(2, 3, 1, 1), values(8, 12, 1, 1), values(9, 5, 1, 1)), strict=False))
    with Store(MEMORY_ONLY, create=True) as store:
        view = RunView(store, add_run(store, {"ours": ours, "fbgemm": peer}))
        found = {(r["tag"], r["metric"]): (r["workloads"], r["geomean"], r["worst"]) for r in view.summary()}
        assert found["base", FORWARD] == pytest.approx((2, 4.0, 2.0))
        assert found["base", BACKWARD] == pytest.approx((2, 6.0, 3.0))
        assert found["weighted", FORWARD] == pytest.approx((1, 9.0, 9.0))
        assert [key for key in found if key[1] == FORWARD] == [("base", FORWARD), ("weighted", FORWARD)]
        assert [r["workload"] for r in view.run_lengths() if r["low"] == 1] == ["hot_100", "zipf_1m"]


def test_memory_is_beyond_the_output_and_a_lookup() -> None:
    ours = {"one": values(1, 1, 1, 1, peak_memory=24_000), "two": values(1, 1, 1, 1)}
    with Store(MEMORY_ONLY, create=True) as store:
        found = [r["bytes_a_lookup"] for r in RunView(store, add_run(store, {"ours": ours})).times()]
    assert found == [pytest.approx(20.0), None]  # 24,000 less an output of 4,000, over 1,000 lookups


def h200() -> dict[str, dict[str, dict[str, float]]]:
    """A made-up run that reaches every bar it can measure: ours and FBGEMM on all the workloads of the bars."""
    ours, fbgemm = {}, {}
    for name in [*BASE, *CUEMBED_FORWARD, *(w.name for w in select("weighted")), "uniform_10m.bounds_warn"]:
        forward = {**TORCHREC_FORWARD, **CUEMBED_FORWARD}.get(name, 100) / 2
        backward = TORCHREC_BACKWARD.get(name, 100) / 2
        times = values(forward, backward, forward + backward, forward + backward, peak_memory=8000)
        ours[name] = dict(times)
        fbgemm[name] = {metric: 3 * value for metric, value in times.items()}
    ours["uniform_10m"] |= {FORWARD: 10 / 0.95, FIRST_WARM: 4e5}  # the floor is 10 us
    ours["uniform_10m.bounds_warn"][STEP] = ours["uniform_10m"][STEP] * 1.03
    ours["small_batch"][GRAPH] = 79
    ours["fbgemm_default"][FIRST_COLD] = 4.5e6
    return {"ours": ours, "fbgemm": fbgemm}


def judge(times: Times, device: str = DEVICE, scale: float = 1.0) -> tuple[dict[str, Standing], Section]:
    """The standings by figure, and their table."""
    with Store(MEMORY_ONLY, create=True) as store:
        view = RunView(store, add_run(store, times, device, scale))
        json.dumps(as_json(view), allow_nan=False)
        return {standing.target.figure: standing for standing in standings(view)}, sections(view)[0]


def test_bars_are_reached() -> None:
    found, bars = judge(h200())
    kernel = "uniform_10m: update kernel's floor / update kernel"
    verdicts = {figure: standing.verdict for figure, standing in found.items() if figure != kernel}
    assert len(verdicts) == 17 and set(verdicts.values()) == {"reached"}, verdicts
    assert found[kernel].verdict == "not measured" and found[kernel].value is None
    values = {figure: standing.value for figure, standing in found.items()}
    assert values["backward, geometric mean"] == pytest.approx(3.0)
    assert values["backward, worst"] == pytest.approx(3.0)
    assert values["forward to fp16 against cuEmbed, worst"] == pytest.approx(2.0)
    assert values["uniform_10m: forward floor / forward"] == pytest.approx(0.95)
    assert values["uniform_10m: what bounds check warn adds to a step"] == pytest.approx(3.0)
    assert values["peak memory beyond FBGEMM's, most"] == pytest.approx(-16.0)  # (8,000 - 24,000) / 1,000
    assert values["small_batch: step in a CUDA graph"] == pytest.approx(79.0)
    assert values["first step of a process"] == pytest.approx(4.5)
    assert f"Taken on {DEVICE}, fbgemm beside it" in bars.note
    assert bars.rows[0] == (
        "ours",
        "backward, geometric mean",
        "3.00x",
        "at least 2.60x",
        "reached",
        "11 workloads",
    )


def test_bars_are_missed_by_the_workload_that_misses() -> None:
    times = h200()
    times["fbgemm"]["hot_100"][BACKWARD] = 1.4 * times["ours"]["hot_100"][BACKWARD]
    times["fbgemm"]["hot_100"][MEMORY] = 7500
    times["ours"]["zipf_1m.fp16_output"][FORWARD] = CUEMBED_FORWARD["zipf_1m.fp16_output"] / 0.94
    times["ours"]["uniform_10m.bounds_warn"][STEP] = times["ours"]["uniform_10m"][STEP] * 1.06
    times["ours"]["small_batch"][GRAPH] = 81
    found, _ = judge(times)
    mean = (3.0**10 * 1.4) ** (1 / 11)
    assert found["backward, geometric mean"].value == pytest.approx(mean)
    assert {figure for figure, standing in found.items() if standing.verdict == "not reached"} == {
        "backward, worst",
        "forward to fp16 against cuEmbed, worst",
        "peak memory beyond FBGEMM's, most",
        "small_batch: step in a CUDA graph",
        "uniform_10m: what bounds check warn adds to a step",
    }
    assert found["backward, worst"].value == pytest.approx(1.4)
    assert found["backward, worst"].decides == "hot_100"
    assert found["forward to fp16 against cuEmbed, worst"].decides == "zipf_1m.fp16_output"
    assert found["peak memory beyond FBGEMM's, most"].value == pytest.approx(0.5)


def test_bars_need_every_workload_and_their_device() -> None:
    times = h200()
    del times["fbgemm"]["blog_batch"]
    times["fbgemm"]["hot_100"][FORWARD] = times["ours"]["hot_100"][FORWARD]
    found, _ = judge(times)
    assert found["backward, geometric mean"].verdict == found["backward, worst"].verdict == "incomplete"
    assert (found["backward, worst"].found, found["backward, worst"].wanted) == (10, 11)
    assert found["forward, worst"].verdict == "not reached"  # ten are enough to miss
    assert found["backward weighted, geometric mean"].verdict == "reached"
    for device, scale in (("NVIDIA H100", 1.0), (DEVICE, 0.5)):
        found, bars = judge(h200(), device, scale)
        assert {standing.verdict for standing in found.values()} == {"not judged", "not measured"}
        assert bars.title == "Bars" and device in bars.note and "nothing is judged" in bars.note


@pytest.mark.parametrize("device", [DEVICE, "chip"])
def test_a_run_ends_with_the_bars_on_their_device_only(device: str) -> None:
    printed = io.StringIO()
    with Store(MEMORY_ONLY, create=True) as store:
        view = RunView(store, add_run(store, h200(), device))
        print_short(view, Console(file=printed, width=200))
        print_report(view, Console(file=printed, width=200))
    lines = [line.strip() for line in printed.getvalue().splitlines()]
    counts = {title: lines.count(title) for title in ("Bars", "Speed-up summary", "Times")}
    assert counts == {"Bars": 2 if device == DEVICE else 1, "Speed-up summary": 2, "Times": 2}


def test_comparisons_never_join_across_runs() -> None:
    with Store(MEMORY_ONLY, create=True) as store:
        first = add_run(store, {"ours": TIMES["ours"]})
        second = add_run(store, {"peer": TIMES["peer"]})
        assert [len(RunView(store, run).comparisons()) for run in (first, second)] == [0, 0]
        slow = {"ours": TIMES["ours"], "peer": {"one": values(70, 70, 90, 70)}}
        third = add_run(store, slow, "other chip")
        found = [(r["workload"], r["metric"], r["speedup"]) for r in RunView(store, third).comparisons()]
        expected = ((FORWARD, 7.0), (BACKWARD, 3.5), (TOGETHER, 3.0), (STEP, 1.75))
        assert found == [("one", metric, pytest.approx(ratio)) for metric, ratio in expected]
        assert store.rows("SELECT COUNT(*) AS n FROM comparison")[0]["n"] == 4
        assert {r["run_id"] for r in store.rows("SELECT run_id FROM comparison")} == {third}
        assert [r["n"] for r in store.rows("SELECT COUNT(*) AS n FROM machine")] == [2]
        with pytest.raises(StoreError, match=r"no run 9; runs: 1, 2, 3"):
            RunView(store, 9)


def test_store_refuses_figures_of_wrong_results() -> None:
    figure = (Figure(STEP, SECONDS, (1.0,)),)
    with Store(MEMORY_ONLY, create=True) as store:
        run = add_run(store, TIMES)
        other = store.add_implementation("other", "1", False)
        with pytest.raises(sqlite3.IntegrityError, match="did not pass the gate"):
            store.add_result(run, 1, other, 2, Outcome(WRONG, "state off", "", None, figure))
        with pytest.raises(sqlite3.IntegrityError, match="before voiding"):
            store.rows("UPDATE result SET status = 'wrong', reason = 'late'")
        with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
            store.add_result(run, 99, other, 2, Outcome(WRONG, "state off"))
        assert store.rows("SELECT COUNT(*) AS n FROM result")[0]["n"] == 4
