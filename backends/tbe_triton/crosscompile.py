"""Cross-compiling every kernel that a backend launches: its launches are recorded, then compiled for a target.

Triton's own just-in-time path compiles them, for a device that is not there; so constants, tile shapes, warps and
the specialisation of arguments are those of a launch on that target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tbe_core import Backend, Capabilities
from tbe_core.compiled import CompiledKernel, CrossCompileError, FailedKernel, check_target
from tbe_core.processors import PROCESSORS, most_warps, resident_warps

from .targets import TARGETS, capabilities
from .variants import UPDATE, VARIANTS, Call, Variant


@dataclass(frozen=True)
class Launch:
    """One recorded launch."""

    kernel: Any
    arguments: tuple[Any, ...]
    num_warps: int
    constants: dict[str, Any]
    call: str
    """What launched it: the words in the row's brackets."""

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


class TritonCrossCompiler:
    """Compiles what ``backend`` launches. Another Triton backend reuses it with its own targets and facts."""

    def __init__(
        self,
        backend: Backend,
        targets: tuple[str, ...] = tuple(TARGETS),
        variants: tuple[Variant, ...] = VARIANTS,
        facts: Callable[[Capabilities], Capabilities] = lambda caps: caps,
    ) -> None:
        """``facts`` adds to a target's capabilities what the backend asks of them, such as a TLX provider."""
        self._backend, self._targets, self._variants, self._facts = backend, targets, variants, facts

    def targets(self) -> tuple[str, ...]:
        return self._targets

    def compile_kernels(self, target: str, matching: str = "") -> Iterator[CompiledKernel | FailedKernel]:
        """Compile, in this process, every distinct launch whose name contains ``matching``.

        Raises:
            CrossCompileError: the target is unknown, Triton is absent, or this process interprets kernels.
        """
        check_target(self, target)
        caps = self._facts(capabilities(target))
        reason = self._backend.unavailable(caps)
        if reason is not None:
            raise CrossCompileError(f"{self._backend.name} for {target}: {reason}")
        activate(caps)
        seen: set[str] = set()
        names: Counter[str] = Counter()
        for name, launch in _named(self.launches(caps)):
            row = self._compile(name, launch, target, seen) if matching in name else None
            if row is not None:
                # The same constants for arguments of other alignments or sizes.
                names[name] += 1
                yield row if names[name] == 1 else replace(row, kernel=f"{name} #{names[name]}")

    def launches(self, caps: Capabilities) -> list[Launch]:
        """Every launch of every variant that the backend serves, as the backend itself makes them."""
        found: list[Launch] = []
        for variant in self._variants:
            for tier in variant.tiers:
                call = Call(self._backend, variant, tier, caps)
                # A problem with reasons against it is never given to this backend: it has no kernels for it.
                for work in () if call.reasons else variant.passes:
                    words = variant.name(work, call.tier if work == UPDATE else tier)
                    call.run(work, lambda *launch, words=words: found.append(Launch(*launch, words)))
        return found

    def _compile(
        self, name: str, launch: Launch, target: str, seen: set[str]
    ) -> CompiledKernel | FailedKernel | None:
        """The launch as compiled; None where an earlier one compiled to the same kernel."""
        from . import machine_code

        try:
            compiled = launch.kernel.warmup(
                *launch.arguments, grid=(1,), num_warps=launch.num_warps, **launch.constants
            )
            if compiled.hash in seen:
                return None
            seen.add(compiled.hash)
            used = machine_code.of_kernel(compiled)
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises is this row's result
            return FailedKernel(name, self._backend.name, target, f"{type(error).__name__}: {error}")
        warps, shared = launch.num_warps, compiled.metadata.shared
        processor = PROCESSORS[target]
        return CompiledKernel(
            name, self._backend.name, target, used.registers, used.spills, shared, used.instructions, warps,
            resident_warps(processor, used.registers, shared, warps), most_warps(processor),
        )  # fmt: skip


def _named(launches: list[Launch]) -> Iterator[tuple[str, Launch]]:
    """Names and launches; launches of one kernel by one call are told apart by constants that differ."""
    groups: dict[tuple[str, str], list[Launch]] = {}
    for launch in launches:
        groups.setdefault((launch.name, launch.call), []).append(launch)
    for (kernel, call), group in groups.items():
        constants = [{**launch.constants, "num_warps": launch.num_warps} for launch in group]
        shown: list[str] = []
        for name in constants[0]:
            texts = [[repr(c.get(k)) for k in (*shown, name)] for c in constants]
            if len({*map(tuple, texts)}) > len({tuple(t[:-1]) for t in texts}):
                shown.append(name)
        for launch, values in zip(group, constants, strict=True):
            yield f"{kernel}[{' '.join([call, *(f'{k}={values[k]}' for k in shown)])}]", launch


def activate(caps: Capabilities) -> None:
    """Make Triton compile for a device of ``caps`` that need not exist.

    Raises:
        CrossCompileError: this process runs kernels in Triton's interpreter.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    if knobs.runtime.interpret:
        raise CrossCompileError("TRITON_INTERPRET=1: unset it; interpreted kernels are not compiled")
    arch: int | str = int(caps.arch[3:]) if caps.vendor == "nvidia" else caps.arch
    target = GPUTarget("cuda" if caps.vendor == "nvidia" else "hip", arch, caps.warp_size)

    class AbsentDevice(DriverBase):  # type: ignore[misc]
        """Answers what the just-in-time path asks before it compiles; it cannot launch."""

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise NotImplementedError("nothing is launched")

        def get_benchmarker(self) -> Any:
            raise NotImplementedError("nothing is launched")

        def get_active_torch_device(self) -> Any:
            raise NotImplementedError("nothing is launched")

        def get_current_target(self) -> GPUTarget:
            return target

        def get_current_device(self) -> str:
            # Kernels are kept by device: each target is one of its own.
            return caps.arch

        def get_current_stream(self, device: str) -> int:
            return 0

    driver.set_active(AbsentDevice())
