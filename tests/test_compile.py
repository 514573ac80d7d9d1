"""``tbe compile``: every kernel for six targets, without a GPU: registers, spills, vector loads, atomics, errors.

The kernels are compiled once a session, by the command itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, environment, python

from tbe import registry
from tbe.cli.compile import TARGETS as DEFAULT_TARGETS
from tbe_core.compiled import CompiledKernel, CrossCompiler
from tbe_core.optimizers import REGISTRY
from tbe_triton import cross_compiler
from tbe_triton.targets import TARGETS, capabilities

pytestmark = pytest.mark.compile

NVIDIA, AMD = ("sm_80", "sm_90", "sm_100"), ("gfx90a", "gfx942", "gfx950")
KNOWN = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
Row = dict[str, Any]

REGISTERS = {
    "tbe_check_kernel": (32, 24),
    "tbe_combine_kernel": (80, 48),
    "tbe_dense_step_kernel": (40, 40),
    "tbe_dense_sums_kernel": (255, 176),
    "tbe_forward_pool_kernel": (72, 64),
    "tbe_forward_rows_kernel": (32, 16),
    "tbe_linearise_kernel": (48, 32),
    "tbe_quantized_pool_kernel": (120, 96),
    "tbe_quantized_rows_kernel": (40, 24),
    "tbe_rank_sort_kernel": (152, 56),
    "tbe_update_kernel": (112, 64),
    "tbe_weight_grad_kernel": (56, 40),
}
"""Kernel to the most registers at one dim <= 256, on NVIDIA and on AMD: what Triton 3.8 gives, to the next 8."""
WITH_TWO_STATES = {"tbe_combine_kernel": (80, 56), "tbe_update_kernel": (112, 72)}
"""The same where the row's step is Adam's or LAMB's, of either kind."""
MOST_REGISTERS = (128, 64)
"""Of a kernel that is not listed."""

SLOW_PATH_BYTES = 8
"""Of stack without a spill, at most: ptxas saves two registers around the slow path of a square root."""

ROW_LOADS = {
    "tbe_forward_pool_kernel[D=128 fp16->fp32 sum short bags]": (16, 16),
    "tbe_forward_pool_kernel[D=128 fp16->fp32 sum long bags]": (16, 16),
    "tbe_forward_pool_kernel[D=128 fp16->fp32 sum weighted short bags]": (16, 16),
    "tbe_forward_rows_kernel[D=128 fp16->fp32 none]": (16, 16),
    "tbe_update_kernel[D=128 fp16->fp32 rowwise_adagrad fused]": (16, None),
    "tbe_update_kernel[D=128 fp16->fp32 rowwise_adagrad split]": (16, 8),
    "tbe_weight_grad_kernel[D=128 fp16->fp32 sum weighted]": (16, 16),
    "tbe_quantized_pool_kernel[D=128 int8->fp32 sum short bags]": (16, 16),
    "tbe_quantized_pool_kernel[D=128 int4->fp32 sum short bags]": (16, 16),
    "tbe_quantized_pool_kernel[D=128 fp8->fp32 sum short bags]": (16, 16),
    "tbe_quantized_pool_kernel[D=256 int8->fp32 sum short bags]": (16, 16),
    "tbe_quantized_pool_kernel[D=256 int4->fp32 sum short bags]": (16, 16),
    "tbe_quantized_pool_kernel[D=256 fp8->fp32 sum short bags]": (16, 16),
}
"""Kernel to the widest global load in bytes, on NVIDIA and on AMD. Where one row is walked at a time, 64 lanes
take 4 bytes each of its fp16 and 8 of an fp32 gradient's; of four fp16 rows side by side 16. None: no such
kernel, since AMD never fuses."""


