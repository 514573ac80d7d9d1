"""``tbe_core.assist``: what an update uses of a device, told by hand-made capabilities; no compiler."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tbe_core import Capabilities, DeviceConfig, Route, Tier, route
from tbe_core.assist import (
    CLC,
    FEATURES,
    GPU_FENCE,
    STORE_REDUCE,
    Assist,
    Work,
    assist,
    balanced,
    fused_programs,
    notes,
)
from tbe_core.devices import DEVICES

HOPPER = frozenset(FEATURES) - {CLC}
BLACKWELL = frozenset(FEATURES)
OF_DEVICE = {"H200": HOPPER, "B200": BLACKWELL, "GB200": BLACKWELL, "RTX5090": BLACKWELL}
CONFIG = DeviceConfig(
    fused_programs=64, persistent_warps=32, steal_stretches=4, reduce_programs=256, warps_per_processor=64
)


def device(name: str, without: frozenset[str] = frozenset()) -> Capabilities:
    return replace(DEVICES[name], tlx_provider="by hand 1.0", tlx_features=OF_DEVICE[name] - without)


def split(programs: int) -> Route:
    return Route(128, programs, Tier.SPLIT)


def few(programs: int) -> Route:
    return Route(16, programs, Tier.FUSED)


# --- the fused tier's gate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_DEVICE)
def test_the_fused_tier_needs_a_gpu_fence(name: str) -> None:
    caps = device(name)
    assert fused_programs(caps, CONFIG) == 64
    assert assist(few(64), caps, CONFIG, True).long_runs is Tier.FUSED
    bare = device(name, frozenset({GPU_FENCE}))
    assert fused_programs(bare, CONFIG) == 0
    assert assist(few(1), bare, CONFIG, True).long_runs is Tier.SPLIT


@pytest.mark.parametrize("name", OF_DEVICE)
def test_the_fused_tier_ends_where_the_config_says(name: str) -> None:
    # A route may come from another config: the gate holds by itself.
    assert assist(few(65), device(name), CONFIG, True).long_runs is Tier.SPLIT
    off = replace(CONFIG, fused_programs=0)
    assert assist(few(1), device(name), off, True).long_runs is Tier.SPLIT
    assert assist(split(2), device(name), CONFIG, True).long_runs is Tier.SPLIT


# --- launch control -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["B200", "GB200", "RTX5090"])
def test_blackwell_steals_from_enough_stretches_a_processor(name: str) -> None:
    caps = device(name)
    enough = 4 * caps.processors
    assert assist(split(enough), caps, CONFIG, True).work is Work.STOLEN
    assert assist(split(enough - 1), caps, CONFIG, True).work is Work.STATIC
    # Every stretch has its program: those that are taken are never started.
    assert assist(split(enough * 50), caps, CONFIG, True).programs == enough * 50
    assert assist(split(enough * 50), caps, replace(CONFIG, steal_stretches=0), True).work is Work.STATIC


def test_hopper_has_a_static_grid_instead() -> None:
    caps = device("H200")
    most = 132 * 32
    assert assist(split(most), caps, CONFIG, True) == Assist(Work.STATIC, most, Tier.SPLIT, False)
    over = assist(split(most + 1), caps, CONFIG, True)
    assert over == Assist(Work.STATIC, most // 2 + 1, Tier.SPLIT, False)
    assert assist(split(2 * most), caps, CONFIG, True).programs == most
    assert assist(split(10 * most), caps, CONFIG, True, warps=4).programs == most // 4
    assert assist(split(10 * most), caps, replace(CONFIG, persistent_warps=0), True).programs == 10 * most


def test_blackwell_whose_provider_lacks_launch_control_has_a_static_grid() -> None:
    caps = device("B200", frozenset({CLC}))
    assert assist(split(148 * 32 * 3), caps, CONFIG, True) == Assist(Work.STATIC, 148 * 32, Tier.SPLIT, False)


@given(st.integers(1, 1 << 24), st.integers(1, 1 << 14))
def test_a_static_grid_is_balanced(stretches: int, most: int) -> None:
    programs = balanced(stretches, most)
    turns = -(-stretches // most)
    assert 1 <= programs <= most
    assert -(-stretches // programs) == turns, "a program takes more turns than needed"
    assert programs == 1 or -(-stretches // (programs - 1)) > turns, "fewer programs would do"
    of_each = [len(range(p, stretches, programs)) for p in {0, programs // 2, programs - 1}]
    assert max(of_each) - min(of_each) <= 1


# --- store-reduce -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_DEVICE)
def test_store_reduce_is_never_used_where_results_must_repeat(name: str) -> None:
    caps = device(name)
    for programs in (1, 255, 256, 1 << 20):
        assert not assist(split(programs), caps, CONFIG, deterministic=True).reduces
        assert assist(split(programs), caps, CONFIG, deterministic=False).reduces == (programs >= 256)
    assert not assist(split(1 << 20), caps, replace(CONFIG, reduce_programs=0), deterministic=False).reduces
    bare = device(name, frozenset({STORE_REDUCE}))
    assert not assist(split(1 << 20), bare, CONFIG, deterministic=False).reduces


def test_store_reduce_counts_stretches_and_not_the_programs_of_a_static_grid() -> None:
    caps = replace(device("H200"), processors=2)
    used = assist(split(300), caps, CONFIG, deterministic=False)
    assert used.work is Work.STATIC and used.programs < 256 and used.reduces


def test_fused_runs_need_no_store_reduce() -> None:
    config = replace(CONFIG, reduce_programs=1)
    assert not assist(few(64), device("H200"), config, deterministic=False).reduces
    assert assist(split(65), device("H200"), config, deterministic=False).reduces


# --- what a plan is told ------------------------------------------------------------------------------------


def test_notes_say_what_is_used_and_why_the_rest_is_not() -> None:
    assert notes(device("B200"), CONFIG, False) == (
        "long runs are fused up to 64 programs, with a gpu fence",
        "launch control from 4 stretches a processor",
        "store-reduce of long runs from 256 programs",
    )
    assert notes(device("H200"), CONFIG, True) == (
        "long runs are fused up to 64 programs, with a gpu fence",
        "launch control does not exist here; a static grid of 32 warps a processor",
        "no store-reduce, since results must repeat bit for bit",
    )
    off = replace(CONFIG, steal_stretches=0, reduce_programs=0, persistent_warps=0)
    assert notes(device("GB200"), off, False)[1:] == (
        "launch control is off: steal_stretches is 0; one stretch a program",
        "store-reduce is off: reduce_programs is 0",
    )
    assert notes(DEVICES["RTX5090"], CONFIG, False) == (
        "long runs are never fused: no gpu fence",
        "launch control does not exist here; a static grid of 32 warps a processor",
        "no store-reduce",
    )


@pytest.mark.parametrize("name", OF_DEVICE)
@given(lookups=st.integers(0, 1 << 34), deterministic=st.booleans(), warps=st.sampled_from([1, 2, 4, 8]))
def test_any_route_of_a_device_gets_a_launch_that_covers_it(
    name: str, lookups: int, deterministic: bool, warps: int
) -> None:
    caps = device(name)
    chosen = route(lookups, CONFIG, caps, warps)
    used = assist(chosen, caps, CONFIG, deterministic, warps)
    assert used.long_runs is chosen.long_runs
    assert used.programs <= chosen.programs and (used.programs > 0) == (chosen.programs > 0)
    assert used.programs == chosen.programs or used.work is Work.STATIC
    assert not (used.reduces and (deterministic or used.long_runs is Tier.FUSED))
