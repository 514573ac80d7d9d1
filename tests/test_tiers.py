"""``route``, ``is_long`` and ``tier_of_run``: properties, and a model of programs that walk sorted lookups."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbe_core import Capabilities, DeviceConfig, Route, Tier, route, tier_of_run
from tbe_core.devices import DEVICES
from tbe_core.tiers import is_long

seeded = settings(derandomize=True, deadline=None)
POWERS = st.integers(0, 9).map(lambda n: 1 << n)


@st.composite
def configs(draw: st.DrawFn) -> DeviceConfig:
    small, more = draw(POWERS), draw(st.integers(0, 4))
    return DeviceConfig(
        stretch=small << more,
        stretch_small=small,
        unroll=1,
        warps_per_processor=draw(st.integers(1, 64)),
        fused_programs=draw(st.integers(0, 200)),
    )


CAPS = st.integers(1, 400).map(lambda n: Capabilities("cuda", "any", "any", processors=n))
LOOKUPS = st.one_of(st.integers(0, 5_000), st.integers(0, 1 << 40))


@seeded
@given(LOOKUPS, configs(), CAPS)
def test_route_covers_every_lookup_and_fills_the_device(n: int, config: DeviceConfig, caps: Capabilities) -> None:
    chosen = route(n, config, caps)
    full = caps.processors * config.warps_per_processor
    assert (
        chosen.programs - 1
    ) * chosen.stretch < n <= chosen.programs * chosen.stretch or n == chosen.programs == 0
    assert config.stretch_small <= chosen.stretch <= config.stretch
    assert config.stretch % chosen.stretch == 0
    # As long as the device stays full, no shorter; as short as allowed where it would not be.
    assert chosen.stretch == config.stretch_small or n >= chosen.stretch * full
    assert chosen.stretch == config.stretch or n < 2 * chosen.stretch * full
    assert chosen.long_runs is (Tier.FUSED if chosen.programs <= config.fused_programs else Tier.SPLIT)


@seeded
@given(LOOKUPS, LOOKUPS, configs(), CAPS)
def test_more_lookups_never_shorten_a_stretch(a: int, b: int, config: DeviceConfig, caps: Capabilities) -> None:
    few, many = sorted((a, b))
    assert route(few, config, caps).stretch <= route(many, config, caps).stretch


def test_route_on_a_known_device() -> None:
    config, caps = DeviceConfig(warps_per_processor=16, stretch_small=32), DEVICES["H200"]
    full = 132 * 16
    assert route(0, config, caps) == Route(32, 0, Tier.FUSED)
    assert route(1, config, caps) == Route(32, 1, Tier.FUSED)
    assert route(64 * 32, config, caps) == Route(32, 64, Tier.FUSED)
    assert route(64 * 32 + 1, config, caps) == Route(32, 65, Tier.SPLIT)
    assert route(full * 64 - 1, config, caps).stretch == 32
    assert route(full * 64, config, caps).stretch == 64
    assert route(full * 128, config, caps) == Route(128, full, Tier.SPLIT)
    # Programs of several warps fill the device sooner.
    assert route(full * 32, config, caps, warps=4) == Route(128, full // 4, Tier.SPLIT)


@seeded
@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20), POWERS)
def test_is_long_is_what_its_words_say(start: int, length: int, stretch: int) -> None:
    """Long: covers a whole stretch, and has lookups before and after it."""
    end = start + length
    if length <= 4 * stretch:
        blocks = range((start + 1 + stretch - 1) // stretch, end // stretch + 1)
        by_words = any(start < b * stretch and (b + 1) * stretch < end for b in blocks)
        # A run that starts on a boundary keeps its own stretch before the whole one.
        assert is_long(start, length, stretch) == by_words
    assert not (length <= stretch and is_long(start, length, stretch))
    assert not (length > 2 * stretch and not is_long(start, length, stretch))
    for tier in (Tier.FUSED, Tier.SPLIT):
        expected = tier if is_long(start, length, stretch) else Tier.SHORT
        assert tier_of_run(start, length, Route(stretch, 1, tier)) is expected


@dataclass
class Walk:
    """What one program does."""

    read: int = 0
    stepped: list[int] = field(default_factory=list)
    """Runs that it completes by itself."""
    partials: list[tuple[int, int]] = field(default_factory=list)
    """(run, lookups) that it leaves for a combine."""


def walk(starts: list[int], chosen: Route) -> list[Walk]:
    """Every program of a launch over the sorted lookups; run r is [starts[r], starts[r + 1])."""
    runs = list(pairwise(starts))
    long = [tier_of_run(a, b - a, chosen) is not Tier.SHORT for a, b in runs]
    walks = []
    for program in range(chosen.programs):
        begin, end = program * chosen.stretch, (program + 1) * chosen.stretch
        did = Walk()
        for r, (a, b) in enumerate(runs):
            if long[r]:
                inside = min(b, end) - max(a, begin)
                if inside > 0:
                    did.partials.append((r, inside))
                    did.read += inside
            elif begin <= a < end:
                did.stepped.append(r)
                did.read += b - a
        walks.append(did)
    return walks


@settings(seeded, max_examples=300)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(0, 4).map(lambda n: 1 << n), st.booleans()
)
def test_every_run_is_stepped_once_by_programs_of_bounded_work(
    lengths: list[int], stretch: int, fused: bool
) -> None:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    chosen = Route(stretch, -(-starts[-1] // stretch), Tier.FUSED if fused else Tier.SPLIT)
    walks = walk(starts, chosen)
    alone = [r for did in walks for r in did.stepped]
    pieces: dict[int, list[int]] = {}
    for did in walks:
        for r, count in did.partials:
            pieces.setdefault(r, []).append(count)
    assert len(alone) == len(set(alone)) and not set(alone) & set(pieces), "a run is stepped twice"
    assert sorted([*alone, *pieces]) == list(range(len(lengths))), "a run is not stepped"
    assert all(sum(counts) == lengths[r] for r, counts in pieces.items()), "a long run's sum is incomplete"
    assert all(len(counts) >= 3 for counts in pieces.values()), "a run of two programs needs no combine"
    assert max(did.read for did in walks) <= 2 * stretch, "a program walks more than twice its stretch"
    assert max(len(did.partials) for did in walks) <= 2, "a program has room for a head and a tail only"


def test_a_config_refuses_numbers_that_no_kernel_can_take() -> None:
    with pytest.raises(ValueError, match="stretch=96: expected a power of two"):
        DeviceConfig(stretch=96)
    with pytest.raises(ValueError, match="unroll=0: expected a power of two"):
        DeviceConfig(unroll=0)
    with pytest.raises(ValueError, match="unroll=64: expected a divisor of both stretches"):
        DeviceConfig(unroll=64)
