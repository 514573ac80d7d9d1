"""What a processor of each architecture holds, and how many warps of a kernel fit on it: pure arithmetic.

A processor is what ``Capabilities.processors`` counts: an SM, a compute unit, or on RDNA a pair of them. The
numbers are the vendors' own: NVIDIA's CUDA C++ Programming Guide (compute capabilities), AMD's instruction set
manuals and LLVM's AMDGPU back end, whose own count ``tests/test_processors.py`` compares. Scalar registers are
left out: on CDNA a kernel of more than 100 of them has seven waves a SIMD instead of eight.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True)
class Processor:
    """Limits of one processor. Registers are 4 bytes a lane, counted a warp."""

    lanes: int
    """Of a warp."""
    partitions: int
    """SIMDs, or quarters of an SM: each has its own registers, and warps never move."""
    warps: int
    """At most, in a partition."""
    registers: int
    """Of a lane, in all warps of a partition together."""
    granule: int
    """Registers of a lane are given out in multiples of this."""
    shared: int
    """Bytes of shared memory (LDS) for all programs."""
    shared_each: int
    """Bytes that a program takes beside its own."""
    programs: int
    """At most, however small."""


_CDNA = Processor(64, 4, 8, 512, 8, 64 * KIB, 0, 32)
_RDNA = Processor(32, 4, 16, 1536, 24, 128 * KIB, 0, 64)
PROCESSORS: dict[str, Processor] = {
    "sm_80": Processor(32, 4, 16, 512, 8, 164 * KIB, KIB, 32),
    "sm_90": Processor(32, 4, 16, 512, 8, 228 * KIB, KIB, 32),
    "sm_100": Processor(32, 4, 16, 512, 8, 228 * KIB, KIB, 32),
    "sm_103": Processor(32, 4, 16, 512, 8, 228 * KIB, KIB, 32),
    "sm_120": Processor(32, 4, 12, 512, 8, 100 * KIB, KIB, 24),
    "gfx90a": _CDNA,
    "gfx942": _CDNA,
    "gfx950": Processor(64, 4, 8, 512, 8, 160 * KIB, 0, 32),
    "gfx1100": _RDNA,
    "gfx1201": _RDNA,
}
"""Architecture to limits."""


def resident_warps(processor: Processor, registers: int, shared: int, warps: int) -> int:
    """Warps that a processor holds at once; 0 where not even one program fits.

    Args:
        registers: of a lane.
        shared: bytes a program.
        warps: of a program; they are spread over the partitions.
    """
    given = -(-max(registers, 1) // processor.granule) * processor.granule
    each = min(processor.registers // given, processor.warps)
    programs = each * processor.partitions // warps
    if shared:
        programs = min(programs, processor.shared // (shared + processor.shared_each))
    return min(programs, processor.programs) * warps


def most_warps(processor: Processor) -> int:
    """Warps that a processor holds at most."""
    return processor.partitions * processor.warps
