"""Device configurations as files: strict, the user's before the packaged ones, and told by plan and doctor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import python
from typer.testing import CliRunner

import tbe
from tbe import environment, policy, probe
from tbe.cli.main import app
from tbe_core import Capabilities, DeviceConfig, Layout, Spec
from tbe_core.device_files import DeviceFileError, files_in, find, read, write
from tbe_core.devices import DEVICES
from tbe_triton.configs import PACKAGED, config_for
from tbe_triton.targets import TARGETS

H200 = DEVICES["H200"]
DEVICE = {"vendor": "nvidia", "arch": "sm_90", "name": "NVIDIA H200"}
GOOD: dict[str, Any] = {
    "backend": "triton",
    "device": DEVICE,
    "source": "untuned, by hand",
    "config": {"stretch": 64, "forward_streams": True},
}


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    environment.config_dir.cache_clear()
    yield
    environment.config_dir.cache_clear()


def use(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Set the variable as if for a process that starts now."""
    monkeypatch.setenv("TBE_CONFIG_DIR", str(directory))
    environment.config_dir.cache_clear()


def put(folder: Path, name: str = "own.json", **changes: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps({**GOOD, **changes}))
    return path


# --- DeviceConfig and dictionaries --------------------------------------------------------------------------


def test_a_configuration_survives_its_dictionary() -> None:
    config = DeviceConfig(source="tuned on X", stretch=64, forward_streams=True, dense_rows=7)
    values = json.loads(json.dumps(config.to_dict()))
    assert set(values) == {f.name for f in fields(DeviceConfig)}
    assert DeviceConfig.from_dict(values) == config


def test_numbers_left_out_take_their_defaults() -> None:
    assert DeviceConfig.from_dict({"source": "x", "stretch": 32}) == DeviceConfig(source="x", stretch=32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strech": 64}, r"unknown key 'strech': expected some of .*stretch"),
        ({"source": ""}, r"missing key 'source'"),
        ({"source": 3}, r"source=3: expected text"),
        ({"stretch": "64"}, r"stretch='64': expected an integer"),
        ({"stretch": True}, r"stretch=True: expected an integer"),
        ({"stretch": 64.0}, r"stretch=64.0: expected an integer"),
        ({"forward_streams": 1}, r"forward_streams=1: expected true or false"),
        ({"dense_rows": -1}, r"dense_rows=-1: expected 0 or more"),
        ({"stretch": 48}, r"stretch=48: expected a power of two"),
        ({"unroll": 32}, r"unroll=32: expected a divisor"),
        ({"elements_per_lane": 0}, r"elements_per_lane=0: expected 1 or more"),
    ],
)
def test_what_is_wrong_with_a_dictionary_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeviceConfig.from_dict({"source": "x", **changes})


def test_a_dictionary_must_say_its_source() -> None:
    with pytest.raises(ValueError, match="missing key 'source'"):
        DeviceConfig.from_dict({"stretch": 64})


# --- files --------------------------------------------------------------------------------------------------


def test_a_good_file(tmp_path: Path) -> None:
    found = read(put(tmp_path))
    assert found.config == DeviceConfig(source="untuned, by hand", stretch=64, forward_streams=True)
    assert found.fits("triton", H200) and not found.fits("tlx", H200)
    assert not any(found.fits("triton", caps) for name, caps in DEVICES.items() if name != "H200")


