"""Explicit-state models of the protocols that programs of an update use between each other.

``explore`` visits every interleaving. Models are small: programs of two threads, a handful of tiles or partials.
Each is written as the sequence of steps that the kernels take, under the same names; a seeded bug changes that
sequence and nothing else. ``tests/test_tlx_compile.py`` finds the same sequences in compiled code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

State = TypeVar("State", bound=Hashable)


class Broken(AssertionError):
    """A property does not hold; the message has the steps that lead there."""


def explore(
    start: State,
    successors: Callable[[State], Iterator[tuple[str, State]]],
    finished: Callable[[State], bool],
    limit: int = 2_000_000,
) -> int:
    """Visit every state, the nearest first; the number of them.

    Raises ``Broken`` for a deadlock, and what ``successors`` raises, with the steps that lead there.
    """
    came: dict[State, tuple[State, str] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        moved = False
        try:
            for label, after in successors(state):
                moved = True
                if after not in came:
                    came[after] = (state, label)
                    waiting.append(after)
        except Broken as error:
            raise Broken(f"{error}, after {'; '.join(_path(came, state))}") from None
        if not moved and not finished(state):
            raise Broken(f"deadlock, after {'; '.join(_path(came, state))}")
        if len(came) > limit:
            raise RuntimeError(f"more than {limit} states: the model is too large to explore")
    return len(came)


def _path(came: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    labels: list[str] = []
    step = came[state]
    while step is not None:
        labels.append(step[1])
        step = came[step[0]]
    return labels[::-1]


def put(values: tuple, at: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:at], value, *values[at + 1 :])


# --- the last arriver -----------------------------------------------------------------------------------------

ARRIVE = ("store_partial", "gpu_fence", "barrier", "count", "barrier", "acquire", "sum_and_step")
"""What a thread of a program does for a run that it shares with other programs. ``count`` is done by thread 0,
the others hear of it at the barrier that follows; ``acquire`` and ``sum_and_step`` by the last program only."""

ARRIVE_BUGS: dict[str, tuple[str, ...]] = {
    "fence left out": ("store_partial", "barrier", "count", "barrier", "acquire", "sum_and_step"),
    "fence after the counter": (
        "store_partial", "barrier", "count", "gpu_fence", "barrier", "acquire", "sum_and_step",
    ),
    "no barrier before the counter": (
        "store_partial", "gpu_fence", "count", "barrier", "acquire", "sum_and_step",
    ),
    "counter read before the add": (
        "store_partial", "gpu_fence", "barrier", "read_counter", "add", "barrier", "acquire", "sum_and_step",
    ),
    "no acquire after the counter": ("store_partial", "gpu_fence", "barrier", "count", "barrier", "sum_and_step"),
    "counter before the partial": (
        "count", "barrier", "store_partial", "gpu_fence", "barrier", "acquire", "sum_and_step",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Arrivals:
    """Programs that share one run. A thread's stores reach memory whenever they like, unless a fence waits
    for them; a program may hold an old copy of any partial in its cache until it acquires."""

    at: tuple[tuple[int, ...], ...]
    """Program, thread: its place in the sequence."""
    buffered: tuple[tuple[bool, ...], ...]
    """Program, thread: its partial is still on its way to memory."""
    memory: tuple[tuple[bool, ...], ...]
    """Program, thread: its partial is in memory."""
    stale: tuple[tuple[tuple[bool, ...], ...], ...]
    """Reader, program, thread: the reader's cache holds the partial as it was before."""
    counter: int
    read: tuple[int, ...]
    """Program: the counter as it saw it."""
    stepped: tuple[int, ...]
    """Thread's columns: how often the row was stepped."""


