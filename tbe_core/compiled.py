"""What cross-compiling a backend's kernels yields, and the contract of a package that can. No GPU is involved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class CrossCompileError(RuntimeError):
    """Nothing can be compiled: an unknown target or backend, or a toolchain that is absent."""


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel as it was compiled for one target."""

    kernel: str
    """Its name, and in brackets the call that launches it."""
    backend: str
    target: str
    registers: int
    """Vector registers a thread."""
    spills: int
    """Registers a thread that do not fit and live in memory; 0 is what one wants."""
    shared: int
    """Bytes of shared memory (LDS) a program."""
    instructions: dict[str, int]
    """How often each kind of instruction that matters stands in the code; docs/compile.md lists the kinds."""
    warps: int = 1
    """Of a program."""
    resident: int | None = None
    """Warps that a processor of the target holds at once, by registers and shared memory; None: not known."""
    most: int | None = None
    """Warps that such a processor holds at most; None: not known."""


@dataclass(frozen=True)
class FailedKernel:
    """One kernel that could not be compiled for one target."""

    kernel: str
    backend: str
    target: str
    error: str

    def __str__(self) -> str:
        return f"{self.kernel} of {self.backend} for {self.target}: {self.error}"


@runtime_checkable
class CrossCompiler(Protocol):
    """The object ``cross_compiler`` that stands beside ``backend`` in a package that can cross-compile."""

    def targets(self) -> tuple[str, ...]:
        """Names of the targets it knows."""

    def compile_kernels(self, target: str, matching: str = "") -> Iterator[CompiledKernel | FailedKernel]:
        """Compile, in this process, every kernel whose ``kernel`` contains ``matching``; none is left out.

        Raises:
            CrossCompileError: the target is unknown, or the toolchain is absent.
        """


def check_target(compiler: CrossCompiler, target: str) -> None:
    """Raise ``CrossCompileError`` with the known names unless ``target`` is one of them."""
    if target not in compiler.targets():
        raise CrossCompileError(f"target {target!r}: expected one of {', '.join(compiler.targets())}")
