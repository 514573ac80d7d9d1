"""Cross-compile a backend's kernels for many targets, each in a child process; this one imports no compiler."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

from tbe_core.compiled import CompiledKernel, FailedKernel, check_target

from . import environment, registry

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

Row = CompiledKernel | FailedKernel
POLL_SECONDS = 0.1


def compile_targets(
    backend: str,
    targets: Sequence[str],
    matching: str = "",
    jobs: int | None = None,
    finished: Callable[[str], None] = lambda target: None,
) -> Iterator[Row]:
    """Rows as they come, of several targets at a time.

    Args:
        backend: its name in the registry.
        matching: only kernels whose row's name contains it.
        jobs: child processes side by side; None for one a CPU.
        finished: called with each target whose last row was yielded.

    Raises:
        CrossCompileError: unknown backend or target (checked first), or no toolchain.
    """
    compiler = registry.cross_compiler(backend)
    for target in targets:
        check_target(compiler, target)
    waiting = deque(dict.fromkeys(targets))
    running: dict[Future[None], _Child] = {}
    try:
        while waiting or running:
            while waiting and len(running) < (jobs or os.cpu_count() or 1):
                child = _Child(backend, waiting.popleft(), matching)
                running[child.future] = child
            done, _ = wait(running, POLL_SECONDS, FIRST_COMPLETED)
            for child in running.values():
                yield from child.rows()
            for future in done:
                ended = running.pop(future)
                yield from ended.end()
                finished(ended.target)
    finally:
        for child in running.values():
            child.stop()


class _Child:
    """One target's compilation in a fresh process: a toolchain's global state never meets another target."""

    def __init__(self, backend: str, target: str, matching: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.backend, self.target, self._last = backend, target, "the start"
        # Written without a thread of its own: what a finished child has put is there to be read.
        self._channel: SimpleQueue[Row] = context.SimpleQueue()
        self._pool = ProcessPoolExecutor(1, context, _start, (self._channel,))
        self.future = self._pool.submit(_compile, backend, target, matching)

    def rows(self) -> Iterator[Row]:
        """Those that have arrived."""
        while not self._channel.empty():
            row = self._channel.get()
            self._last = row.kernel
            yield row

    def end(self) -> Iterator[Row]:
        """The last rows of a child that has ended; one more where it crashed. Raises what it raised."""
        yield from self.rows()
        self.stop()
        try:
            self.future.result()
        except BrokenProcessPool as error:
            yield FailedKernel(f"[the kernel after {self._last}]", self.backend, self.target, str(error))

    def stop(self) -> None:
        self._pool.shutdown(wait=self.future.done(), cancel_futures=True)


_channel: SimpleQueue[Row] | None = None


def _start(channel: SimpleQueue[Row]) -> None:
    """In the child, before anything of a backend is imported."""
    global _channel
    _channel = channel
    environment.unset_triton_interpret()


def _compile(backend: str, target: str, matching: str) -> None:
    if _channel is None:
        raise RuntimeError("the child has no channel: _start has not run")
    for row in registry.cross_compiler(backend).compile_kernels(target, matching):
        _channel.put(row)
