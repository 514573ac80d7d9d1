"""``tbe doctor``: devices, every backend with its reason, and plans, here and for a device that is not here."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tbe
from tbe import environment, probe, registry
from tbe.cli.main import app
from tbe_core.devices import DEVICES


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def doctor(*options: str) -> str:
    result = CliRunner().invoke(app, ["doctor", *options])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def report(*options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(doctor(*options, "--json"))
    return found


def test_it_tells_this_machine() -> None:
    found = report()
    assert found["software"]["torch"] == torch.__version__ and found["software"]["tbe"] == tbe.__version__
    assert found["environment"] == {}
    assert [d["device"] for d in found["devices"]] == [str(d) for d in probe.devices()]
    cpu = found["devices"][0]
    assert not cpu["pretended"] and cpu["description"] == str(probe.capabilities("cpu"))
    backends = {b["name"]: b["unavailable"] for b in cpu["backends"]}
    assert list(backends) == registry.names() and {"cpu", "triton", "tlx", "rocm"} <= set(backends)
    assert backends.pop("cpu") is None
    assert all(backends.values()), "a backend that cannot run says why"
    assert "TRITON_INTERPRET=1" in backends["triton"] or "not installed" in backends["triton"]
    assert {plan["backend"] for plan in cpu["plans"]} == {"cpu"}


def test_text_and_json_tell_the_same() -> None:
    text, found = doctor(), report()
    for device in found["devices"]:
        assert f"{device['device']}: {device['description']}" in text
        for backend in device["backends"]:
            line = next(line for line in text.splitlines() if line.startswith(f"  {backend['name']:8}"))
            assert line.endswith(backend["unavailable"] or "usable")
        for plan in device["plans"]:
            assert f"  {plan['problem']}:\n    {plan['plan'].splitlines()[0]}" in text
    assert f"torch {torch.__version__}" in text and "cuda-cccl" in text


def test_it_obeys_and_shows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBE_DISABLE", "cpu")
    assert "TBE_DISABLE=cpu" in doctor().splitlines()
    found = report()
    assert found["environment"] == {"TBE_DISABLE": "cpu"}
    cpu = found["devices"][0]
    assert {b["name"]: b["unavailable"] for b in cpu["backends"]}["cpu"] == "disabled by TBE_DISABLE"
    # Nothing serves: that is an answer, with every reason, and no crash.
    assert {plan["backend"] for plan in cpu["plans"]} == {None}
    assert all("cpu: disabled by TBE_DISABLE" in plan["plan"] for plan in cpu["plans"])
    monkeypatch.setenv("TBE_BACKEND", "nosuch")
    assert "TBE_BACKEND='nosuch': no such backend, expected one of tlx, rocm, triton, cpu" in doctor()


@pytest.mark.parametrize("name", DEVICES)
def test_it_plans_for_a_device_that_is_not_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch_version": "2.13.0", "triton_version": "3.8.0", "cccl_version": None}
    monkeypatch.setattr(probe, "software", lambda: versions)
    found = report("--as", name)
    (device,) = found["devices"]
    caps = DEVICES[name]
    assert device["device"] == name and device["pretended"]
    assert device["description"] == f"{caps.name} ({caps.vendor} {caps.arch}, {caps.processors} processors)"
    assert [b["name"] for b in device["backends"]] == registry.names()
    other = {"nvidia": "rocm", "amd": "tlx"}[caps.vendor]
    *served, wide = device["plans"]
    assert all(plan["backend"] in {"triton", "tlx", "rocm"} - {other} for plan in served)
    assert all(f"on {device['description']}" in plan["plan"] for plan in served)
    # Wider than any kernel's row and no CPU to fall back to: a refusal with the reason, for every backend.
    assert wide["backend"] is None and "dim 16384 exceeds" in wide["plan"]
    text = doctor("--as", name)
    assert "facts from its specification, software from here" in text and "cpu: x86" not in text


def test_a_pretended_machine_has_this_installation_s_software(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch_version": "2.13.0", "triton_version": None, "cccl_version": None}
    monkeypatch.setattr(probe, "software", lambda: versions)
    (device,) = report("--as", "H200")["devices"]
    assert {plan["backend"] for plan in device["plans"]} == {None}
    assert "Triton is not installed: pip install" in doctor("--as", "H200")


def test_an_unknown_device_lists_the_known_ones() -> None:
    result = CliRunner().invoke(app, ["doctor", "--as", "H900"])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr == f"tbe doctor: --as H900: expected one of {', '.join(DEVICES)}\n"