class ArrivalModel:
    """``programs`` of ``threads`` leave partials; the last to arrive must sum all of them, once."""

    def __init__(self, sequence: tuple[str, ...] = ARRIVE, programs: int = 2, threads: int = 2) -> None:
        self.sequence, self.programs, self.threads = sequence, programs, threads

    def start(self) -> Arrivals:
        def each(value: object) -> tuple:  # type: ignore[type-arg]
            return tuple(tuple(value for _ in range(self.threads)) for _ in range(self.programs))

        nobody = tuple(each(False) for _ in range(self.programs))
        counts = (0,) * self.programs
        return Arrivals(each(0), each(False), each(False), nobody, 0, counts, (0,) * self.threads)

    def finished(self, s: Arrivals) -> bool:
        if any(at < len(self.sequence) for program in s.at for at in program):
            return False
        if s.stepped != (1,) * self.threads:
            raise Broken(f"the row was stepped {s.stepped} times")
        return True

    def successors(self, s: Arrivals) -> Iterator[tuple[str, Arrivals]]:
        for p in range(self.programs):
            for t in range(self.threads):
                yield from self._memory(s, p, t)
                if s.at[p][t] < len(self.sequence):
                    name = self.sequence[s.at[p][t]]
                    for after in getattr(self, f"_{name}")(s, p, t):
                        yield f"{name} p{p} t{t}", after
        if all(at == len(self.sequence) for program in s.at for at in program):
            self.finished(s)

    def _memory(self, s: Arrivals, p: int, t: int) -> Iterator[tuple[str, Arrivals]]:
        """What memory does by itself: a store arrives; a cache fetches a partial that nobody asked for."""
        if s.buffered[p][t]:
            yield f"arrives p{p} t{t}", self._arrived(s, p, t)
        for reader in range(self.programs):
            if reader != p and not s.memory[p][t] and not s.stale[reader][p][t]:
                kept = put(s.stale[reader], p, put(s.stale[reader][p], t, True))
                yield f"p{reader} caches p{p} t{t}", replace(s, stale=put(s.stale, reader, kept))

    def _arrived(self, s: Arrivals, p: int, t: int) -> Arrivals:
        return replace(
            s,
            buffered=put(s.buffered, p, put(s.buffered[p], t, False)),
            memory=put(s.memory, p, put(s.memory[p], t, True)),
        )

    def _next(self, s: Arrivals, p: int, t: int) -> Arrivals:
        return replace(s, at=put(s.at, p, put(s.at[p], t, s.at[p][t] + 1)))

    def _last(self, s: Arrivals, p: int) -> bool:
        return s.read[p] == self.programs - 1

    def _store_partial(self, s: Arrivals, p: int, t: int) -> Iterator[Arrivals]:
        yield self._next(replace(s, buffered=put(s.buffered, p, put(s.buffered[p], t, True))), p, t)

    def _gpu_fence(self, s: Arrivals, p: int, t: int) -> Iterator[Arrivals]:
        if not s.buffered[p][t]:
            yield self._next(s, p, t)

    def _barrier(self, s: Arrivals, p: int, t: int) -> Iterator[Arrivals]:
        """All threads of the program at once; it says nothing about stores."""
        if t == 0 and len(set(s.at[p])) == 1:
            yield replace(s, at=put(s.at, p, tuple(at + 1 for at in s.at[p])))

    def _count(self, s: Arrivals, p: int, t: int) -> Iterator[Arrivals]:
        """One thread, released for its own stores, as an atomic is."""
        if t:
            yield self._next(s, p, t)
        elif not s.buffered[p][t]:
            yield self._next(replace(s, read=put(s.read, p, s.counter), counter=s.counter + 1), p, t)

    def _read_counter(self, s: Arrivals, p: int, t: int) -> Iterator[Arrivals]:
        yield self._next(s if t else replace(s, read=put(s.read, p, s.counter)), p, t)

    def _add(self, s: Arrivals, p: int, t: int) -> Iterator[Arrivals]:
        yield self._next(s if t else replace(s, counter=s.counter + 1), p, t)

    def _acquire(self, s: Arrivals, p: int, t: int) -> Iterator[Arrivals]:
        if self._last(s, p):
            fresh = tuple((False,) * self.threads for _ in range(self.programs))
            s = replace(s, stale=put(s.stale, p, fresh))
        yield self._next(s, p, t)

    def _sum_and_step(self, s: Arrivals, p: int, t: int) -> Iterator[Arrivals]:
        if self._last(s, p):
            for q in range(self.programs):
                # A program sees its own stores wherever they are.
                if q != p and (not s.memory[q][t] or s.stale[p][q][t]):
                    raise Broken(f"p{p} t{t} sums a partial of p{q} that it cannot see")
            s = replace(s, stepped=put(s.stepped, t, s.stepped[t] + 1))
        yield self._next(s, p, t)
