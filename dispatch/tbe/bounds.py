"""Reports of bad ids that cost no synchronisation: counted on the device, read when the copy has arrived."""

from __future__ import annotations

import warnings

import torch

from tbe_core import BAD_LOOKUPS, BAD_OFFSETS

# Frames from the warning to the user's line: through forward, its check and nn.Module's two call wrappers;
# or through the module's own flush.
_FROM_CALL, _FROM_FLUSH = 7, 4


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
        if bad.device.type != "cuda":
            self._report(bad, bad, _FROM_CALL)
            return
        if torch.cuda.is_current_stream_capturing():
            return
        if self._event is not None:
            if not self._event.query():
                return
            self._event = None
            if self._host is not None:
                self._report(self._host, bad, _FROM_CALL)
        if self._host is None:
            self._host = torch.empty_like(bad, device="cpu", pin_memory=True)
        self._host.copy_(bad, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

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
