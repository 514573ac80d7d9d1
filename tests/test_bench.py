"""``tbe bench``: workloads as documented, a gate that catches wrong results, and a report that is its
database."""

from __future__ import annotations

import json
import math
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from tbe.bench import gate, peers, plots
from tbe.bench.errors import PlotError, SelectionError, StoreError
from tbe.bench.implementations import load, resolve
from tbe.bench.inputs import SETS, Inputs, feature_bounds, make_input_sets, make_inputs, zipf_ranks
from tbe.bench.machine import machine_facts, software_facts
from tbe.bench.measure import BACKWARD, FORWARD, SECONDS, STEP, Figure, passes
from tbe.bench.page import render
from tbe.bench.planted import FAULTS, Planted, PlantedBuilt
from tbe.bench.profile import floor_bytes, profile
from tbe.bench.queries import RunView
from tbe.bench.report import as_json
from tbe.bench.runner import Runner, RunOptions
from tbe.bench.store import OK, WRONG, Outcome, Store
from tbe.bench.tables import sections
from tbe.bench.workloads import Workload, catalogue, select
from tbe.cli.bench import bench_app

CPU = torch.device("cpu")
KNOWN = {workload.name: workload for workload in catalogue()}
SCALE = 0.002

# T, rows, D, B, L, ids of the base workloads whose tables are alike.
DOCUMENTED = {
    "fbgemm_default": (32, 100_000, 128, 512, 20, "uniform"),
    "small_batch": (8, 1_000_000, 64, 128, 10, "uniform"),
    "uniform_10m": (16, 10_000_000, 128, 8192, 20, "uniform"),
    "distinct_10m": (8, 10_000_000, 128, 16384, 20, "distinct"),
    "band_10k": (16, 10_000, 128, 16384, 40, "uniform"),
    "zipf_1m": (16, 1_000_000, 128, 16384, 30, 1.15),
    "hot_100": (16, 100, 128, 16384, 40, "uniform"),
    "wide_1024": (4, 200_000, 1024, 4096, 20, 1.05),
    "blog_batch": (32, 4_000_000, 128, 131_072, 20, 1.2),
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_parameters(name: str) -> None:
    w = KNOWN[name]
    ids = w.zipf_exponent if w.ids == "zipf" else w.ids
    shape = (w.features, *set(w.rows), *set(w.dims), w.batch, *set(w.lengths), ids)
    assert shape == DOCUMENTED[name]
    assert w.varying == (name == "zipf_1m")
    assert (w.weights_dtype, w.output_dtype, w.index_dtype) == (torch.float16, torch.float32, torch.int64)
    assert (w.lr, w.eps, w.pooling, w.weighted) == (0.01, 1e-8, "sum", False)


def test_catalogue_is_complete() -> None:
    assert len(KNOWN) == len(catalogue())
    assert len(select("base")) == 11 and len(select("weighted")) == 7
    mlperf, mixed = KNOWN["mlperf_dlrm2"], KNOWN["mixed_dims"]
    assert (mlperf.features, mlperf.batch, sum(mlperf.lengths)) == (26, 8192, 214)
    assert mlperf.table_bytes == pytest.approx(52e9, rel=0.02)
    assert mixed.dims == (4, 8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 64, 32, 20)
    assert [w.name for w in select("zipf_1m,weighted")][:2] == ["zipf_1m", "fbgemm_default.weighted"]
    with pytest.raises(SelectionError, match=r"nosuch.*valid: all, base"):
        select("zipf_1m,nosuch")


@pytest.mark.parametrize("name", KNOWN)
def test_inputs_are_as_documented(name: str) -> None:
    w = KNOWN[name].scaled(SCALE)
    inputs = make_inputs(w, CPU, seed=1)
    lengths = inputs.offsets.diff().view(w.features, w.batch)
    assert inputs.offsets[0] == 0 and inputs.offsets[-1] == inputs.indices.numel()
    assert inputs.indices.dtype == inputs.offsets.dtype == w.index_dtype
    assert inputs.grad.shape == (w.batch, sum(w.dims)) and inputs.grad.dtype == w.output_dtype
    assert inputs.grad.float().std() == pytest.approx(1e-3, rel=0.1)
    assert (inputs.per_sample_weights is not None) == w.weighted
    if inputs.per_sample_weights is not None:
        assert inputs.per_sample_weights.shape == inputs.indices.shape
        assert inputs.per_sample_weights.min() >= 0 and inputs.per_sample_weights.max() < 1
    bounds = feature_bounds(w, inputs.offsets)
    for t, (rows, length) in enumerate(zip(w.rows, w.lengths, strict=True)):
        ids = inputs.indices[bounds[t] : bounds[t + 1]]
        assert ids.min() >= 0 and ids.max() < rows
        assert (lengths[t] == length).all() or w.varying
    if w.varying:
        assert lengths.min() >= 0 and lengths.max() <= 2 * 30
        assert lengths.double().mean() == pytest.approx(30, rel=0.15)
    again, other = make_inputs(w, CPU, seed=1), make_inputs(w, CPU, seed=2)
    assert torch.equal(inputs.indices, again.indices) and torch.equal(inputs.grad, again.grad)
    assert not torch.equal(inputs.grad, other.grad)


def test_distinct_ids_are_distinct_and_follow_the_formula() -> None:
    w = KNOWN["distinct_10m"].scaled(SCALE)
    count = w.batch * 20
    first = make_inputs(w, CPU, 0).indices
    assert torch.equal(first[:count], torch.arange(count) * 7919 % w.rows[0])
    for inputs in make_input_sets(w, CPU, 0):
        assert all(ids.unique().numel() == count for ids in inputs.indices.view(w.features, count))
    assert len(make_input_sets(w, CPU, 0)) == SETS


@pytest.mark.parametrize(("rows", "exponent"), [(1000, 1.05), (1_000_000, 1.15), (4_000_000, 1.2)])
def test_zipf_skew(rows: int, exponent: float) -> None:
    """Shares of the first ranks against the distribution function of the bounded power law."""
    count, power = 200_000, 1 - exponent
    ranks = zipf_ranks(rows, exponent, count, torch.Generator().manual_seed(3))
    assert ranks.min() == 0 and ranks.max() < rows
    for first in (1, 2, 10, 500):
        share = ((first + 1) ** power - 1) / ((rows + 1) ** power - 1)
        assert (ranks < first).double().mean() == pytest.approx(share, abs=4 * math.sqrt(share / count))


@pytest.mark.parametrize(
    ("name", "touched", "forward_us", "backward_us"),
    [("uniform_10m", 162_505, 177, 630), ("hot_100", 100, 679, 1275), ("distinct_10m", 327_680, 178, 633)],
)
def test_floors_at_full_size(name: str, touched: int, forward_us: float, backward_us: float) -> None:
    """The gather floors at 4.28 TB/s that were worked out for one H200."""
    w = KNOWN[name]
    lookups = [w.batch * length for length in w.lengths]
    grad = torch.empty(w.batch, sum(w.dims), device="meta")
    offsets = torch.empty(w.features * w.batch + 1, dtype=torch.int64, device="meta")
    inputs = Inputs(torch.empty(sum(lookups), dtype=torch.int64, device="meta"), offsets, None, grad)
    forward, backward = floor_bytes(w, inputs, lookups, [touched] * w.features)
    assert forward / 4.28e6 == pytest.approx(forward_us, rel=0.01)
    assert backward / 4.28e6 == pytest.approx(backward_us, rel=0.015)


def test_run_lengths_are_counted() -> None:
    w = replace(KNOWN["band_10k"], rows=(100,), dims=(4,), lengths=(2,), batch=6)
    indices = torch.tensor([7] * 8 + [1, 1, 1, 50])
    inputs = Inputs(indices, torch.arange(7) * 2, None, torch.zeros(6, 4))
    facts = profile(w, inputs)
    assert (facts.touched, facts.hottest, facts.longest, facts.lookups) == ((3,), (7,), 8, (12,))
    found = [(b.low, b.high, b.runs, b.lookups) for b in facts.bins]
    assert found == [(1, 1, 1, 1), (2, 3, 1, 3), (4, 7, 0, 0), (8, 15, 1, 8)]


def gated(workload: Workload, fault: str) -> gate.Verdict:
    built = PlantedBuilt(workload, fault)
    inputs = make_inputs(workload, CPU, 0)
    sample = gate.draw(workload, inputs, profile(workload, inputs), 0)
    load(built, 0)
    before = gate.remember(built, sample)
    out = built.forward(inputs)
    built.backward(out, inputs.grad)
    return gate.judge(built, workload, sample, before, out)


SMALL = replace(KNOWN["zipf_1m"], rows=(4000, 300), dims=(16, 4), lengths=(30, 5), batch=50)
KINDS = {
    "fp16": SMALL,
    "fp32": replace(SMALL, weights_dtype=torch.float32),
    "bf16": replace(SMALL, weights_dtype=torch.bfloat16),
    "fp16 output": replace(SMALL, output_dtype=torch.float16),
    "weighted mean": replace(SMALL, weighted=True, pooling="mean"),
    "int32": replace(SMALL, index_dtype=torch.int32, weighted=True),
}


# An ulp of an fp32 weight is within what summing in fp32 may be off: that fault is one of 16-bit tables.
PLANTED = [(kind, fault) for kind in KINDS for fault in FAULTS if (kind, fault[-3:]) != ("fp32", "ulp")]


@pytest.mark.parametrize(("kind", "fault"), [*((kind, "") for kind in KINDS), *PLANTED])
def test_gate_catches_what_is_planted_and_nothing_else(kind: str, fault: str) -> None:
    verdict = gated(KINDS[kind], fault)
    assert (f"{FAULTS[fault]} off" in (verdict.reason or "")) if fault else verdict.reason is None, verdict


def test_half_ulp() -> None:
    values = torch.tensor([1.0, 1.5, 0.999, 0.0, 6e-8], dtype=torch.float64)
    expected = [2**-11, 2**-11, 2**-12, 2**-25, 2**-25]
    assert gate.half_ulp(values, torch.float16).tolist() == expected


def options(*implementations: Planted, **changes: object) -> RunOptions:
    workloads = (KINDS["fp16"], replace(KINDS["weighted mean"], name="second"))
    base = RunOptions(workloads, tuple(implementations), CPU, repeats=3)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_runner_records_right_wrong_failed_and_unsupported(tmp_path: Path) -> None:
    makers = (
        Planted(),
        Planted("wrong", "stale state"),
        Planted("broken", broken=True),
        Planted("picky", refused_pooling="mean"),
    )
    ticks: list[str] = []
    with Store(tmp_path / "a.db", create=True) as store:
        run = Runner(options(*makers), store, lambda w, i: ticks.append(i)).run()
        view = RunView(store, run)
        assert ticks == ["ours", "wrong", "broken", "picky", "picky", "broken", "wrong", "ours"]
        timed = [(r["workload"], r["implementation"]) for r in view.times()]
        assert timed == [("zipf_1m", "ours"), ("zipf_1m", "picky"), ("second", "ours")]
        voided = {(r["workload"], r["implementation"]): (r["status"], r["reason"]) for r in view.voided()}
        assert voided["second", "picky"] == ("unsupported", "no mean pooling")
        assert voided["zipf_1m", "broken"] == ("failed", "RuntimeError: out of memory")
        assert voided["zipf_1m", "wrong"][0] == "wrong" and "state off by" in voided["zipf_1m", "wrong"][1]
        assert store.rows("SELECT state_error FROM result WHERE status = 'wrong'")[0]["state_error"] > 0.1
        metrics = {r["metric"] for r in view.figures() if r["implementation"] == "ours"}
        assert metrics >= {FORWARD, BACKWARD, STEP, "first_step_cold", "first_step_warm"}
        assert view.header()["complete"] == 1


def test_time_limit_and_crash_keep_what_is_done(tmp_path: Path) -> None:
    with Store(tmp_path / "a.db", create=True) as store:
        view = RunView(store, Runner(options(Planted(), time_limit=0.0), store).run())
        assert [r["reason"] for r in view.voided()] == ["time limit of 0 s reached"] * 2

        def crash(workload: str, implementation: str) -> None:
            if workload == "second":
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Runner(options(Planted()), store, crash).run()
    with Store(tmp_path / "a.db") as store:
        view = RunView(store)
        assert view.header()["complete"] == 0 and view.id == 2
        assert [r["workload"] for r in view.times()] == ["zipf_1m"]
        assert view.run_lengths()[0]["workload"] == "zipf_1m"


def add_run(store: Store, times: dict[str, dict[str, tuple[float, float, float]]], device: str) -> int:
    """A finished run with (forward, backward, step) in microseconds by implementation and workload."""
    machine = {**machine_facts(CPU), "device": device}
    run = store.add_run(machine, software_facts(), repeats=11, scale=1.0, seed=0, copy_bytes_per_second=4e12)
    inputs = make_inputs(SMALL, CPU, 0)
    facts = replace(profile(SMALL, inputs), forward_bytes=40_000_000, backward_bytes=80_000_000)
    names = list(dict.fromkeys(name for by_workload in times.values() for name in by_workload))
    for position, name in enumerate(names):
        workload = store.add_workload(replace(SMALL, name=name))
        store.add_batch(run, workload, position, facts)
        for turn, (maker, by_workload) in enumerate(times.items()):
            if name not in by_workload:
                continue
            known = store.add_implementation(maker, "1", maker == "ours")
            metrics = zip((FORWARD, BACKWARD, STEP), by_workload[name], strict=True)
            figures = tuple(Figure(m, SECONDS, (value * 1e-6,)) for m, value in metrics)
            verdict = gate.Verdict(1e-7, 0.5, 1e-6, None)
            store.add_result(run, workload, known, turn, Outcome(OK, "", "", verdict, figures))
    store.finish_run(run)
    return run


TIMES = {
    "ours": {"one": (10.0, 20.0, 40.0), "two": (10.0, 100.0, 200.0)},
    "peer": {"one": (20.0, 160.0, 180.0), "two": (5.0, 200.0, 200.0)},
}


def test_report_shows_the_database_s_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with Store(tmp_path / "a.db", create=True) as store:
        view = RunView(store, add_run(store, TIMES, "chip"))
        found = {r["metric"]: (r["geomean"], r["worst"], r["worst_workload"]) for r in view.summary()}
        assert found[FORWARD] == pytest.approx((1.0, 0.5, "two"))
        assert found[BACKWARD] == pytest.approx((4.0, 2.0, "two"))
        assert found[STEP] == pytest.approx((math.sqrt(4.5), 1.0, "two"))
        floors = {(r["workload"], r["implementation"], r["metric"]): r["ratio"] for r in view.floors()}
        assert floors["one", "peer", FORWARD] == pytest.approx(2.0)  # 40 MB at 4 TB/s are 10 us
        assert floors["two", "ours", BACKWARD] == pytest.approx(5.0)
        assert sum(r["share"] for r in view.run_lengths() if r["workload"] == "one") == pytest.approx(1.0)
        tables = {section.title: section.rows for section in sections(view)}
        assert tables["ours against peer"][0] == (
            *("one", "10.0", "20.0", "2.00x", "20.0", "160", "8.00x", "40.0", "180", "4.50x"),
        )
        page = render(view)
    for row in tables["ours against peer"] + tables["Speed-up summary"]:
        assert all(f">{cell}</td>" in page for cell in row)
    assert page.count("<svg") == 3
    for outside in ('src="', 'href="http', "url(http", "@import", "<script", "<link", "DOCTYPE svg"):
        assert outside not in page


def test_comparisons_never_join_across_runs(tmp_path: Path) -> None:
    with Store(tmp_path / "a.db", create=True) as store:
        first = add_run(store, {"ours": TIMES["ours"]}, "chip")
        second = add_run(store, {"peer": TIMES["peer"]}, "chip")
        assert [len(RunView(store, run).comparisons()) for run in (first, second)] == [0, 0]
        slow = {"ours": TIMES["ours"], "peer": {"one": (70.0, 70.0, 70.0)}}
        third = add_run(store, slow, "other chip")
        found = [(r["workload"], r["metric"], r["speedup"]) for r in RunView(store, third).comparisons()]
        assert found == [("one", m, pytest.approx(s)) for m, s in ((FORWARD, 7.0), (BACKWARD, 3.5), (STEP, 1.75))]
        assert store.rows("SELECT COUNT(*) AS n FROM comparison")[0]["n"] == 3
        assert {r["run_id"] for r in store.rows("SELECT run_id FROM comparison")} == {third}
        assert [r["n"] for r in store.rows("SELECT COUNT(*) AS n FROM machine")] == [2]
        with pytest.raises(StoreError, match=r"no run 9; runs: 1, 2, 3"):
            RunView(store, 9)


def test_store_refuses_figures_of_wrong_results(tmp_path: Path) -> None:
    figure = (Figure(STEP, SECONDS, (1.0,)),)
    with Store(tmp_path / "a.db", create=True) as store:
        run = add_run(store, TIMES, "chip")
        other = store.add_implementation("other", "1", False)
        with pytest.raises(sqlite3.IntegrityError, match="did not pass the gate"):
            store.add_result(run, 1, other, 2, Outcome(WRONG, "state off", "", None, figure))
        with pytest.raises(sqlite3.IntegrityError, match="before voiding"):
            store.rows("UPDATE result SET status = 'wrong', reason = 'late'")
        with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
            store.add_result(run, 99, other, 2, Outcome(WRONG, "state off"))
        assert store.rows("SELECT COUNT(*) AS n FROM result")[0]["n"] == 4


def test_store_refuses_other_files(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("not a database, but long enough to look at" * 30)
    with sqlite3.connect(tmp_path / "foreign.db") as other:
        other.execute("CREATE TABLE t (x)")
    with Store(tmp_path / "new.db", create=True), sqlite3.connect(tmp_path / "new.db") as newer:
        newer.execute("UPDATE schema_version SET version = 99")
    refusals = {
        "missing.db": "no results database at",
        "text.db": "is not a results database",
        "foreign.db": "something else",
        "new.db": r"schema version 99, .* version 1 only",
    }
    for name, message in refusals.items():
        with pytest.raises(StoreError, match=message):
            Store(tmp_path / name)


def test_a_sample_counts_only_when_its_launches_were_queued_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps: list[int] = []
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 2.0)
    event.query = lambda: len(sleeps) < 3  # awake already: the first two sleeps are too short for the host
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "_sleep", sleeps.append)
    cuda, seen = torch.device("cuda"), []
    samples, note = passes(lambda i: i, lambda i, state: seen.append((i, state)), cuda, 2)
    assert (samples, note) == ((2e-3, 2e-3), "")
    assert seen == [(0, 0), (0, 0), (0, 0), (1, 1)]
    assert sleeps == [sleeps[0] * longer for longer in (1, 4, 16, 16)]
    event.query = lambda: True
    assert "caught up in 2 of 2" in passes(lambda i: i, lambda i, state: None, cuda, 2)[1]