BROKEN: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "Expecting property name"),
    "a list": ([], r"the file is \[\]: expected an object"),
    "no backend": ({k: GOOD[k] for k in ("device", "source", "config")}, "the file has no key 'backend'"),
    "no config": ({k: GOOD[k] for k in ("backend", "device", "source")}, "the file has no key 'config'"),
    "one more": ({**GOOD, "date": "today"}, "the file has an unknown key 'date'"),
    "device is text": ({**GOOD, "device": "H200"}, "key 'device' is 'H200': expected an object"),
    "device lacks": ({**GOOD, "device": {"vendor": "nvidia", "arch": "sm_90"}}, "'device' has no key 'name'"),
    "device has more": ({**GOOD, "device": {**DEVICE, "sms": 1}}, "key 'device' has an unknown key 'sms'"),
    "device number": ({**GOOD, "device": {**DEVICE, "arch": 90}}, r"key 'device.arch' is 90: expected a text"),
    "no text": ({**GOOD, "backend": ""}, "key 'backend' is '': expected a text"),
    "vague source": ({**GOOD, "source": "fast"}, "key 'source' is 'fast': expected 'tuned on"),
    "config is a list": ({**GOOD, "config": []}, r"key 'config' is \[\]: expected an object"),
    "source twice": ({**GOOD, "config": {"source": "tuned on X"}}, "'config' has an unknown key 'source'"),
    "unknown number": ({**GOOD, "config": {"strech": 1}}, "key 'config': unknown key 'strech'"),
    "wrong number": ({**GOOD, "config": {"stretch": 3}}, "key 'config': stretch=3: expected a power of two"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_its_key(name: str, tmp_path: Path) -> None:
    value, message = BROKEN[name]
    path = tmp_path / "own.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    caps = replace(H200, config_dir=str(tmp_path))
    with pytest.raises(DeviceFileError, match=f"^{path}: .*{message}"):
        config_for(caps)


def test_a_tuned_file_tells_what_it_leaves_to_the_defaults(tmp_path: Path) -> None:
    numbers = DeviceConfig().to_dict()
    del numbers["source"]
    whole = read(put(tmp_path, source="tuned on X", config=numbers)).config
    assert whole.source == "tuned on X"
    del numbers["stretch"], numbers["unroll"]
    part = read(put(tmp_path, source="tuned on X", config=numbers)).config
    assert part.source == "tuned on X; untuned defaults for stretch, unroll"


def test_the_directory_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(DeviceFileError, match=r"nosuch is not a directory: expected one of device files"):
        config_for(replace(H200, config_dir=str(tmp_path / "nosuch")))


def test_the_packaged_files_are_good_and_for_this_backend() -> None:
    files = files_in(PACKAGED)
    assert files and {f.backend for f in files} == {"triton"}
    known = (*DEVICES.values(), *TARGETS.values())
    assert all(any(f.fits("triton", caps) for caps in known) for f in files)


def test_what_is_written_is_read_back_for_that_device_only(tmp_path: Path) -> None:
    caps = replace(H200, name="NVIDIA [H200]* ?")
    config = DeviceConfig(source="tuned on X", stretch=32, forward_streams=True)
    path = tmp_path / "new.json"
    for written in (DeviceConfig(source="tuned on Y"), config):
        write(path, "triton", caps, written)
    found = read(path)
    assert found.config == config
    assert found.fits("triton", caps)
    for other in ("NVIDIA H", "NVIDIA [H200]xx ?", "NVIDIA [H200]* y"):
        assert not found.fits("triton", replace(caps, name=other))
    assert [p.name for p in tmp_path.iterdir()] == ["new.json"]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken.json").mkdir()
    with pytest.raises(OSError, match=r"taken\.json"):
        write(tmp_path / "taken.json", "triton", H200, DeviceConfig(source="tuned on X"))
    assert [p.name for p in tmp_path.iterdir()] == ["taken.json"]


# --- which file ---------------------------------------------------------------------------------------------


def folder(tmp_path: Path, name: str) -> Path:
    made = tmp_path / name
    made.mkdir()
    return made


def test_the_user_s_file_comes_first_then_the_packaged_one(tmp_path: Path) -> None:
    own, packaged = folder(tmp_path, "own"), folder(tmp_path, "packaged")
    mine = put(own, source="untuned, mine")
    put(packaged, "theirs.json", source="untuned, theirs")
    put(packaged, "b200.json", source="untuned, b200", device={**DEVICE, "arch": "sm_100", "name": "*B200"})

    def source(caps: Capabilities) -> str | None:
        found = find("triton", caps, packaged)
        return None if found is None else found.source

    asked = replace(H200, config_dir=str(own))
    assert source(asked) == f"untuned, mine (from {mine})"
    assert source(H200) == "untuned, theirs (theirs.json)"
    assert source(replace(DEVICES["B200"], config_dir=str(own))) == "untuned, b200 (b200.json)"
    assert source(replace(DEVICES["MI300X"], config_dir=str(own))) is None
    assert find("rocm", asked, packaged) is None


def test_no_file_means_untuned_defaults() -> None:
    assert config_for(DEVICES["MI300X"]) == DeviceConfig() and DeviceConfig().source.startswith("untuned")


def test_the_closest_file_is_taken_and_a_tie_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "a.json", source="untuned, all", device={"vendor": "*", "arch": "*", "name": "*"})
    put(tmp_path, "b.json", source="untuned, Hopper", device={**DEVICE, "name": "*"})
    put(tmp_path, "c.json", source="untuned, H200")
    found = find("triton", H200, tmp_path)
    other = find("triton", replace(H200, name="NVIDIA H100"), tmp_path)
    amd = find("triton", DEVICES["MI300X"], tmp_path)
    assert found is not None and other is not None and amd is not None
    sources = [config.source.split(" (")[0] for config in (found, other, amd)]
    assert sources == ["untuned, H200", "untuned, Hopper", "untuned, all"]
    second = folder(tmp_path, "tie")
    put(second, "a.json")
    put(second, "b.json")
    with pytest.raises(DeviceFileError, match=r"a\.json and .*b\.json both fit NVIDIA H200"):
        find("triton", H200, second)


