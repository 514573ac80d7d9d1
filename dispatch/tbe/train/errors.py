"""What can go wrong in a training run for reasons the user can act on. Each message is complete by itself."""

from __future__ import annotations


class TrainError(Exception):
    """Base of the errors that ``tbe train`` prints as one message, without a traceback."""


class ConfigError(TrainError):
    """An option, or a combination of options, that cannot work."""


class DataError(TrainError):
    """A click file that is missing, empty, unreadable or too malformed."""


class CheckpointError(TrainError):
    """A checkpoint that is missing, damaged, in the way, or of another run."""


class DivergedError(TrainError):
    """The training loss or a held-out logit stopped being a finite number."""
