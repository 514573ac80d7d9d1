"""An explicit-state model of the launch-control loop: see ``protocol_models``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from protocol_models import Broken, put

LOOP = ("sync", "expect", "sync", "try_cancel", "work", "wait", "load", "flip", "again")
"""One turn of a program's threads. ``expect`` and ``try_cancel`` are done by thread 0. ``again`` ends the program
where the response told that nothing was left."""

LOOP_BUGS: dict[str, tuple[str, ...]] = {
    "phase not flipped": ("sync", "expect", "sync", "try_cancel", "work", "wait", "load", "again"),
    "no barrier before the request": ("expect", "try_cancel", "work", "wait", "load", "flip", "again"),
    "not waited for": ("sync", "expect", "sync", "try_cancel", "work", "load", "flip", "again"),
    "bytes not expected": ("sync", "try_cancel", "work", "wait", "load", "flip", "again"),
    "goes on after nothing was left": (
        "sync", "expect", "sync", "try_cancel", "work", "wait", "load", "flip", "again_whatever",
    ),
    "two requests a turn": (
        "sync", "expect", "sync", "try_cancel", "try_cancel", "work", "wait", "load", "flip", "again",
    ),
}  # fmt: skip

NOTHING, NEVER = -1, -2
"""A response: no program was left; and none was ever written."""


@dataclass(frozen=True)
class Program:
    """A running program, or a place where one may run."""

    running: bool = False
    ended: bool = False
    at: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    """Thread: what it works on."""
    phase: tuple[int, ...] = ()
    """Thread: the parity that it waits for next."""
    response: int = NEVER
    flying: tuple[int, ...] = ()
    """Answers on their way to shared memory."""
    parity: int = 0
    """Of the barrier's current phase."""
    arrivals: int = 1
    """That the phase still waits for."""
    bytes: int = 0
    """That the phase still waits for."""
    refused: bool = False
    """A request has found nothing."""
    turn: tuple[int, ...] = ()
    """Thread: how many responses it has loaded. Ghost: no kernel has it."""
    answered: int = 0
    """How many responses have been written. Ghost."""


@dataclass(frozen=True)
class Queue:
    pending: tuple[int, ...]
    programs: tuple[Program, ...]
    done: tuple[tuple[int, ...], ...]
    """Tile, thread: how often it was worked on."""