# --- the environment, the plan and the doctor ---------------------------------------------------------------


def doctor(monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[str, dict[str, Any]]:
    versions = {"torch_version": "2.13.0", "triton_version": "3.8.0", "cccl_version": None}
    monkeypatch.setattr(probe, "software", lambda: versions)
    text, as_json = (CliRunner().invoke(app, ["doctor", *options, *more]) for more in ((), ("--json",)))
    assert text.exit_code == as_json.exit_code == 0, (text.output, as_json.output)
    return text.stdout, json.loads(as_json.stdout)


def test_doctor_shows_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def sources(name: str) -> set[str]:
        text, found = doctor(monkeypatch, "--as", name)
        (device,) = found["devices"]
        told = {p["config_source"] for p in device["plans"] if p["backend"] == "triton"}
        assert told and all(f"[{source}]" in text for source in told)
        return told

    assert sources("H200") == {config_for(H200).source} != {DeviceConfig().source}
    assert sources("B200") == {"untuned defaults"}
    path = put(tmp_path)
    use(monkeypatch, tmp_path)
    assert sources("H200") == {f"untuned, by hand (from {path})"}
    assert sources("B200") == {"untuned defaults"}
    assert f"TBE_CONFIG_DIR={tmp_path}" in doctor(monkeypatch, "--as", "H200")[0].splitlines()


def test_doctor_shows_a_broken_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = put(tmp_path, config={"strech": 1})
    use(monkeypatch, tmp_path)
    text, found = doctor(monkeypatch, "--as", "H200")
    assert f"{path}: key 'config': unknown key 'strech'" in text
    assert all(p["backend"] is None and p["config_source"] is None for p in found["devices"][0]["plans"])


def plan_of_a_call(backend: str) -> tbe.Plan:
    """The plan that a call on the CPU would run by; no kernel runs."""
    spec = Spec(Layout.make([tbe.Table("a", 9, 4)], None), tbe.SGD())
    asked = policy.request(backend)
    return policy.backend_for(spec, torch.device("cpu"), torch.int64, torch.int64, False, asked)[1]


def test_a_call_runs_by_the_user_s_file(tmp_path: Path) -> None:
    put(tmp_path, device={"vendor": "cpu", "arch": "*", "name": "*"})
    code = """
import torch, tbe
from tbe import policy
emb = tbe.TableBatchedEmbeddingBags([tbe.Table("a", 9, 4)], optimizer=tbe.SGD(), backend="triton", device="cpu")
emb(torch.tensor([1, 2]), torch.tensor([0, 1, 2])).sum().backward()
print({plan.config.stretch for backend, plan in policy._fast.values()}, emb.plan.config.source)
"""
    done = python(code, TRITON_INTERPRET="1", TBE_CONFIG_DIR=str(tmp_path))
    assert done.stdout == f"{{64}} untuned, by hand (from {tmp_path / 'own.json'})\n", done.stderr
    broken = python(code, TRITON_INTERPRET="1", TBE_CONFIG_DIR=str(tmp_path / "nosuch"))
    assert broken.returncode == 1
    assert broken.stderr.strip().endswith("nosuch is not a directory: expected one of device files")


def test_a_configuration_on_trial_ends_with_its_block() -> None:
    before, trial = plan_of_a_call("cpu"), DeviceConfig(source="trial", stretch=32)
    inner = replace(trial, stretch=64)
    with policy.override_config(trial):
        assert plan_of_a_call("cpu").config is trial
        with pytest.raises(KeyError), policy.override_config(inner):
            assert plan_of_a_call("cpu").config is inner
            raise KeyError
        assert plan_of_a_call("cpu").config is trial
    assert plan_of_a_call("cpu") == before
    assert not [key for key in policy._fast if trial in key or inner in key]
