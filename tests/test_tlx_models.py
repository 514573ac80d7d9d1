"""The protocols between programs hold in every interleaving of their models, and the models find seeded bugs."""

from __future__ import annotations

import pytest
from protocol_models import ARRIVE, ARRIVE_BUGS, ArrivalModel, Broken, explore
from protocol_models_clc import LOOP, LOOP_BUGS, QueueModel


def run(model: ArrivalModel | QueueModel) -> int:
    return explore(model.start(), model.successors, model.finished)


@pytest.mark.parametrize(("programs", "threads"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_the_last_to_arrive_sees_every_partial_and_steps_once(programs: int, threads: int) -> None:
    assert run(ArrivalModel(ARRIVE, programs, threads)) > programs * threads * len(ARRIVE)


FOUND = {
    "fence left out": "sums a partial of p. that it cannot see",
    "fence after the counter": "sums a partial of p. that it cannot see",
    "no barrier before the counter": "sums a partial of p. that it cannot see",
    "counter read before the add": r"the row was stepped \(0",
    "no acquire after the counter": "sums a partial of p. that it cannot see",
    "counter before the partial": "sums a partial of p. that it cannot see",
}


@pytest.mark.parametrize("bug", ARRIVE_BUGS)
def test_the_model_of_arrivals_finds(bug: str) -> None:
    with pytest.raises(Broken, match=FOUND[bug]):
        run(ArrivalModel(ARRIVE_BUGS[bug], programs=2, threads=2))


def test_a_program_of_one_thread_is_safe_without_a_fence() -> None:
    """What is released by the atomic is the counting thread's own: the fence is for the others."""
    run(ArrivalModel(ARRIVE_BUGS["fence left out"], programs=3, threads=1))


@pytest.mark.parametrize(("tiles", "places", "threads"), [(1, 1, 1), (1, 2, 2), (4, 1, 2), (4, 2, 2), (4, 3, 1)])
def test_every_tile_is_worked_on_once(tiles: int, places: int, threads: int) -> None:
    assert run(QueueModel(LOOP, tiles, places, threads)) > tiles * threads * len(LOOP)


LOOP_FOUND = {
    "phase not flipped": "reads response 1 in its turn 2",
    "no barrier before the request": "reads response 2 in its turn 1",
    "not waited for": "reads response 0 in its turn 1",
    "bytes not expected": "deadlock, after",
    "goes on after nothing was left": "a request after one that found nothing",
    "two requests a turn": "reads response 2 in its turn 1",
}


@pytest.mark.parametrize("bug", LOOP_BUGS)
def test_the_model_of_launch_control_finds(bug: str) -> None:
    with pytest.raises(Broken, match=LOOP_FOUND[bug]):
        run(QueueModel(LOOP_BUGS[bug]))


def test_a_broken_property_tells_how_it_came_about() -> None:
    with pytest.raises(Broken) as caught:
        run(ArrivalModel(ARRIVE_BUGS["fence left out"]))
    assert "store_partial p0 t" in str(caught.value) and "count p" in str(caught.value)


def test_a_deadlock_and_too_many_states_are_told() -> None:
    def count(s: int) -> list[tuple[str, int]]:
        return [(f"to {s + 1}", s + 1)] if s < 3 else []

    assert explore(0, lambda s: iter(count(s)), lambda s: s == 3) == 4
    with pytest.raises(Broken, match="deadlock, after to 1; to 2; to 3"):
        explore(0, lambda s: iter(count(s)), lambda s: False)
    with pytest.raises(RuntimeError, match="more than 10 states"):
        explore(0, lambda s: iter([("more", s + 1)]), lambda s: True, limit=10)
