"""TLX kernels compile for every target that TLX knows, with their instructions, and in the models' order.

For sm_90 and sm_100 all of them, for the other two those of one problem, since only their assembler differs.
``tbe compile --backend tlx`` compiles all for all.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from helpers import environment, python
from protocol_models import ARRIVE
from protocol_models_clc import LOOP

from tbe_tlx import cross_compiler, providers

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(
        providers.installed() is None, reason="neither triton-utlx nor fbtriton is installed here"
    ),
]

TARGETS = ("sm_90", "sm_100", "sm_103", "sm_120")
UPDATE, COMBINE = "tbe_update_tlx_kernel", "tbe_combine_tlx_kernel"
MOST_REGISTERS = 120
"""At one dim up to 256: what Triton 3.8 gives, to the next 8."""
WIDE = 512
"""From this dim on a row may spill a little where launch control or sums take registers of their own."""
MOST_SPILLS = 8
Row = dict[str, Any]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [
        *compiled("_tlx_kernel", *TARGETS[:2]),
        *compiled("_tlx_kernel[D=128 fp16->fp32 rowwise_adagrad ", *TARGETS[2:]),
    ]


def compiled(matching: str, *targets: str) -> list[Row]:
    command = [sys.executable, "-m", "tbe.cli.main", "compile", "--json", "--backend", "tlx"]
    command += ["--targets", ",".join(targets), "--kernels", matching]
    always = environment(TRITON_ALWAYS_COMPILE="1")
    done = subprocess.run(command, env=always, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr
    assert "is not registered" not in done.stdout + done.stderr, "an operation was dropped"
    found: list[Row] = json.loads(done.stdout)
    return found


def of(rows: list[Row], kernel: str, *words: str) -> list[Row]:
    found = [r for r in rows if r["kernel"].startswith(f"{kernel}[") and all(w in r["kernel"] for w in words)]
    assert found, f"no row of {kernel} has {words}"
    return found


def test_the_targets_are_those_of_the_backend() -> None:
    assert cross_compiler.targets() == TARGETS


@pytest.mark.timeout(1800)
def test_every_kernel_is_there_for_every_target(rows: list[Row]) -> None:
    for target in TARGETS:
        here = [r for r in rows if r["target"] == target]
        assert of(here, UPDATE, " fused") and of(here, UPDATE, " split") and of(here, COMBINE)
        assert {r["backend"] for r in here} == {"tlx"}


@pytest.mark.timeout(1800)
def test_the_fused_tier_has_a_gpu_fence_on_both_sides_of_each_counter(rows: list[Row]) -> None:
    for row in rows:
        used = row["instructions"]
        fused = row["kernel"].startswith(UPDATE) and " fused" in row["kernel"]
        assert used["gpu_fence"] == (2 * used["atomic_acq_rel"] if fused else 0), row
        assert bool(used["atomic_acq_rel"]) == fused, row


@pytest.mark.timeout(1800)
def test_launch_control_is_where_blackwell_has_much_to_do(rows: list[Row]) -> None:
    for row in rows:
        stolen = row["instructions"]["launch_control"]
        assert stolen == ("WORK=stolen" in row["kernel"]), row
    for target in TARGETS:
        split = [r for r in of(rows, UPDATE, " split") if r["target"] == target]
        assert any(r["instructions"]["launch_control"] for r in split) == (target != "sm_90"), target
        assert any(not r["instructions"]["launch_control"] for r in split), target


@pytest.mark.timeout(1800)
def test_only_what_need_not_repeat_is_added_up_in_memory(rows: list[Row]) -> None:
    for row in rows:
        used = row["instructions"]
        reduces = row["kernel"].startswith(UPDATE) and "non-deterministic" in row["kernel"]
        assert bool(used["store_reduce"]) == reduces, row
        assert used["atomic_float"] == used["atomic_cas"] == 0, row


@pytest.mark.timeout(1800)
def test_registers_and_spills(rows: list[Row]) -> None:
    for row in rows:
        dims = [int(d) for d in row["kernel"].partition("[D=")[2].partition(" ")[0].split(",")]
        assert row["spills"] <= (MOST_SPILLS if max(dims) >= WIDE else 0), row
        if max(dims) <= 256:
            assert row["registers"] <= MOST_REGISTERS, row


# --- the order of instructions is that of the models ----------------------------------------------------------

PTX = """
import sys
from tbe_tlx import cross_compiler, facts
from tbe_triton.crosscompile import _named, activate
from tbe_triton.targets import capabilities
caps = facts(capabilities({target!r}))
activate(caps)
for name, launch in _named(cross_compiler.launches(caps)):
    if name == {kernel!r}:
        compiled = launch.kernel.warmup(
            *launch.arguments, grid=(1,), num_warps=launch.num_warps, **launch.constants
        )
        sys.stdout.write(compiled.asm["ptx"])
        break