def test_peers_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    assert "fbgemm_gpu cannot be imported" in (peers.Fbgemm().unavailable(CPU) or "")
    assert "multiples of 4, got [3]" in (peers.Fbgemm().unsupported(replace(SMALL, dims=(3, 4))) or "")
    assert "fp32 only" in (peers.TorchEmbeddingBag().unsupported(SMALL) or "")
    with pytest.raises(SelectionError, match="unknown implementation nosuch; valid: ours"):
        resolve("torch,nosuch", CPU)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotError, match=r"portable-tbe\[bench\]"):
        plots._drawn(lambda plt, rows: None, [])


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(bench_app, list(arguments))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_command_line_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    db, html = str(tmp_path / "b.db"), tmp_path / "page.html"
    names = "fbgemm_default.fp32_tables,zipf_1m.fp32_tables"
    small = ("--device", "cpu", "--scale", "0.001", "--repeats", "2", "--db", db, "--workloads", names)
    printed = json.loads(invoke("run", "--implementations", "ours,torch", *small, "--json"))
    assert printed["without_figures"] == []
    assert {r["metric"] for r in printed["comparisons"]} == {FORWARD, BACKWARD, STEP}
    text = invoke("--implementations", "ours,torch", *small)  # without a command: run
    assert "Speed-up summary" in text and text.rstrip().endswith("same run.")
    assert "ours against torch" in invoke("report", db, "--html", str(html), "--run", "1")
    assert html.read_text().startswith("<!doctype html>")
    with Store(Path(db)) as store:
        assert as_json(RunView(store, 1)) == {k: v for k, v in printed.items() if k != "db"}
    listed = json.loads(invoke("list", "--device", "cpu", "--json"))
    assert [w["name"] for w in listed["workloads"]] == list(KNOWN)
    assert {"ours", "fbgemm", "torch"} <= {maker["name"] for maker in listed["implementations"]}
    for wrong in (["report", str(tmp_path / "none.db")], ["--workloads", "x"], ["run", "--scale", "2"]):
        refused = CliRunner().invoke(bench_app, wrong)
        assert refused.exit_code == 2 and "tbe bench: " in refused.stderr


def test_importing_tbe_imports_no_bench() -> None:
    heavy = "('tbe.bench', 'matplotlib', 'fbgemm')"
    code = f"import sys, tbe; sys.exit(any(name.startswith({heavy}) for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
