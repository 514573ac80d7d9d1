"""Seeds, hypothesis profiles, what can run on this machine, and poisoned memory for every test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch._dynamo.utils import counters

import tbe

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
HAS_GPU = torch.cuda.is_available()

# Examples are small; what costs is a kernel's compilation on a GPU, and every program in the interpreter.
_EXAMPLES = 25 if INTERPRETED else 15 if HAS_GPU else 60
_shared = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("default", max_examples=_EXAMPLES, derandomize=True, **_shared)
settings.register_profile("thorough", max_examples=20 * _EXAMPLES, **_shared)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def _usable(device: str) -> list[str]:
    return [status.name for status in tbe.backends(device) if status.unavailable is None]


def places() -> list[tuple[str, str]]:
    """Every (backend, device) that can run here. The interpreter's kernels run on CPU tensors only."""
    found = [(name, "cpu") for name in _usable("cpu")]
    if HAS_GPU and not INTERPRETED:
        found += [(name, "cuda") for name in _usable("cuda")]
    return found


def pytest_report_header() -> list[str]:
    lines = ["values run on: " + ", ".join(f"{backend} ({device})" for backend, device in places())]
    for device in ("cpu", "cuda") if HAS_GPU else ("cpu",):
        lines += [
            f"  not {status.name} ({device}): {status.unavailable}"
            for status in tbe.backends(device)
            if status.unavailable is not None
        ]
    return lines if HAS_GPU else [*lines, f"  nothing on a GPU: {_no_gpu()}"]


def _no_gpu() -> str:
    return f"torch {torch.__version__} sees no GPU"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``place`` runs once for every (backend, device)."""
    if "place" not in metafunc.fixturenames:
        return
    marks = {"cuda": (pytest.mark.gpu,)}
    metafunc.parametrize(
        "place",
        [pytest.param(place, id="-".join(place), marks=marks.get(place[1], ())) for place in places()],
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not HAS_GPU:
        pytest.skip(_no_gpu())


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(20240229)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile without what other tests compiled and counted."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _poison(made: torch.Tensor) -> torch.Tensor:
    # A tensor that is being traced has no memory.
    if type(made) is not torch.Tensor or made.device.type == "meta" or not made.numel():
        return made
    if made.is_floating_point() or made.is_complex():
        return made.fill_(float("nan"))
    if made.dtype == torch.uint8:
        return made.fill_(0xFF)  # workspaces: read as a float it is NaN
    return made.fill_(True if made.dtype == torch.bool else torch.iinfo(made.dtype).max // 2)


class Poison:
    """NaN, or huge integers, in all memory that torch hands out unwritten."""

    def __init__(self) -> None:
        self._on = True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Hand out memory as it is: pages of a huge table that nobody writes are then never committed."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def wrap(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = make(*args, **kwargs)
            return _poison(made) if self._on else made

        return poisoned


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Poison:
    """Unwritten outputs and workspaces show as NaN or as ids out of range."""
    found = Poison()
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, found.wrap(getattr(owner, name)))
    return found
