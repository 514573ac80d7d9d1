"""A stream beside the current one, forked and joined within a call: memory and CUDA graphs see one order."""

from __future__ import annotations

import threading

import torch


class Side:
    """A stream beside the current one, and the two events that order them."""

    def __init__(self, device: torch.device) -> None:
        # The sort is a chain of small kernels: with priority it is not queued behind the whole gather.
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
        self.by_device: dict[torch.device, Side] = {}


_sides = _Sides()


def side_of(device: torch.device) -> Side:
    found = _sides.by_device.get(device)
    if found is None:
        found = _sides.by_device[device] = Side(device)
    return found