class QueueModel:
    """``tiles`` are launched on ``places`` processors, and taken from the queue by those that run."""

    def __init__(
        self, sequence: tuple[str, ...] = LOOP, tiles: int = 4, places: int = 2, threads: int = 2
    ) -> None:
        self.sequence, self.tiles, self.places, self.threads = sequence, tiles, places, threads

    def start(self) -> Queue:
        done = tuple((0,) * self.threads for _ in range(self.tiles))
        return Queue(tuple(range(self.tiles)), (Program(),) * self.places, done)

    def finished(self, s: Queue) -> bool:
        """Nothing is left and nobody runs: then every tile must have been worked on once, by every thread."""
        if s.pending or any(p.running for p in s.programs):
            return False
        if any(count != 1 for tile in s.done for count in tile):
            raise Broken(f"tiles were worked on {s.done} times")
        return True

    def successors(self, s: Queue) -> Iterator[tuple[str, Queue]]:
        for i, p in enumerate(s.programs):
            if not p.running:
                if s.pending:
                    yield f"tile {s.pending[0]} starts on {i}", self._started(s, i)
                continue
            if p.flying:
                yield f"an answer reaches {i}", self._with(s, i, self._answered(p))
            for t in range(self.threads):
                if p.at[t] < len(self.sequence):
                    name = self.sequence[p.at[t]]
                    for after in getattr(self, f"_{name}")(s, i, p, t):
                        yield f"{name} p{i} t{t}", after
        self.finished(s)

    def _started(self, s: Queue, i: int) -> Queue:
        each = (0,) * self.threads
        fresh = Program(True, False, each, (s.pending[0],) * self.threads, each, turn=each)
        return replace(self._with(s, i, fresh), pending=s.pending[1:])

    def _with(self, s: Queue, i: int, p: Program) -> Queue:
        return replace(s, programs=put(s.programs, i, p))

    def _next(self, s: Queue, i: int, p: Program, t: int) -> Queue:
        return self._with(s, i, replace(p, at=put(p.at, t, p.at[t] + 1)))

    def _completed(self, p: Program) -> Program:
        if p.arrivals or p.bytes:
            return p
        return replace(p, parity=p.parity ^ 1, arrivals=1)

    def _answered(self, p: Program) -> Program:
        """The answer is written, and its bytes are counted in the barrier's current phase."""
        first, *rest = p.flying
        after = replace(p, response=first, flying=tuple(rest), bytes=p.bytes - 16, answered=p.answered + 1)
        return self._completed(after)

    def _sync(self, s: Queue, i: int, p: Program, t: int) -> Iterator[Queue]:
        if t == 0 and len(set(p.at)) == 1:
            yield self._with(s, i, replace(p, at=tuple(at + 1 for at in p.at)))

    def _expect(self, s: Queue, i: int, p: Program, t: int) -> Iterator[Queue]:
        """Arrives, and makes the phase wait for 16 bytes more."""
        if t == 0:
            if not p.arrivals:
                raise Broken("the barrier's phase has all its arrivals already")
            p = self._completed(replace(p, arrivals=p.arrivals - 1, bytes=p.bytes + 16))
        yield self._next(s, i, p, t)

    def _try_cancel(self, s: Queue, i: int, p: Program, t: int) -> Iterator[Queue]:
        if t == 0:
            if p.refused:
                raise Broken("a request after one that found nothing")
            found, s = (s.pending[0], replace(s, pending=s.pending[1:])) if s.pending else (NOTHING, s)
            p = replace(p, flying=(*p.flying, found), refused=found == NOTHING)
        yield self._next(s, i, p, t)

    def _work(self, s: Queue, i: int, p: Program, t: int) -> Iterator[Queue]:
        tile = p.tile[t]
        if tile < 0:
            raise Broken("work after nothing was left")
        if s.done[tile][t]:
            raise Broken(f"tile {tile} is worked on twice")
        done = put(s.done, tile, put(s.done[tile], t, 1))
        yield self._next(replace(s, done=done), i, p, t)

    def _wait(self, s: Queue, i: int, p: Program, t: int) -> Iterator[Queue]:
        """Passes when the phase of the waited-for parity is over."""
        if p.parity != p.phase[t]:
            yield self._next(s, i, p, t)

    def _load(self, s: Queue, i: int, p: Program, t: int) -> Iterator[Queue]:
        if p.answered != p.turn[t] + 1:
            raise Broken(f"thread {t} reads response {p.answered} in its turn {p.turn[t] + 1}")
        p = replace(p, tile=put(p.tile, t, p.response), turn=put(p.turn, t, p.turn[t] + 1))
        yield self._next(s, i, p, t)

    def _flip(self, s: Queue, i: int, p: Program, t: int) -> Iterator[Queue]:
        yield self._next(s, i, replace(p, phase=put(p.phase, t, p.phase[t] ^ 1)), t)

    def _again(self, s: Queue, i: int, p: Program, t: int) -> Iterator[Queue]:
        if p.tile[t] != NOTHING:
            yield self._with(s, i, replace(p, at=put(p.at, t, 0)))
            return
        p = replace(p, at=put(p.at, t, len(self.sequence)))
        if all(at == len(self.sequence) for at in p.at):
            if p.flying:
                raise Broken("the program ends while an answer is on its way to its memory")
            p = Program()
        yield self._with(s, i, p)

    def _again_whatever(self, s: Queue, i: int, p: Program, t: int) -> Iterator[Queue]:
        yield self._with(s, i, replace(p, at=put(p.at, t, 0)))