def tbe_compile(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tbe.cli.main", "compile", *options]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=880)


@pytest.fixture(scope="session")
def rows() -> list[Row]:
    """All kernels of the backend for the six targets. A caller that interprets kernels compiles all the same."""
    done = tbe_compile("--json", "--targets", ",".join(NVIDIA + AMD), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    found: list[Row] = json.loads(done.stdout)
    return found


def dims_of(row: Row) -> list[int]:
    return [int(d) for d in row["kernel"].partition("[D=")[2].partition(" ")[0].split(",")]


def name_of(row: Row) -> str:
    return str(row["kernel"].partition("[")[0])


def narrow(rows: list[Row]) -> Iterator[Row]:
    """Those of one dim, at most 256."""
    found = [row for row in rows if len(dims_of(row)) == 1 and dims_of(row)[0] <= 256]
    assert len(found) > 300, "the filter is broken"
    return iter(found)


def column(row: Row) -> int:
    """Of the tables above."""
    return 0 if row["target"] in NVIDIA else 1


def test_rows_have_the_documented_keys(rows: list[Row]) -> None:
    keys = ["kernel", "backend", "target", "registers", "spills", "shared", "instructions"]
    keys += ["warps", "resident", "most"]
    assert list(CompiledKernel.__dataclass_fields__) == keys
    for row in rows:
        assert list(row) == keys and row["backend"] == "triton"
        assert all(isinstance(row[key], int) and row[key] >= 0 for key in ("registers", "spills", "shared"))
        assert row["registers"] > 0 and 0 < row["warps"] <= row["resident"] <= row["most"]
        assert all(isinstance(n, int) and n >= 0 for n in row["instructions"].values())
    assert len({tuple(row["instructions"]) for row in rows}) == 1, "every row has every kind"
    assert len({(row["kernel"], row["target"]) for row in rows}) == len(rows), "names are distinct"


def test_every_target_has_every_kernel(rows: list[Row]) -> None:
    """What is launched is what is compiled: each jitted kernel of the package, on each target."""
    source = "".join(p.read_text() for p in sorted((ROOT / "backends/tbe_triton/kernels").glob("*.py")))
    written = {f"tbe_{text.partition('(')[0]}" for text in source.split("\ndef tbe_")[1:]}
    assert len(written) > 5 and set(REGISTERS) <= written
    for target in NVIDIA + AMD:
        assert {name_of(row) for row in rows if row["target"] == target} == written


@pytest.mark.parametrize(
    "words",
    [f"[D={dim} fp16->fp32 rowwise_adagrad fused" for dim in (4, 64, 128, 256, 512, 1024, 2048, 4096)]
    + [
        f"[D=128 {dtype}->fp32 rowwise_adagrad {tier}"
        for dtype in ("fp32", "bf16")
        for tier in ("fused", "split")
    ]
    + [f"[D=128 fp16->fp32 rowwise_adagrad {mode} limits_norm split" for mode in ("l2", "decoupled")]
    + ["[D=3,16,128,512 fp16->fp32", "sgd fused", "mean split", " none]", " weighted", " dense]", " ids i64 "]
    + [f"[D={dim} {name}->fp32 sum" for dim in (16, 128, 256) for name in ("int8", "int4", "fp8")],
)
def test_the_variants_are_there(rows: list[Row], words: str) -> None:
    fused = words.endswith("fused")
    assert {row["target"] for row in rows if words in row["kernel"]} == set(NVIDIA if fused else NVIDIA + AMD)


@pytest.mark.parametrize("dim", (4, 64, 128, 256, 512, 1024, 2048, 4096))
def test_amd_splits_few_lookups_as_well_as_many(rows: list[Row], dim: int) -> None:
    """No launch there is fused, so none is compiled: two stretches of the split tier stand in its place."""
    start = f"tbe_update_kernel[D={dim} fp16->fp32 rowwise_adagrad split "
    for target in AMD:
        here = [row["kernel"] for row in rows if row["target"] == target]
        assert not [kernel for kernel in here if "fused" in kernel]
        assert len([kernel for kernel in here if kernel.startswith(start)]) == 2, target


def test_narrow_rows_spill_nothing(rows: list[Row]) -> None:
    spilling = {(name_of(row), row["target"], row["kernel"]): row["spills"] for row in narrow(rows)}
    assert not {key: spills for key, spills in spilling.items() if spills}


def test_narrow_rows_touch_no_local_memory(rows: list[Row]) -> None:
    """On AMD none at all."""
    for row in narrow(rows):
        used, allowed = row["instructions"], SLOW_PATH_BYTES if row["target"] in NVIDIA else 0
        assert used["local_bytes"] <= allowed, row
        assert used["local_bytes"] or not used["local_access"], row


def test_registers_stay_in_bounds(rows: list[Row]) -> None:
    names = [name for name, made in REGISTRY.items() if len(made.STATE) == 2]
    assert len(names) == 4

    def bound(row: Row) -> int:
        two = any(f" {name} " in row["kernel"] for name in names)
        bounds = WITH_TWO_STATES if two else REGISTERS
        return bounds.get(name_of(row), MOST_REGISTERS)[column(row)]

    assert not [row for row in narrow(rows) if row["registers"] > bound(row)]


def widest_load(row: Row) -> int:
    loads = {int(k.rpartition("_")[2]): n for k, n in row["instructions"].items() if "global_load" in k}
    return max(size for size, count in loads.items() if count)


@pytest.mark.parametrize("kernel", ROW_LOADS)
def test_rows_are_loaded_in_wide_pieces(rows: list[Row], kernel: str) -> None:
    found = [row for row in rows if row["kernel"].startswith(kernel.rstrip("]"))]
    assert {row["target"] for row in found} == set(NVIDIA + AMD if ROW_LOADS[kernel][1] else NVIDIA)
    assert not [row for row in found if widest_load(row) < (ROW_LOADS[kernel][column(row)] or 0)]


def test_the_fused_update_counts_arrivals_with_acquire_and_release(rows: list[Row]) -> None:
    fused = [row for row in rows if name_of(row) == "tbe_update_kernel" and " fused" in row["kernel"]]
    assert len(fused) > 40 and {row["target"] for row in fused} == set(NVIDIA)
    assert not [row for row in fused if not row["instructions"]["atomic_acq_rel"]]


def test_nothing_adds_floats_atomically(rows: list[Row]) -> None:
    """Nor swaps, by which an atomic addition of floats is emulated."""
    kinds = ("atomic_float", "atomic_cas")
    assert not [row for row in rows if any(row["instructions"][kind] for kind in kinds)]


FLOAT_ATOMIC = """
import torch, triton, triton.language as tl
from tbe_triton.crosscompile import Launch, TritonCrossCompiler
from tbe_triton import backend
from planted import add

class Planted(TritonCrossCompiler):
    def launches(self, caps):
        x = torch.zeros(64, dtype=DTYPE)
        return [Launch(add, (x,), 1, {"BLOCK": BLOCK}, "planted")]

for target in ("sm_90", "gfx942"):
    for row in Planted(backend).compile_kernels(target):
        print(getattr(row, "error", None) or row.instructions["ATOMIC"])
"""
PLANTED = """
import triton, triton.language as tl

@triton.jit
def add(x_ptr, BLOCK: tl.constexpr):
    at = x_ptr + tl.arange(0, BLOCK)
    tl.atomic_add(at, tl.load(at), sem="acq_rel")
"""


def planted(tmp_path: Path, dtype: str, block: int, atomic: str) -> list[str]:
    (tmp_path / "planted.py").write_text(PLANTED)
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + FLOAT_ATOMIC
    code = code.replace("DTYPE", f"torch.{dtype}").replace("BLOCK}", f"{block}}}").replace("ATOMIC", atomic)
    done = python(code)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("dtype", "atomic"), [("float32", "atomic_float"), ("float16", "atomic_float"), ("int32", "atomic_acq_rel")]
)
def test_planted_atomics_are_seen(tmp_path: Path, dtype: str, atomic: str) -> None:
    """The two tests above can fail."""
    counts = [int(line) for line in planted(tmp_path, dtype, 64, atomic)]
    assert len(counts) == 2 and all(counts)


def test_a_kernel_that_does_not_compile_is_a_row(tmp_path: Path) -> None:
    """Blocks are powers of two."""
    errors = planted(tmp_path, "int32", 63, "atomic_float")
    assert sum("power of 2" in line for line in errors) == 2, errors


def test_targets_are_known_and_an_unknown_one_lists_them() -> None:
    assert cross_compiler.targets() == KNOWN
    assert isinstance(cross_compiler, CrossCompiler)
    done = tbe_compile("--targets", "sm_90,sm_91")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == f"tbe compile: target 'sm_91': expected one of {', '.join(KNOWN)}\n"


def test_default_targets_are_the_tested_ones() -> None:
    assert tuple(DEFAULT_TARGETS.split(",")) == NVIDIA + AMD


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--backend", "nope"), "backend 'nope': unknown, expected one of tlx, rocm, triton, cpu"),
        (("--backend", "cpu"), "backend 'cpu' has no kernels to compile: tbe_cpu has no cross_compiler"),
        (("--targets", ","), "--targets names no target"),
        (("--targets", "sm_90", "--kernels", "zzz"), "--kernels 'zzz': no kernel's name contains it"),
    ],
)
def test_what_cannot_be_served_is_refused(options: tuple[str, ...], message: str) -> None:
    done = tbe_compile(*options)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"tbe compile: {message}\n")


