"""Providers of TLX and their features: proven by instructions, in children that may die, kept on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, python

from tbe import probe
from tbe_core import Capabilities
from tbe_core.assist import ASYNC_LOAD, CLC, FEATURES, GPU_FENCE, MBARRIER, STORE_REDUCE
from tbe_core.devices import DEVICES
from tbe_tlx import features, providers
from tbe_tlx.feature_child import SIGNATURES
from tbe_tlx.providers import Provider

UTLX = Provider("triton-utlx", "3.8.0.post16", "utlx_plugin")
FORK = Provider("fbtriton", "3.7.4", "triton.language.extra.tlx")
H200 = replace(DEVICES["H200"], triton_version="3.8.0")
ARCHS = (90, 100, 103, 120)
CHILD = """
import json, os, signal, sys
provider, arch, names, path = json.loads(sys.argv[1])
sys.path[:] = path
from tbe_tlx.features import announce
for name in names:
    announce(name)
    {body}
    announce(name, "")
"""


def planted(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setattr(features, "_CHILD", CHILD.format(body=body))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from triton import knobs

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> tuple[str, int]:
        raise AssertionError("a child was started")

    monkeypatch.setattr(features, "_run_child", refuse)


# --- what counts as present ---------------------------------------------------------------------------------


def test_every_feature_has_an_instruction_and_a_kernel() -> None:
    assert set(FEATURES) == set(features.INSTRUCTIONS) == set(SIGNATURES)


def test_a_feature_is_its_instruction_and_not_a_comment() -> None:
    assert features.verdict(GPU_FENCE, "  fence.acq_rel.gpu;") == ""
    assert features.verdict(GPU_FENCE, "@%p1 fence.acq_rel.gpu;") == ""
    missing = "fence.acq_rel.gpu is not in the compiled code"
    for code in (
        "",
        "// fence.acq_rel.gpu;",
        "fence.acq_rel.cta;",
        "my_fence.acq_rel.gpu",
        "a.fence.acq_rel.gpu",
    ):
        assert features.verdict(GPU_FENCE, code) == missing, code


def test_every_instruction_of_a_feature_is_needed() -> None:
    cancel, query = features.INSTRUCTIONS[CLC]
    assert features.verdict(CLC, f"{cancel}.async; {query}.pred;") == ""
    assert features.verdict(CLC, f"{cancel}.async;") == f"{query} is not in the compiled code"
    assert features.verdict(CLC, "ret;") == f"{cancel}, {query} is not in the compiled code"


def test_a_child_s_words() -> None:
    mark = features._MARK
    output = (
        f'\n{mark}{GPU_FENCE}\n\n{mark}{GPU_FENCE} ""\n'
        f"\n{mark}{CLC}\nnoise\nuTLX: 'x' is not registered in this Triton build\n\n{mark}{CLC} \"\"\n"
        f'\n{mark}{MBARRIER}\n\n{mark}{MBARRIER} "no such thing"\n'
        f"\n{mark}{ASYNC_LOAD}\nhalf a line"
    )
    assert features.parse(output) == {
        GPU_FENCE: "",
        CLC: "uTLX: 'x' is not registered in this Triton build",
        MBARRIER: "no such thing",
        ASYNC_LOAD: None,
    }
    assert features.parse("ImportError: no") == {}


# --- children that die --------------------------------------------------------------------------------------


def test_a_crash_costs_its_own_feature_only(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, f"name == {CLC!r} and os.kill(os.getpid(), signal.SIGSEGV)")
    found = features.compile_features(UTLX, 100)
    assert found == {name: "the compiler died of signal 11" if name == CLC else "" for name in FEATURES}


def test_a_dropped_operation_is_missing_whatever_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "uTLX: 'ttng.fence' is not registered in this Triton build"
    planted(monkeypatch, f"name == {GPU_FENCE!r} and print({said!r}, file=sys.stderr, flush=True)")
    assert features.compile_features(UTLX, 90)[GPU_FENCE] == said


def test_a_child_that_cannot_start_is_told_for_every_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_CHILD", "import sys; sys.exit('ImportError: libutlx.so is gone')")
    found = features.compile_features(UTLX, 90)
    assert found == dict.fromkeys(FEATURES, "ImportError: libutlx.so is gone")


# --- on disk ------------------------------------------------------------------------------------------------


def told(why: str) -> tuple[str, int]:
    lines = [f"\n{features._MARK}{n}\n\n{features._MARK}{n} {json.dumps(why)}" for n in FEATURES]
    return "".join(lines), 0


def test_a_result_is_kept_by_version_and_architecture(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def run(provider: Provider, arch: int, names: list[str]) -> tuple[str, int]:
        asked.append((str(provider), arch))
        return told("no")

    monkeypatch.setattr(features, "_run_child", run)
    newer = replace(UTLX, version="3.8.1")
    for _ in range(2):
        for provider, triton, arch in ((UTLX, "3.8.0", 90), (UTLX, "3.8.0", 100), (newer, "3.8.0", 90)):
            assert features.missing(provider, triton, arch) == dict.fromkeys(FEATURES, "no")
    assert asked == [(str(UTLX), 90), (str(UTLX), 100), (str(newer), 90)]
    features.missing(UTLX, "3.8.1", 90)
    assert len(asked) == 4
    assert len(list(cache.glob("*.json"))) == 4 and not list(cache.glob("*.part"))


def test_a_result_of_other_sources_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_run_child", lambda *_: told(""))
    features.missing(UTLX, "3.8.0", 90)
    monkeypatch.setattr(features, "_run_child", lambda *_: told("changed"))
    assert features.missing(UTLX, "3.8.0", 90)[CLC] == ""
    monkeypatch.setattr(features, "_fingerprint", lambda: "other")
    assert features.missing(UTLX, "3.8.0", 90)[CLC] == "changed"


@pytest.mark.parametrize("text", ["{", "[]", '{"clc": ""}', '{"gpu_fence": 1}'])
def test_a_broken_file_is_replaced(cache: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_run_child", lambda *_: told("no"))
    features.missing(UTLX, "3.8.0", 90)
    (path,) = cache.glob("*.json")
    path.write_text(text)
    assert features.missing(UTLX, "3.8.0", 90) == dict.fromkeys(FEATURES, "no")
    assert json.loads(path.read_text()) == dict.fromkeys(FEATURES, "no")


def test_a_compiler_that_hangs_is_not_remembered(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "TIMEOUT_SECONDS", 1)
    monkeypatch.setattr(features, "_CHILD", "import time; time.sleep(60)")
    assert features.missing(UTLX, "3.8.0", 90) == dict.fromkeys(FEATURES, "the compiler did not end in 1 seconds")
    assert not list(cache.glob("*.json"))


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from triton import knobs

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(features, "_run_child", lambda *_: told(""))
    assert features.missing(UTLX, "3.8.0", 90) == dict.fromkeys(FEATURES, "")
    assert "cannot be" in caplog.text


# --- who is asked, and when ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "caps",
    [
        Capabilities("cpu", "cpu", "x86_64", triton_version="3.8.0"),
        replace(DEVICES["MI300X"], triton_version="3.8.0"),
        replace(DEVICES["A100"], triton_version="3.8.0"),
        replace(H200, triton_interpret=True),
        replace(H200, tlx_provider="by hand 1.0"),
    ],
    ids=["cpu", "amd", "sm_80", "interpreter", "by hand"],
)
def test_nothing_is_looked_at_where_tlx_is_out_of_the_question(
    caps: Capabilities, no_child: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "installed", lambda: pytest.fail("the installation was looked at"))
    assert providers.facts(caps) is caps


def test_without_a_provider_nothing_changes(no_child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "installed", lambda: None)
    assert providers.facts(H200) == H200


@pytest.mark.parametrize("triton", ["3.6.0", "3.7.1", "3.9.0", None])
def test_a_provider_that_does_not_fit_triton_is_not_asked(
    triton: str | None, no_child: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "installed", lambda: UTLX)
    caps = providers.facts(replace(H200, triton_version=triton))
    assert caps.tlx_provider == str(UTLX) and caps.tlx_features == frozenset()
    assert providers.misfit(str(UTLX), triton) == f"{UTLX} needs Triton 3.8, and {triton} is installed"


def test_the_fork_fits_the_triton_that_it_is() -> None:
    assert providers.misfit(str(FORK), "3.7.4") is None and providers.misfit(str(UTLX), "3.8.1") is None


def test_features_are_those_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "installed", lambda: UTLX)
    monkeypatch.setattr(features, "missing", lambda p, t, a: dict.fromkeys(FEATURES, "") | {CLC: f"{p} {t} {a}"})
    caps = providers.facts(H200)
    assert caps == replace(H200, tlx_provider=str(UTLX), tlx_features=frozenset(FEATURES) - {CLC})


def test_the_fork_comes_before_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    here = {"fbtriton": "3.7.4", "triton-utlx": "3.8.0"}

    def version(name: str) -> str:
        if name not in here:
            raise importlib.metadata.PackageNotFoundError(name)
        return here[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert providers.installed() == FORK
    del here["fbtriton"]
    assert providers.installed() == replace(UTLX, version="3.8.0")
    here.clear()
    assert providers.installed() is None


def test_disabled_backends_find_nothing_out(no_child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "installed", lambda: UTLX)
    monkeypatch.setenv("TBE_DISABLE", "tlx")
    assert probe.as_if("H200").tlx_provider is None


# --- real compilers -----------------------------------------------------------------------------------------

needs_provider = pytest.mark.skipif(
    providers.installed() is None, reason="neither triton-utlx nor fbtriton is installed here"
)


@pytest.mark.compile
@needs_provider
@pytest.mark.parametrize("arch", ARCHS)
def test_every_builtin_compiles_to_its_instruction(arch: int) -> None:
    provider = providers.installed()
    assert provider is not None
    found = features.compile_features(provider, arch)
    launch_control = found.pop(CLC)
    assert found == dict.fromkeys((GPU_FENCE, STORE_REDUCE, MBARRIER, ASYNC_LOAD), "")
    # Only Blackwell has launch control: there it must compile, before it must be refused with a cause.
    assert (launch_control == "") == (arch >= 100), launch_control


PLANTED = """
import json, sys
provider, arch, names, path = json.loads(sys.argv[1])
sys.path[:] = [{tests!r}, *path]
import importlib
importlib.import_module(provider)
import tlx_kernels
import tbe_tlx.kernels
from tbe_tlx import feature_child
feature_child.SIGNATURES["gpu_fence"] = ({kernel!r}, feature_child.POINTER)
sys.modules["tbe_tlx.kernels.feature_probes"] = tbe_tlx.kernels.feature_probes = tlx_kernels
feature_child.main(provider, arch, ["gpu_fence"])
"""


@pytest.mark.compile
@needs_provider
def test_the_probe_fails_on_an_operation_that_compiles_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = providers.installed()
    assert provider is not None
    child = PLANTED.format(tests=str(ROOT / "tests"), kernel="tbe_test_no_fence_kernel")
    monkeypatch.setattr(features, "_CHILD", child)
    found = features.compile_features(provider, 90, [GPU_FENCE])
    assert found == {GPU_FENCE: "fence.acq_rel.gpu is not in the compiled code"}


@pytest.mark.compile
@pytest.mark.skipif(
    providers.installed() != UTLX,
    reason=f"for {UTLX}, which drops its own fence; here is {providers.installed()}",
)
def test_the_probe_fails_on_an_operation_that_the_provider_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    child = PLANTED.format(tests=str(ROOT / "tests"), kernel="tbe_test_own_fence_kernel")
    monkeypatch.setattr(features, "_CHILD", child)
    found = features.compile_features(UTLX, 90, [GPU_FENCE])
    assert "is not registered in this Triton build" in found[GPU_FENCE]


LOAD = """
import sys
from tbe_triton.crosscompile import activate
from tbe_triton.targets import capabilities
activate(capabilities("gfx942"))
from tbe_tlx import providers
providers.facts(capabilities("gfx942"))
try:
    providers.load()
except RuntimeError as error:
    print(error)
print(sorted({"utlx_plugin", "triton.language.extra.tlx"} & set(sys.modules)))
"""


@pytest.mark.compile
@needs_provider
def test_a_process_that_compiles_for_amd_never_imports_a_provider() -> None:
    done = python(LOAD)
    expected = f"{providers.installed()} must not be imported in a process that compiles for AMD\n[]"
    assert done.stdout.strip() == expected, done.stderr


def test_asking_about_amd_or_the_cpu_imports_no_provider() -> None:
    code = """
import sys, tbe
from tbe import probe
tbe.backends("cpu"); probe.as_if("MI300X"); probe.as_if("A100")
print(sorted({"utlx_plugin", "triton", "triton.language.extra.tlx"} & set(sys.modules)))
"""
    done = python(code)
    assert done.stdout.strip() == "[]", done.stderr
