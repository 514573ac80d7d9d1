"""The radix sort on the host, with a stand-in for cuda-cccl: built once, kept on disk, replaced when broken."""

from __future__ import annotations

import logging
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tbe_core.devices import DEVICES
from tbe_triton import sort
from tbe_triton.carry import CarryLayout

CAPS = replace(DEVICES["H200"], cccl_version="1.2.1")
LAYOUT = CarryLayout(lookups=10, values=torch.int32, keys=torch.int32, counters=3)
CPU = torch.device("cpu")


class StandIn(types.ModuleType):
    """What of ``cuda.compute`` is used; counts builds, and fails where it is told to."""

    class SortOrder:
        ASCENDING = 0

    class DoubleBuffer:
        def __init__(self, current: Any, alternate: Any) -> None:
            self.selector = 0

    def __init__(self) -> None:
        super().__init__("cuda.compute")
        self.builds, self.error = 0, None

    def make_radix_sort(self, **arguments: Any) -> object:
        assert arguments["compute_capability"] == 90
        self.builds += 1
        if self.error:
            raise self.error
        return object()

    def serialize(self, sorter: object) -> bytes:
        return b"sorter"

    def deserialize(self, blob: bytes) -> object:
        if blob != b"sorter":
            raise ValueError("bad magic")
        return object()


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    found = StandIn()
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.compute", found)
    monkeypatch.setattr(sys.modules["cuda"], "compute", found, raising=False)
    monkeypatch.setattr(sort, "_path", lambda which, caps: tmp_path / "kept" / f"{which[2]}.bin")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return fresh(monkeypatch) or found


def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(sort, "_builds", sort._Builds())
    monkeypatch.setattr(sort, "_sorters", sort._Sorters())


def test_it_is_built_in_the_background_and_kept_on_disk(
    compute: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sort.radix_sorter(LAYOUT, CAPS, CPU)
    assert first is None or isinstance(first, sort.RadixSort)  # it may be done already
    sort.settle()
    found = sort.radix_sorter(LAYOUT, CAPS, CPU)
    assert isinstance(found, sort.RadixSort) and sort.radix_sorter(LAYOUT, CAPS, CPU) is found
    assert compute.builds == 1
    fresh(monkeypatch)
    assert isinstance(sort.radix_sorter(LAYOUT, CAPS, CPU), sort.RadixSort), "the file serves at once"
    assert compute.builds == 1
    assert sort.radix_sorter(replace(LAYOUT, values=torch.int64), CAPS, CPU) is None or compute.builds == 2


def test_a_failed_build_is_told_and_torch_sorts(compute: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    compute.error = RuntimeError("no compiler")
    with caplog.at_level(logging.WARNING, "tbe"):
        sort.radix_sorter(LAYOUT, CAPS, CPU)
        sort.settle()
        assert sort.radix_sorter(LAYOUT, CAPS, CPU) is None
    assert compute.builds == 1 and "torch sorts instead: RuntimeError('no compiler')" in caplog.text


def test_a_kept_file_that_cannot_be_loaded_is_built_anew(
    compute: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    path = sort._path((CAPS.arch, torch.int32, torch.int32), CAPS)
    path.parent.mkdir()
    path.write_bytes(b"of another version")
    with caplog.at_level(logging.WARNING, "tbe"):
        assert sort.radix_sorter(LAYOUT, CAPS, CPU) is None
    assert "building it anew" in caplog.text
    sort.radix_sorter(LAYOUT, CAPS, CPU)
    sort.settle()
    assert isinstance(sort.radix_sorter(LAYOUT, CAPS, CPU), sort.RadixSort) and path.read_bytes() == b"sorter"


def test_no_sorter_is_loaded_while_a_graph_is_captured(compute: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    sort.radix_sorter(LAYOUT, CAPS, CPU)
    sort.settle()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    fresh_thread = sort._Sorters()
    monkeypatch.setattr(sort, "_sorters", fresh_thread)
    assert sort.radix_sorter(LAYOUT, CAPS, CPU) is None


@pytest.mark.parametrize("name", ("A100", "MI300X"))
def test_reasons_name_what_is_missing(name: str) -> None:
    caps = replace(DEVICES[name], cccl_version=None)
    expected = "cuda-cccl is not installed" if name == "A100" else "cuda-cccl sorts on NVIDIA GPUs only"
    assert sort.radix_unavailable(caps) == expected