def test_targets_are_devices_of_the_right_kind() -> None:
    """Wave64 on CDNA, 32 lanes elsewhere: shapes follow it."""
    for name in TARGETS:
        caps = capabilities(name)
        assert caps.arch == name and caps.device_type == "cuda" and caps.processors > 1
        assert caps.vendor == ("nvidia" if name.startswith("sm_") else "amd")
        assert caps.warp_size == (64 if name in AMD else 32)


def test_a_filter_and_the_table() -> None:
    done = tbe_compile("--targets", "gfx942,sm_90", "--kernels", "tbe_check_kernel")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "tbe_check_kernel[" in line]
    assert [line.split()[1] for line in lines] == ["gfx942", "sm_90"]
    assert all("atomic_relaxed=2" in line for line in lines)


THIRD_PARTY = """
import os
from tbe_core.compiled import CompiledKernel, CrossCompileError, FailedKernel
from tbe_cpu import CpuBackend

class Third(CpuBackend):
    name = "third"

class Compiler:
    def targets(self):
        return ("good", "bad", "dies", "absent")

    def compile_kernels(self, target, matching=""):
        interpret = os.environ.get("TRITON_INTERPRET")
        yield CompiledKernel(f"first {interpret}", "third", target, 1, 0, 0, {"fence": 2})
        if target == "bad":
            yield FailedKernel("second", "third", target, "it does not fit")
        if target == "dies":
            os._exit(3)
        if target == "absent":
            raise CrossCompileError("no toolchain")

backend, cross_compiler = Third(), Compiler()
"""