"""

EVENTS = {
    "store": r"\bst\.(?:\w+\.)*global",
    "load": r"\bld\.(?:\w+\.)*global",
    "fence": r"\bfence\.acq_rel\.gpu\b",
    "barrier": r"\bbar\.sync\b|\bbarrier\.sync\b",
    "count": r"\batom\.(?:\w+\.)*acq_rel\b",
    "expect": r"\bmbarrier\.arrive\.expect_tx\b",
    "try_cancel": r"\bclusterlaunchcontrol\.try_cancel\b",
    "wait": r"\bmbarrier\.try_wait\b",
    "response": r"\bld\.shared\.(?:v2\.b64|b128)\b",
    "found": r"\bquery_cancel\.is_canceled\b",
    "place": r"\bquery_cancel\.get_first_ctaid\b",
}


def events(target: str, kernel: str, *kinds: str) -> list[str]:
    """The kinds of instructions in the order of the code, each run of equal ones once."""
    done = python(PTX.format(target=target, kernel=kernel))
    assert ".entry" in done.stdout, done.stderr or f"no launch is named {kernel}"
    found: list[str] = []
    for line in done.stdout.splitlines():
        code = line.partition("//")[0]
        for kind in kinds:
            if re.search(EVENTS[kind], code) and found[-1:] != [kind]:
                found.append(kind)
    return found


AS_EVENT = {
    "store_partial": "store",
    "gpu_fence": "fence",
    "barrier": "barrier",
    "count": "count",
    "acquire": "fence",
    "sum_and_step": "load",
}


@pytest.mark.parametrize(("target", "dim"), [("sm_90", 128), ("sm_100", 128), ("sm_90", 1024)])
def test_arrival_has_the_model_s_order(target: str, dim: int) -> None:
    kernel = f"{UPDATE}[D={dim} fp16->fp32 rowwise_adagrad fused]"
    found = events(target, kernel, "store", "load", "fence", "barrier", "count")
    expected = [AS_EVENT[step] for step in ARRIVE]
    counted = [i for i, kind in enumerate(found) if kind == "count"]
    assert len(counted) == 2, "one for the run that came in, one for the run that goes on"
    at = expected.index("count")
    for i in counted:
        # The partial's store lies before the search for the run's length, whose loads stand between.
        assert found[i - 2 : i - at + len(expected)] == expected[at - 2 :], found[i - 6 : i + 6]
        assert "store" in found[: i - 2]


def test_launch_control_has_the_model_s_order() -> None:
    kernel = f"{UPDATE}[D=128 fp16->fp32 rowwise_adagrad split WORK=stolen]"
    kinds = ("barrier", "expect", "try_cancel", "wait", "response", "found", "place")
    found = events("sm_100", kernel, *kinds)
    asks = found.index("try_cancel")
    assert found[asks - 3 : asks + 1] == ["barrier", "expect", "barrier", "try_cancel"]
    ends = [kind for kind in found[asks + 1 :] if kind != "barrier"]
    assert ends == ["wait", "response", "found", "place"]
    assert [step for step in LOOP if step in ("sync", "expect", "try_cancel", "wait", "load")] == [
        "sync", "expect", "sync", "try_cancel", "wait", "load",
    ]  # fmt: skip
