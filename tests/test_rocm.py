"""The ``rocm`` backend without an AMD GPU: routing, numbers, the fused tier's rule, values.

Values are those of the kernels in Triton's interpreter, launched with the shapes of an AMD device. It runs
programs one after another and has no waves: it says nothing about ordering in memory.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import INTERPRETED
from helpers import python
from judge import consult
from problems import Trial, from_runs, offsets_of
from typer.testing import CliRunner

import tbe
from tbe import probe, registry
from tbe.cli.main import app
from tbe_core import (
    BackendError,
    Capabilities,
    DeviceConfig,
    Layout,
    Lookup,
    Plan,
    Policy,
    Spec,
    Table,
    Tier,
    Training,
    choose,
    route,
)
from tbe_core.device_files import files_in
from tbe_core.devices import DEVICES
from tbe_core.processors import PROCESSORS, most_warps
from tbe_rocm import VENDORS, RocmBackend, backend, cross_compiler
from tbe_triton import backend as portable
from tbe_triton.fused_tier import fused_tier_hazard, without_hazard
from tbe_triton.shapes import forward_shapes
from tbe_triton.targets import TARGETS

CDNA = ("MI250X", "MI300X", "MI350X")
ADAGRAD = tbe.RowwiseAdagrad(lr=0.5)
PROBLEM = Spec(Layout.make([Table("a", 1000, 128)], None), ADAGRAD, weights_dtype=torch.float16).problem()
CPU = Capabilities("cpu", "cpu", "x86_64", triton_version="3.8.0")


def with_triton(caps: Capabilities) -> Capabilities:
    return replace(caps, triton_version="3.8.0", torch_version="2.13.0")


def plan_on(caps: Capabilities, policy: Policy | None = None) -> Plan:
    caps = with_triton(caps)
    return choose(PROBLEM, caps, registry.load_for(caps), policy or Policy())


AMD = {**{name: DEVICES[name] for name in CDNA}, **{a: TARGETS[a] for a in ("gfx1100", "gfx1201")}}
OTHERS = {name: caps for name, caps in DEVICES.items() if name not in CDNA} | {"cpu": CPU}


# --- routing ------------------------------------------------------------------------------------------------


def test_the_registry_finds_it() -> None:
    assert registry.load("rocm") is backend and isinstance(backend, RocmBackend)
    assert registry.cross_compiler("rocm") is cross_compiler
    assert registry.VENDORS["rocm"] == VENDORS


@pytest.mark.parametrize("name", OTHERS)
def test_a_plan_for_another_vendor_does_not_import_it(name: str) -> None:
    """It says the same as the backend itself would."""
    caps = OTHERS[name]
    code = (
        "import sys\nfrom tbe import registry\nfrom tbe_core import Capabilities\n"
        f"caps = Capabilities({caps.device_type!r}, {caps.vendor!r}, 'x', triton_version='3.8.0')\n"
        "told = {b.name: getattr(b, 'reason', None) for b in registry.load_for(caps)}\n"
        "print(told['rocm'], 'tbe_rocm' in sys.modules, 'tbe_triton' in sys.modules, 'triton' in sys.modules)\n"
    )
    assert python(code).stdout.strip() == f"{backend.unavailable(caps)} False True False"


@pytest.mark.parametrize("name", AMD)
def test_it_serves_amd_before_the_portable_kernels(name: str) -> None:
    plan = plan_on(AMD[name])
    assert plan.backend == "rocm"
    assert "triton" in [rejection.backend for rejection in plan.rejected]
    assert any("sort" in note for note in plan.notes)


@pytest.mark.parametrize("name", OTHERS)
def test_elsewhere_it_says_that_the_vendor_is_another(name: str) -> None:
    caps = OTHERS[name]
    for interpreted in (False, True):
        reason = backend.unavailable(replace(with_triton(caps), triton_interpret=interpreted))
        assert reason == f"for devices of amd only, and the vendor here is {caps.vendor}"
    assert plan_on(caps).backend != "rocm"
    with pytest.raises(BackendError, match=r"backend='rocm' cannot serve .*: for devices of amd only"):
        plan_on(caps, Policy("rocm"))


def test_without_triton_it_gives_the_portable_backend_s_reason() -> None:
    caps = DEVICES["MI300X"]
    assert backend.unavailable(caps) == portable.unavailable(caps)
    assert "not installed" in str(backend.unavailable(caps))


def test_doctor_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TBE_BACKEND", "TBE_DISABLE", "TBE_CONFIG_DIR"):
        monkeypatch.delenv(variable, raising=False)
    versions = {"torch_version": "2.13.0", "triton_version": "3.8.0", "cccl_version": None}
    monkeypatch.setattr(probe, "software", lambda: versions)
    result = CliRunner().invoke(app, ["doctor", "--as", "MI300X", "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    (device,) = json.loads(result.stdout)["devices"]
    assert {b["name"]: b["unavailable"] for b in device["backends"]}["rocm"] is None
    served = [plan for plan in device["plans"] if plan["backend"] is not None]
    assert len(served) > 1 and {plan["backend"] for plan in served} == {"rocm"}
    assert all("never fused" in plan["plan"] and "amd_mi300x.json" in plan["config_source"] for plan in served)


# --- numbers ------------------------------------------------------------------------------------------------


FILES = {
    **{name: f"amd_{name.lower()}.json" for name in CDNA},
    "gfx1100": "amd_rdna3.json",
    "gfx1201": "amd_rdna4.json",
}


@pytest.mark.parametrize("name", AMD)
def test_each_packaged_file_is_untuned_and_fits_one_device(name: str) -> None:
    fitting = [f for f in files_in(RocmBackend.packaged) if f.fits("rocm", AMD[name])]
    assert [f.path.name for f in fitting] == [FILES[name]]
    assert fitting[0].config.source.startswith("untuned, derived from ")
    assert plan_on(AMD[name]).config.source == f"{fitting[0].config.source} ({FILES[name]})"
    assert len(files_in(RocmBackend.packaged)) == len(AMD)


@pytest.mark.parametrize("name", AMD)
def test_the_update_counts_a_full_device_by_the_warps_that_it_holds(name: str) -> None:
    caps = AMD[name]
    assert plan_on(caps).config.warps_per_processor == most_warps(PROCESSORS[caps.arch])


@pytest.mark.parametrize("name", AMD)
@pytest.mark.parametrize("short", (False, True))
@pytest.mark.parametrize("dim", (8, 16, 32, 64, 128, 256, 512))
def test_rows_abreast_fill_the_16_byte_loads_of_a_wave(name: str, dim: int, short: bool) -> None:
    """fp16 rows abreast hold at least lanes x 16 bytes, or fill as many lanes with 16 bytes as one row has."""
    caps, layout = AMD[name], Layout.make([Table("a", 1000, dim)], None)
    (shape,) = forward_shapes(layout, plan_on(caps).config, caps.warp_size, 2, short)
    assert shape.bags * dim * torch.float16.itemsize >= caps.warp_size * 16
    assert shape.unroll >= 2


def test_32_lanes_keep_the_shapes_that_were_measured() -> None:
    """And a CPU that interprets takes them too."""
    for dim, bags in ((1, 32), (8, 32), (16, 16), (64, 4), (128, 2), (256, 2), (512, 1)):
        layout = Layout.make([Table("a", 1000, dim)], None)
        shapes = [forward_shapes(layout, DeviceConfig(), lanes, 2)[0] for lanes in (1, 32)]
        assert [shape.bags for shape in shapes] == [bags, bags]


def test_another_amd_device_takes_the_portable_numbers() -> None:
    caps = replace(AMD["gfx1100"], arch="gfx1030", name="AMD Radeon RX 6900 XT")
    assert plan_on(caps).config == replace(DeviceConfig(), fused_programs=0)


def own_file(folder: Path, name: str, **config: Any) -> None:
    value = {
        "backend": name,
        "device": {"vendor": "amd", "arch": "*", "name": "*"},
        "source": "untuned, mine",
        "config": config,
    }
    (folder / f"{name}.json").write_text(json.dumps(value))


# --- the fused tier -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*AMD, *OTHERS])
def test_the_rule(name: str) -> None:
    caps = {**AMD, **OTHERS}[name]
    config = DeviceConfig(fused_programs=64)
    gated = without_hazard(config, caps)
    if name in AMD:
        assert "waves' stores" in str(fused_tier_hazard(caps))
        assert gated == replace(config, fused_programs=0)
        assert route(100, config, caps).long_runs is Tier.FUSED, "without the rule it would be taken"
        assert route(100, gated, caps).long_runs is Tier.SPLIT
    else:
        assert fused_tier_hazard(caps) is None and gated is config


@pytest.mark.parametrize("name", AMD)
@pytest.mark.parametrize("asked", ("rocm", "triton"))
def test_no_device_file_and_no_search_turns_it_on(name: str, asked: str, tmp_path: Path) -> None:
    own_file(tmp_path, asked, fused_programs=64, stretch=64)
    caps = replace(AMD[name], config_dir=str(tmp_path))
    plan = plan_on(caps, Policy(asked))
    assert plan.config.source.startswith("untuned, mine") and plan.config.stretch == 64
    assert plan.config.fused_programs == 0
    assert "never fused" in plan.notes[0] and "fused up to" not in str(plan)
    serving = {"rocm": backend, "triton": portable}[asked]
    fields = [knob.field for knob in serving.search_space(caps)]
    assert "stretch" in fields and "fused_programs" not in fields


def test_nvidia_keeps_it() -> None:
    plan = plan_on(DEVICES["H200"], Policy("triton"))
    assert plan.config.fused_programs > 0 and "fused up to" in plan.notes[0]
    assert "fused_programs" in [knob.field for knob in portable.search_space(DEVICES["H200"])]


@pytest.mark.parametrize("name", CDNA)
def test_the_search_reaches_beyond_the_packaged_numbers(name: str) -> None:
    config = plan_on(DEVICES[name]).config
    for knob in backend.search_space(DEVICES[name]):
        if knob.field in ("forward_bags", "forward_short_bags", "warps_per_processor"):
            assert min(knob.values) < getattr(config, knob.field) < max(knob.values), knob


# --- values, in the interpreter -----------------------------------------------------------------------------


def judge_step(trial: Trial, caps: Capabilities) -> Plan:
    """One step through the backend's own methods as if on ``caps``, judged by the reference."""
    emb, call = trial.module("cpu", "cpu"), trial.call()
    tables, states = emb.split_embedding_weights(), emb.split_optimizer_states()
    verdict = consult(emb.spec, tables, states, emb.hyper.tolist(), call)
    weights = call.per_sample_weights
    problem = emb.spec.problem(call.indices.dtype, call.offsets.dtype, weights is not None)
    caps = replace(with_triton(caps), triton_interpret=True)
    plan = choose(problem, caps, registry.load_for(caps), Policy())
    assert plan.backend == "rocm"
    lookup = Lookup(emb.spec, plan, emb.weights.data, call.indices, call.offsets, weights)
    out, carry = backend.forward(lookup, True)
    inference, _ = backend.forward(lookup, False)
    assert torch.equal(out, inference)
    verdict.judge_output(out)
    if weights is not None:
        verdict.judge_weight_grad(backend.per_sample_weight_grad(lookup, call.grad))
    backend.backward_update(lookup, call.grad, Training(tuple(emb.states), emb.hyper), carry)
    verdict.judge_tables(tables)
    verdict.judge_states(states)
    return plan


interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="no AMD GPU: values are checked in Triton's interpreter, with TRITON_INTERPRET=1"
)


SHAPES = {64: {8: 64, 64: 8, 128: 4, 512: 1}, 32: {8: 32, 64: 4, 128: 2, 512: 1}}
"""Lanes to bags side by side by block width: what the values below were computed with."""


@interpreted
@pytest.mark.values
@pytest.mark.parametrize("pooling", ("sum", "mean"))
@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize(
    ("name", "dtype"), (("MI300X", torch.float32), ("MI300X", torch.float16), ("gfx1100", torch.float16))
)
def test_values_of_mixed_widths(pooling: str, weighted: bool, name: str, dtype: torch.dtype) -> None:
    """Bag counts that no number of bags side by side divides; empty bags, bags longer than what is unrolled."""
    tables = (Table("a", 30, 128), Table("b", 40, 64), Table("c", 9, 5), Table("d", 20, 512))
    lengths = [3, 0, 17, 1, 0, 2, 40, 5, 1] * len(tables)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 9, (sum(lengths),), generator=generator)
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    trial = Trial(tables, (0, 1, 2, 3), ids, offsets_of(lengths), weights, pooling, ADAGRAD, dtype, torch.float32)
    plan = judge_step(trial, AMD[name])
    shapes = forward_shapes(Layout.make(list(tables), None), plan.config, plan.caps.warp_size, 2)
    assert {s.block: s.bags for s in shapes} == SHAPES[plan.caps.warp_size]


@interpreted
@pytest.mark.values
@pytest.mark.parametrize("dim", (64, 1024))
def test_values_of_long_runs_that_are_split(dim: int) -> None:
    """Few lookups, which NVIDIA would fuse; at D=1024 a row takes more than one wave."""
    trial = from_runs([200, 1, 40, 3, 100], bags=7, dim=dim, optimizer=ADAGRAD)
    plan = judge_step(trial, DEVICES["MI300X"])
    chosen = route(344, plan.config, plan.caps)
    assert chosen.long_runs is Tier.SPLIT and chosen.programs > 1 and chosen.stretch < 200