@pytest.mark.parametrize(
    ("target", "code", "kernels", "message"),
    [
        ("good", 0, ["first None"], ""),
        ("bad", 1, ["first None"], "tbe compile: failed: second of third for bad: it does not fit\n"),
        ("dies", 1, ["first None"], "failed: [the kernel after first None] of third for dies: A process in the"),
        ("absent", 2, None, "tbe compile: no toolchain\n"),
    ],
)
def test_another_backend_is_compiled_and_its_failures_are_told(
    tmp_path: Path, target: str, code: int, kernels: list[str] | None, message: str
) -> None:
    """An installed package with an entry point: one kernel compiles; then one fails, or the process dies."""
    (tmp_path / "third.py").write_text(THIRD_PARTY)
    info = tmp_path / "third-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tbe.backends]\nthird = third:backend\n")
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    done = tbe_compile(
        "--backend", "third", "--targets", target, "--json", PYTHONPATH=path, TRITON_INTERPRET="1"
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    if kernels is not None:
        assert [row["kernel"] for row in json.loads(done.stdout)] == kernels


def test_the_calling_process_imports_no_triton() -> None:
    code = (
        "import sys\nfrom tbe.crosscompile import compile_targets\n"
        "if __name__ == '__main__':\n"
        "    rows = list(compile_targets('triton', ['sm_90'], 'tbe_check_kernel'))\n"
        "    print(len(rows), 'triton' in sys.modules)\n"
    )
    assert python(code).stdout.split() == ["1", "False"]


def test_a_package_without_kernels_has_no_cross_compiler() -> None:
    assert registry.cross_compiler("triton") is cross_compiler
