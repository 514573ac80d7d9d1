"""The TLX backend's answers: reasons on every machine, plans, thresholds from files; no compiler, no device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tbe
from tbe import BackendError, registry
from tbe_core import Capabilities, DeviceConfig, Layout, Policy, Problem, Spec, choose
from tbe_core.assist import CLC, FEATURES, GPU_FENCE, STORE_REDUCE
from tbe_core.device_files import write
from tbe_core.devices import DEVICES
from tbe_tlx import backend

PROVIDER = "triton-utlx 3.8.0.post16"
LAYOUT = Layout.make([tbe.Table("a", 1000, 64)], None)
PROBLEM = Spec(LAYOUT, tbe.RowwiseAdagrad()).problem()
LOOSE = Spec(LAYOUT, tbe.RowwiseAdagrad(), deterministic=False).problem()
ASKED = Policy("tlx", "TBE_BACKEND=")
HOPPER = frozenset(FEATURES) - {CLC}
CPU = Capabilities("cpu", "cpu", "x86_64", triton_version="3.8.0")


def device(name: str, features: frozenset[str] = frozenset(FEATURES), **changes: object) -> Capabilities:
    caps = replace(DEVICES[name], triton_version="3.8.0", tlx_provider=PROVIDER, tlx_features=features)
    return replace(caps, **changes)  # type: ignore[arg-type]


REASONS = {
    "cpu": (CPU, "for devices of nvidia only, and the vendor here is cpu"),
    "amd": (device("MI300X"), "for devices of nvidia only, and the vendor here is amd"),
    "old": (device("A100"), "for sm_90 and later only, and NVIDIA A100 is sm_80"),
    "interpreter": (
        device("H200", triton_interpret=True),
        "TLX does not run in Triton's interpreter (TRITON_INTERPRET=1)",
    ),
    "no provider": (
        device("H200", tlx_provider=None),
        "no provider of TLX is installed: pip install 'portable-tbe[tlx]' (triton-utlx, beside Triton), "
        "or fbtriton in Triton's place",
    ),
    "other triton": (
        device("H200", triton_version="3.6.0"),
        "triton-utlx 3.8.0.post16 needs Triton 3.8, and 3.6.0 is installed",
    ),
    "no fence": (
        device("B200", frozenset(FEATURES) - {GPU_FENCE}),
        "triton-utlx 3.8.0.post16 compiles no fence.acq_rel.gpu for sm_100 (gpu fence)",
    ),
}


@pytest.mark.parametrize("what", REASONS)
def test_a_machine_without_tlx_is_told_why_and_is_served_by_another(what: str) -> None:
    caps, reason = REASONS[what]
    assert backend.unavailable(caps) == reason
    plan = choose(PROBLEM, caps, registry.load_for(caps), Policy())
    assert plan.backend != "tlx" and f"passed over tlx: {reason}" in str(plan)


@pytest.mark.parametrize("what", REASONS)
def test_an_explicit_request_is_refused_with_the_reason(what: str) -> None:
    caps, reason = REASONS[what]
    with pytest.raises(BackendError) as caught:
        choose(PROBLEM, caps, registry.load_for(caps), ASKED)
    assert str(caught.value).startswith("TBE_BACKEND='tlx' cannot serve ") and str(caught.value).endswith(reason)


def test_a_module_on_the_cpu_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBE_BACKEND", "tlx")
    expected = r"TBE_BACKEND='tlx' cannot serve .*(for devices of nvidia only|INTERPRET=1)"
    with pytest.raises(BackendError, match=expected):
        tbe.TableBatchedEmbeddingBags([tbe.Table("a", 9, 4)], optimizer=tbe.SGD(), device="cpu")


@pytest.mark.parametrize("name", ["H200", "B200", "GB200", "RTX5090"])
def test_it_serves_on_request_only(name: str) -> None:
    caps = device(name)
    told = {r.backend: r.reasons for r in choose(PROBLEM, caps, registry.load_for(caps), Policy()).rejected}
    assert told["tlx"] == ("used on this device only when asked for",)
    assert choose(PROBLEM, caps, registry.load_for(caps), ASKED).backend == "tlx"


def noted(problem: Problem, caps: Capabilities) -> tuple[str, ...]:
    return choose(problem, caps, registry.load_for(caps), ASKED).notes


def test_a_plan_says_provider_features_and_what_is_missing() -> None:
    hopper = noted(PROBLEM, device("H200", HOPPER))
    assert f"TLX: {PROVIDER}" in hopper
    assert "launch control does not exist here; a static grid of 32 warps a processor" in hopper
    assert hopper[-1] == (
        "triton-utlx 3.8.0.post16 compiles no clusterlaunchcontrol.try_cancel and "
        "clusterlaunchcontrol.query_cancel.is_canceled for sm_90 (clc)"
    )
    blackwell = noted(LOOSE, device("B200"))
    assert "launch control from 4 stretches a processor" in blackwell
    assert "store-reduce of long runs from 64 programs" in blackwell
    assert not any("compiles no" in note for note in blackwell)
    without = noted(LOOSE, device("B200", frozenset(FEATURES) - {STORE_REDUCE}))
    assert without[-1] == f"{PROVIDER} compiles no cp.reduce.async.bulk.tensor for sm_100 (store reduce)"


def test_thresholds_come_from_the_user_s_file_then_from_the_portable_one(tmp_path: Path) -> None:
    caps = device("H200", HOPPER)
    portable = choose(PROBLEM, caps, registry.load_for(caps), Policy("triton")).config
    assert choose(PROBLEM, caps, registry.load_for(caps), ASKED).config == portable
    own = DeviceConfig(source="tuned by hand", persistent_warps=16, steal_stretches=0)
    write(tmp_path / "mine.json", "tlx", caps, own)
    caps = replace(caps, config_dir=str(tmp_path))
    found = choose(PROBLEM, caps, registry.load_for(caps), ASKED)
    assert found.config.persistent_warps == 16 and found.config.source.startswith("tuned by hand")
    assert any("a static grid of 16 warps" in note for note in found.notes)
    # It is for this backend alone.
    assert choose(PROBLEM, caps, registry.load_for(caps), Policy("triton")).config == portable


def test_what_a_search_may_try_follows_the_features() -> None:
    def fields(caps: Capabilities) -> set[str]:
        return {knob.field for knob in backend.search_space(caps)}

    assert "steal_stretches" in fields(device("B200")) and "persistent_warps" in fields(device("B200"))
    assert "steal_stretches" not in fields(device("H200", HOPPER))
