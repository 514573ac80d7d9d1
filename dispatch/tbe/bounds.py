"""Reports of bad ids that cost no synchronisation: counted on the device, read when the copy has arrived."""

from __future__ import annotations

import warnings

import torch

from tbe_core import BAD_LOOKUPS, BAD_OFFSETS

# Frames from the warning to the user's line: through forward, its eager part, the check and nn.Module's two call wrappers;
# or through the module's own flush.
_FROM_CALL, _FROM_FLUSH = 8, 4


class BadLookupWarning(UserWarning):
    """Ids outside their table were looked up; they contributed nothing and trained nothing."""


class BadLookups:
    """The counters of one module in ``warn`` mode, and what of them has been reported."""

    def __init__(self) -> None:
        self._host: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._reported = 0

    def forked(self) -> BadLookups:
        """For a copy of the module: it carries the counters along, so also what of them was reported.

        Pinned memory and events stay behind: they are this process's.
        """
        copy = BadLookups()
        copy._reported = self._reported
        return copy

    def poll(self, bad: torch.Tensor) -> None:
        """Report what has arrived, and send for what is new. Never waits; does nothing while capturing."""
        counts = bad
        if bad.device.type == "cuda":
            with torch.cuda.device(bad.device):
                arrived = self._exchange(bad)
            if arrived is None:
                return
            counts = arrived
        self._report(counts, bad, _FROM_CALL)

    def _exchange(self, bad: torch.Tensor) -> torch.Tensor | None:
        """The counts of an earlier call, once they have arrived; and a copy of the present ones on its way."""
        if torch.cuda.is_current_stream_capturing():
            return None
        arrived = None
        if self._event is None or self._host is None:
            self._host, self._event = torch.empty_like(bad, device="cpu", pin_memory=True), torch.cuda.Event()
        elif not self._event.query():
            return None
        else:
            arrived = self._host.clone()
        self._host.copy_(bad, non_blocking=True)
        self._event.record()
        return arrived

    def flush(self, bad: torch.Tensor) -> None:
        """Report everything counted so far; waits for the device."""
        self._event = None
        self._report(bad.cpu(), bad, _FROM_FLUSH)

    def _report(self, counts: torch.Tensor, bad: torch.Tensor, depth: int) -> None:
        lookups, offsets = int(counts[BAD_LOOKUPS]), int(counts[BAD_OFFSETS])
        if offsets:
            bad[BAD_OFFSETS].zero_()
            raise ValueError(
                f"offsets: {offsets} values out of order or range in an earlier call, read as empty bags; "
                "expected offsets that start at 0, never decrease and end at the length of indices"
            )
        if lookups > self._reported:
            new, self._reported = lookups - self._reported, lookups
            warnings.warn(
                f"{new} ids outside their table were looked up ({lookups} so far); they contributed nothing "
                "and trained nothing. bounds_check='error' names the first one",
                BadLookupWarning,
                stacklevel=depth,
            )
