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
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tbe.bench import gate, peers, plots
from tbe.bench.errors import PlotError, SelectionError, StoreError
from tbe.bench.implementations import Ours, load, resolve
from tbe.bench.inputs import SETS, Inputs, feature_bounds, make_input_sets, make_inputs, zipf_ranks
from tbe.bench.measure import BACKWARD, FORWARD, STEP, TOGETHER, passes
from tbe.bench.planted import FAULTS, Planted, PlantedBuilt
from tbe.bench.profile import floor_bytes, profile
from tbe.bench.queries import RunView
from tbe.bench.report import as_json
from tbe.bench.runner import Runner, RunOptions
from tbe.bench.store import Store
from tbe.bench.workloads import TAGS, Workload, catalogue, select
from tbe.cli.bench import bench_app
from tbe_core.optimizers import RowwiseAdagrad

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
    assert (w.optimizer.lr, w.optimizer.eps, w.pooling, w.weighted) == (0.01, 1e-8, "sum", False)


def test_catalogue_is_complete() -> None:
    assert len(KNOWN) == len(catalogue())
    counts = {"base": 11, "weighted": 7, "fp16_output": 10, "variant": 9, "optimizer": 6, "published": 2}
    assert {tag: len(select(tag)) for tag in TAGS} == counts and sum(counts.values()) == len(KNOWN)
    mlperf, mixed = KNOWN["mlperf_dlrm2"], KNOWN["mixed_dims"]
    assert (mlperf.features, mlperf.batch, sum(mlperf.lengths)) == (26, 8192, 214)
    assert mlperf.table_bytes == pytest.approx(52e9, rel=0.02)
    assert mixed.dims == (4, 8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 64, 32, 20)
    assert [w.name for w in select("zipf_1m,weighted")][:2] == ["zipf_1m", "fbgemm_default.weighted"]
    with pytest.raises(SelectionError, match=r"nosuch.*valid: all, base"):
        select("zipf_1m,nosuch")


def test_published_workloads_are_as_published() -> None:
    """FBGEMM's option defaults, and the totals of the command in TorchRec's pull request 4548."""
    w = KNOWN["fbgemm_published"]
    assert (w.rows, w.dims, w.batch, w.lengths) == ((100_000,) * 32, (128,) * 32, 512, (20,) * 32)
    assert (w.weights_dtype, w.output_dtype) == (torch.float32, torch.float32)
    assert w.optimizer == RowwiseAdagrad(lr=0.1, eps=0.1)
    w = KNOWN["torchrec_66"]
    assert (w.features, w.batch, sum(w.dims), sum(w.lengths)) == (66, 294_912, 5492, 1015)
    assert (max(w.rows), w.rows[26], w.dims[26], w.rows[-3:]) == (16_992_630, 16_992_630, 64, (2, 2, 2))
    assert [w.dims.count(dim) for dim in (128, 64, 8, 4)] == [41, 1, 21, 3]
    assert w.table_bytes == 37_654_215_568 and w.lengths[:3] == (120, 86, 86)


def test_a_workload_s_bounds_check_reaches_the_module() -> None:
    w = replace(SMALL, bounds_check="warn", tags=("variant",))
    built: Any = Ours("cpu").build(w, CPU)
    assert built._emb.spec.bounds_check == "warn" and "bounds check warn" in w.summary()
    assert KNOWN["uniform_10m.bounds_warn"] == replace(
        KNOWN["uniform_10m"], name="uniform_10m.bounds_warn", bounds_check="warn", tags=("variant",)
    )
    reason = peers.TorchEmbeddingBag().unsupported(replace(w, weights_dtype=torch.float32))
    assert reason == "EmbeddingBag has no bounds check 'warn'"


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
        assert metrics >= {FORWARD, BACKWARD, TOGETHER, STEP, "first_step_cold", "first_step_warm"}
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
        "new.db": r"schema version 99, .* version 2 only",
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
    for module in ("fbgemm_gpu", peers._FBGEMM_MODULE):  # a module that another test has imported is found again
        monkeypatch.setitem(sys.modules, module, None)
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
    assert {r["metric"] for r in printed["comparisons"]} == {FORWARD, BACKWARD, TOGETHER, STEP}
    assert {r["tag"] for r in printed["summary"]} == {"variant"}
    assert {r["verdict"] for r in printed["bars"]} == {"not measured", "not judged"}
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
