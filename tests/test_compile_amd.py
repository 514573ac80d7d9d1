"""Machine code for AMD: every kernel of ``rocm`` for five targets, and of ``triton`` for those that
tests/test_compile.py leaves out. No AMD GPU is involved, and none has ever run it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import python
from test_compile import dims_of, name_of, tbe_compile, widest_load

from tbe_triton.targets import TARGETS

pytestmark = pytest.mark.compile

CDNA, RDNA = ("gfx90a", "gfx942", "gfx950"), ("gfx1100", "gfx1201")
COMPILED = {"rocm": CDNA + RDNA, "triton": RDNA}
"""Backend to targets."""
Row = dict[str, Any]


@pytest.fixture(scope="session")
def rows() -> list[Row]:
    """All kernels, by the command itself."""
    found: list[Row] = []
    for backend, targets in COMPILED.items():
        done = tbe_compile("--json", "--backend", backend, "--targets", ",".join(targets))
        assert done.returncode == 0, done.stderr
        found += json.loads(done.stdout)
    return found


def narrow(rows: list[Row]) -> Iterator[Row]:
    """Those of one dim, at most 256."""
    return (row for row in rows if len(dims_of(row)) == 1 and dims_of(row)[0] <= 256)


def of(rows: list[Row], backend: str, target: str, start: str) -> list[Row]:
    found = [
        row
        for row in rows
        if (row["backend"], row["target"]) == (backend, target) and row["kernel"].startswith(start)
    ]
    assert found, (backend, target, start)
    return found


EACH = [(backend, target) for backend, targets in COMPILED.items() for target in targets]


@pytest.mark.parametrize(("backend", "target"), EACH)
def test_every_kernel_is_there(rows: list[Row], backend: str, target: str) -> None:
    kernels = {name_of(row) for row in rows}
    assert len(kernels) > 8 and {name_of(row) for row in of(rows, backend, target, "")} == kernels
    assert len(list(narrow(of(rows, backend, target, "")))) > 80


@pytest.mark.parametrize(("backend", "target"), EACH)
def test_narrow_rows_spill_nothing_and_use_no_scratch(rows: list[Row], backend: str, target: str) -> None:
    here = narrow(of(rows, backend, target, ""))
    used = {row["kernel"]: (row["spills"], row["instructions"]["local_bytes"]) for row in here}
    assert not {kernel: pair for kernel, pair in used.items() if pair != (0, 0)}


def test_nothing_adds_floats_counts_arrivals_or_is_fused(rows: list[Row]) -> None:
    kinds = ("atomic_float", "atomic_cas", "atomic_acq_rel", "atomic_release")
    assert not [row for row in rows if any(row["instructions"][kind] for kind in kinds)]
    assert not [row for row in rows if "fused" in row["kernel"]]


@pytest.mark.parametrize("target", COMPILED["rocm"])
@pytest.mark.parametrize("bags", ("short", "long"))
@pytest.mark.parametrize("dim", (64, 128, 256, 512, 1024))
def test_the_forward_s_rows_are_16_byte_loads(rows: list[Row], target: str, bags: str, dim: int) -> None:
    """As many as are unrolled, and no narrower load but those of ids and offsets, 4 bytes each here."""
    for row in of(rows, "rocm", target, f"tbe_forward_pool_kernel[D={dim} fp16->fp32 sum {bags} bags"):
        loads = {k: n for k, n in row["instructions"].items() if k.startswith("global_load_") and n}
        assert set(loads) == {"global_load_16", "global_load_4"} and loads["global_load_16"] >= 4, loads


@pytest.mark.parametrize("target", COMPILED["rocm"])
@pytest.mark.parametrize("quantization", ("int8", "int4", "fp8"))
def test_quantised_rows_are_16_byte_loads(rows: list[Row], target: str, quantization: str) -> None:
    """On gfx90a too, which has no fp8 instruction."""
    for dim in (128, 256):
        for row in of(rows, "rocm", target, f"tbe_quantized_pool_kernel[D={dim} {quantization}->fp32 sum short"):
            assert widest_load(row) == 16, row


@pytest.mark.parametrize("target", COMPILED["rocm"])
@pytest.mark.parametrize("dim", (64, 128, 256))
def test_the_update_s_gradients_take_what_a_row_gives_a_lane(rows: list[Row], target: str, dim: int) -> None:
    """It walks one row at a time: of an fp32 gradient each lane has its share, up to 16 bytes. Keys and values
    are 4 bytes, and the stretch's facts 8."""
    share = min(dim * 4 // TARGETS[target].warp_size, 16)
    for row in of(rows, "rocm", target, f"tbe_update_kernel[D={dim} fp16->fp32 rowwise_adagrad split"):
        assert widest_load(row) == max(share, 8), row
        assert row["instructions"][f"global_load_{share}"] >= 4, row


@pytest.mark.parametrize("target", COMPILED["rocm"])
def test_walks_of_a_full_batch_fill_the_processor(rows: list[Row], target: str) -> None:
    """Registers cost no wave at D=64 and D=128, so there is nothing for ``waves_per_eu`` to gain."""
    for dim in (64, 128):
        dtypes = f"[D={dim} fp16->fp32"
        for start in (f"tbe_forward_pool_kernel{dtypes} sum ", f"tbe_update_kernel{dtypes} rowwise_adagrad"):
            for row in of(rows, "rocm", target, start):
                plain = "weighted" not in row["kernel"]
                assert row["resident"] == row["most"] or not plain, row


BARRIER = """
import torch
from count_in import count_in
from tbe_triton.crosscompile import activate
from tbe_triton.targets import capabilities
activate(capabilities("TARGET"))
counter = torch.zeros(4, dtype=torch.int32)
print(count_in.warmup(torch.zeros(1024), counter, BLOCK=1024, grid=(1,), num_warps=4).asm["amdgcn"])
"""
COUNT_IN = """
import triton
import triton.language as tl

@triton.jit
def count_in(out_ptr, counter_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(out_ptr + cols, cols.to(tl.float32))
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
"""


def between(code: str, start: str, end: str) -> list[str]:
    """The instructions after the last that starts with ``start`` before the first, from there, with ``end``."""
    lines = [line.split(";")[0].strip() for line in code.splitlines()]
    first = max(i for i, line in enumerate(lines) if line.startswith(start))
    last = next(i for i in range(first, len(lines)) if lines[i].startswith(end))
    return [line for line in lines[first + 1 : last] if line]


@pytest.mark.parametrize("target", CDNA + RDNA)
def test_what_the_gate_of_the_fused_tier_stands_on(tmp_path: Path, target: str) -> None:
    """Store, barrier, count in: on CDNA the barrier waits for no store, and what the count writes back and waits
    for comes after it, in the counting wave alone. On RDNA the barrier waits. Should a Triton change this, the
    rule in tbe_triton.fused_tier is to be thought over."""
    (tmp_path / "count_in.py").write_text(COUNT_IN)
    done = python(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + BARRIER.replace("TARGET", target))
    assert done.returncode == 0, done.stderr
    waits = re.compile(r"s_waitcnt(_vscnt)?\b.*(vmcnt|null, 0x0)|s_wait_storecnt|buffer_wbl2|global_wb")
    before = [line for line in between(done.stdout, "buffer_store", "s_barrier") if waits.match(line)]
    after = [line for line in between(done.stdout, "s_barrier", "global_atomic_add") if waits.match(line)]
    assert bool(before) == (target in RDNA), before
    assert [line for line in after if "vmcnt(0)" in line] or target in RDNA, after
    assert any("buffer_wbl2 sc1" in line for line in after) == (target in ("gfx942", "gfx950")), after
