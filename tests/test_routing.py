"""``choose``: which backend serves what on which device, told by hand-made capabilities."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

import tbe
from tbe import BackendError, registry
from tbe_core import (
    Absent,
    Backend,
    Capabilities,
    DeviceConfig,
    Layout,
    Plan,
    Policy,
    Problem,
    Spec,
    choose,
)
from tbe_core.devices import DEVICES
from tbe_cpu import CpuBackend

PROBLEM = Spec(Layout.make([tbe.Table("a", 1000, 64)], None), tbe.RowwiseAdagrad()).problem()
CPU = Capabilities("cpu", "cpu", "x86_64", triton_version="3.8.0")
NOBODY = Policy()


def with_triton(name: str) -> Capabilities:
    return replace(DEVICES[name], triton_version="3.8.0", torch_version="2.13.0")


# --- small fake backends ------------------------------------------------------------------------------------


@dataclass
class Fake(CpuBackend):
    """A backend whose answers are its fields."""

    name: str = "fake"
    rank: int = 0
    why_unavailable: str | None = None
    why_unsupported: tuple[str, ...] = ()

    def unavailable(self, caps: Capabilities) -> str | None:
        return self.why_unavailable

    def preference(self, caps: Capabilities) -> int:
        return self.rank

    def unsupported(self, problem: Problem, caps: Capabilities) -> tuple[str, ...]:
        return self.why_unsupported

    def configure(self, problem: Problem, caps: Capabilities) -> tuple[DeviceConfig, tuple[str, ...]]:
        return DeviceConfig(source=f"tuned for {self.name}"), (f"a note of {self.name}",)


def pick(*backends: Backend | Absent, policy: Policy = NOBODY) -> Plan:
    return choose(PROBLEM, CPU, backends, policy)


def told(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {rejection.backend: rejection.reasons for rejection in plan.rejected}


def test_a_fake_is_a_backend() -> None:
    assert isinstance(Fake(), Backend)


def test_the_highest_preference_wins_whatever_the_order() -> None:
    low, mid, high = Fake("low", 1), Fake("mid", 5), Fake("high", 9)
    for order in ((low, mid, high), (high, mid, low), (mid, high, low)):
        plan = pick(*order)
        assert plan.backend == "high"
        assert told(plan) == {
            "low": ("can serve, but high is preferred here",),
            "mid": ("can serve, but high is preferred here",),
        }


def test_equal_preference_goes_to_the_first() -> None:
    assert pick(Fake("a", 3), Fake("b", 3)).backend == "a"


def test_every_reason_is_kept_and_the_next_best_serves() -> None:
    reasons = ("no fp64", "no dim 64")
    plan = pick(
        Absent("gone", "not part of this installation"),
        Fake("down", 9, why_unavailable="no such device"),
        Fake("picky", 8, why_unsupported=reasons),
        Fake("plain", 1),
    )
    assert plan.backend == "plain" and plan.config.source == "tuned for plain"
    assert told(plan) == {
        "gone": ("not part of this installation",),
        "down": ("no such device",),
        "picky": reasons,
    }
    assert str(plan).splitlines() == [
        f"plain serves {PROBLEM} on {CPU} [tuned for plain]",
        "  a note of plain",
        "  passed over gone: not part of this installation",
        "  passed over down: no such device",
        "  passed over picky: no fp64; no dim 64",
    ]


def test_nothing_serves_lists_every_backend() -> None:
    with pytest.raises(BackendError) as caught:
        pick(Absent("gone", "not here"), Fake("picky", why_unsupported=("a", "b")), Fake("shy", -1))
    assert str(caught.value).splitlines() == [
        f"no backend serves {PROBLEM} on {CPU}:",
        "  gone: not here",
        "  picky: a; b",
        "  shy: used on this device only when asked for",
    ]


def test_negative_preference_serves_only_on_request() -> None:
    shy, plain = Fake("shy", -1), Fake("plain", 0)
    assert pick(shy, plain).backend == "plain"
    assert told(pick(shy, plain)) == {"shy": ("used on this device only when asked for",)}
    assert pick(shy, plain, policy=Policy("shy")).backend == "shy"


def test_an_explicit_choice_beats_preference() -> None:
    plan = pick(Fake("a", 9), Fake("b", 1), policy=Policy("b"))
    assert plan.backend == "b" and plan.rejected == ()


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (Fake("asked", 9, why_unavailable="no such device"), "no such device"),
        (Fake("asked", 9, why_unsupported=("no fp64", "no dim 64")), "no fp64; no dim 64"),
        (Absent("asked", "not part of this installation"), "not part of this installation"),
    ],
)
def test_an_explicit_choice_is_never_replaced(asked: Backend | Absent, reason: str) -> None:
    with pytest.raises(BackendError) as caught:
        pick(asked, Fake("plain", 1), policy=Policy("asked", "TBE_BACKEND="))
    assert str(caught.value) == f"TBE_BACKEND='asked' cannot serve {PROBLEM} on {CPU}: {reason}"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BackendError, match=r"^backend='nosuch': no such backend, expected one of a, gone$"):
        pick(Fake("a"), Absent("gone", "not here"), policy=Policy("nosuch"))


def test_disabled_backends_are_passed_over_and_refused() -> None:
    off = frozenset({"a"})
    plan = pick(Fake("a", 9), Fake("b", 1), policy=Policy(disabled=off))
    assert plan.backend == "b" and told(plan) == {"a": ("disabled by TBE_DISABLE",)}
    with pytest.raises(BackendError, match=r"'a' cannot serve .*: disabled by TBE_DISABLE"):
        pick(Fake("a", 9), Fake("b", 1), policy=Policy("a", disabled=off))


# --- the real backends --------------------------------------------------------------------------------------


def real(caps: Capabilities, policy: Policy = NOBODY, problem: Problem = PROBLEM) -> Plan:
    return choose(problem, caps, registry.load_for(caps), policy)


@pytest.mark.parametrize("name", DEVICES)
def test_a_gpu_is_served_by_its_vendor_s_or_portable_kernels(name: str) -> None:
    caps = with_triton(name)
    plan = real(caps)
    other = {"nvidia": "rocm", "amd": "tlx"}[caps.vendor]
    assert plan.backend in {"triton", "tlx", "rocm"} - {other}
    passed_over = told(plan)
    assert sorted([plan.backend, *passed_over]) == sorted(registry.names())
    assert all(reasons and all(reasons) for reasons in passed_over.values())
    assert passed_over["cpu"] == ("serves CPU tensors only, not cuda",)
    assert any("sort" in note for note in plan.notes)
    assert str(plan).startswith(f"{plan.backend} serves {PROBLEM} on {caps} [")
    assert f"({caps.vendor} {caps.arch}, {caps.processors} processors)" in str(plan)


@pytest.mark.parametrize("name", DEVICES)
def test_portable_triton_serves_every_gpu_on_request(name: str) -> None:
    assert real(with_triton(name), Policy("triton")).backend == "triton"


@pytest.mark.parametrize("name", DEVICES)
def test_a_gpu_without_triton_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(BackendError) as caught:
        real(DEVICES[name])
    lines = str(caught.value).splitlines()
    assert [line.strip().partition(":")[0] for line in lines[1:]] == registry.names()
    assert "triton: Triton is not installed: pip install 'portable-tbe[triton]'" in str(caught.value)
    assert "cpu: serves CPU tensors only, not cuda" in str(caught.value)


def test_an_old_triton_is_told_the_version_it_needs() -> None:
    with pytest.raises(BackendError, match=r"triton: Triton 3\.2\.0 is too old: 3\.\d+ or newer is needed"):
        real(replace(DEVICES["H200"], triton_version="3.2.0"))


def test_the_cpu_is_served_by_eager_torch() -> None:
    plan = real(CPU)
    assert plan.backend == "cpu"
    assert "TRITON_INTERPRET=1" in told(plan)["triton"][0] and "GPU" in told(plan)["triton"][0]


def test_the_interpreter_serves_only_on_request() -> None:
    interpreted = replace(CPU, triton_interpret=True)
    plan = real(interpreted)
    assert plan.backend == "cpu"
    assert told(plan)["triton"] == ("used on this device only when asked for",)
    assert real(interpreted, Policy("triton")).backend == "triton"
    with pytest.raises(BackendError, match="TRITON_INTERPRET=1"):
        real(CPU, Policy("triton"))


def test_a_device_that_nobody_knows() -> None:
    with pytest.raises(BackendError) as caught:
        real(replace(CPU, device_type="mps", vendor="mps"))
    assert "triton: no Triton kernels for mps" in str(caught.value)
    assert "cpu: serves CPU tensors only, not mps" in str(caught.value)


def test_rows_too_wide_for_a_program_are_refused_not_zeroed() -> None:
    spec = Spec(Layout.make([tbe.Table("a", 10, 100_000)], None), tbe.SGD())
    with pytest.raises(BackendError, match=r"dim 100000 exceeds \d+"):
        real(with_triton("H200"), Policy("triton"), spec.problem())
    assert real(CPU, problem=spec.problem()).backend == "cpu"
