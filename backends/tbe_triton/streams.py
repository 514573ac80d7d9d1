"""A stream beside the current one, forked and joined within a call: memory and CUDA graphs see one order."""

from __future__ import annotations

import threading

import torch

from tbe_core import DeviceConfig


class Side:
    """A stream beside the current one, and the two events that order them."""

    def __init__(self, device: torch.device) -> None:
        # With priority a chain of small kernels is not queued behind the whole of a large one.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.forked, self.joined = torch.cuda.Event(), torch.cuda.Event()

    def fork(self) -> None:
        self.forked.record(torch.cuda.current_stream())
        self.stream.wait_event(self.forked)

    def join(self) -> None:
        self.joined.record(self.stream)
        torch.cuda.current_stream().wait_event(self.joined)


class _Sides(threading.local):
    def __init__(self) -> None:
        self.kept: dict[tuple[torch.device, str], Side] = {}


_sides = _Sides()


def side_of(device: torch.device, purpose: str) -> Side:
    """This thread's side stream on ``device`` for ``purpose``."""
    found = _sides.kept.get((device, purpose))
    if found is None:
        found = _sides.kept[(device, purpose)] = Side(device)
    return found


NARROW = 64
"""Blocks up to this width keep few lanes and little memory busy: their launches run beside those of wide rows."""


def side_for_narrow(blocks: list[int], lookups: int, config: DeviceConfig, device: torch.device) -> Side | None:
    """A forked side stream for the narrow launches, where there are launches of both kinds and enough work."""
    if device.type != "cuda" or lookups < config.overlap_lookups:
        return None
    if min(blocks) > NARROW or max(blocks) <= NARROW:
        return None
    side = side_of(device, "narrow")
    side.fork()
    return side
