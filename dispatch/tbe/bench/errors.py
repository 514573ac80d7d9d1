"""What a user of ``tbe bench`` can act on. Each message is complete by itself."""

from __future__ import annotations


class BenchError(Exception):
    """Base of the errors that ``tbe bench`` prints as one message, without a traceback."""


class SelectionError(BenchError):
    """A workload or implementation name that is not known."""


class StoreError(BenchError):
    """A database that is missing, not ours, of another schema version, or without the asked-for run."""


class PlotError(BenchError):
    """The page was asked for and matplotlib is not installed."""
