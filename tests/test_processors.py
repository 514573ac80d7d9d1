"""Occupancy: the arithmetic by hand-made cases, and against what LLVM says of each kernel that it compiled."""

from __future__ import annotations

import json

import pytest
from helpers import python

from tbe_core.processors import PROCESSORS, most_warps, resident_warps
from tbe_triton.targets import TARGETS


def test_every_target_has_a_processor_of_its_lanes() -> None:
    assert set(PROCESSORS) == set(TARGETS)
    assert all(PROCESSORS[name].lanes == caps.warp_size for name, caps in TARGETS.items())


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "warps", "expected"),
    [
        ("sm_90", 32, 0, 4, 64),  # nothing binds
        ("sm_90", 64, 0, 4, 32),  # 65536 registers / (64 x 32 lanes)
        ("sm_90", 65, 0, 4, 28),  # rounded up to 72 registers: seven warps a quarter
        ("sm_90", 32, 0, 1, 32),  # programs of one warp: 32 an SM
        ("sm_90", 32, 100 * 1024, 8, 16),  # two programs' shared memory, with 1 KiB each beside it
        ("sm_90", 32, 228 * 1024, 8, 0),
        ("gfx942", 64, 0, 1, 32),  # 512 registers a lane and SIMD, eight waves
        ("gfx942", 65, 0, 1, 28),
        ("gfx942", 169, 8192, 8, 8),  # two waves a SIMD, one program of eight
        ("gfx942", 32, 40 * 1024, 4, 4),
        ("gfx1100", 96, 0, 1, 64),
        ("gfx1100", 97, 0, 1, 48),  # rounded up to 120: twelve waves a SIMD
        ("gfx1100", 256, 0, 8, 16),  # 264: five a SIMD, twenty in all, two programs of eight
    ],
)
def test_resident_warps(arch: str, registers: int, shared: int, warps: int, expected: int) -> None:
    processor = PROCESSORS[arch]
    assert resident_warps(processor, registers, shared, warps) == expected <= most_warps(processor)


OCCUPANCY = """
import json, re
from tbe_core.processors import PROCESSORS, resident_warps
from tbe_rocm import cross_compiler
from tbe_triton import machine_code
rows, of_kernel, processor = [], machine_code.of_kernel, PROCESSORS["TARGET"]
def watched(compiled):
    used, code = of_kernel(compiled), compiled.asm["amdgcn"]
    ours = resident_warps(processor, used.registers, 0, 1) // processor.partitions
    printed = (r"; Occupancy: (\\d+)", r"; TotalNumSgprs: (\\d+)")
    rows.append([ours, *(int(re.search(pattern, code)[1]) for pattern in printed)])
    return used
machine_code.of_kernel = watched
assert all(hasattr(r, "registers") for r in cross_compiler.compile_kernels("TARGET", "D=128 fp16->fp32"))
print(json.dumps(rows))
"""
MANY_SCALARS = {"gfx90a": 100, "gfx942": 100, "gfx950": 100}
"""Scalar registers above which a SIMD holds seven waves at most, which ``resident_warps`` leaves out."""
SCALARS_ALLOW = 7


@pytest.mark.compile
@pytest.mark.parametrize("target", ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"))
def test_llvm_counts_the_same(target: str) -> None:
    """LLVM prints the waves a SIMD that registers and LDS allow; LDS binds in none of these kernels."""
    done = python(OCCUPANCY.replace("TARGET", target))
    assert done.returncode == 0, done.stderr
    rows: list[list[int]] = json.loads(done.stdout)
    assert len(rows) > 20
    for ours, llvm, scalars in rows:
        many = scalars > MANY_SCALARS.get(target, scalars)
        assert llvm == (min(ours, SCALARS_ALLOW) if many else ours), scalars
    assert len({llvm for _, llvm, _ in rows}) > 1, "a kernel of many registers is among them"
