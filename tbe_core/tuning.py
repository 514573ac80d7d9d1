"""What a backend declares about its configuration so that ``tbe tune`` can search it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, Protocol, get_args, runtime_checkable

from .config import DeviceConfig
from .types import Capabilities

Pass = Literal["forward", "backward", "together"]
PASSES: tuple[Pass, ...] = get_args(Pass)
"""In the order in which they are tuned; ``together`` is a forward and its backward."""

_FIELDS = frozenset(f.name for f in fields(DeviceConfig)) - {"source"}


@dataclass(frozen=True)
class Knob:
    """One field of ``DeviceConfig``, the values worth trying, and the pass whose time judges them.

    Raises ``ValueError`` for a field or a pass that there is not.
    """

    field: str
    values: tuple[int | bool, ...]
    affects: Pass

    def __post_init__(self) -> None:
        if self.field not in _FIELDS:
            raise ValueError(f"field={self.field!r}: expected one of {', '.join(sorted(_FIELDS))}")
        if self.affects not in PASSES:
            raise ValueError(f"affects={self.affects!r} of {self.field}: expected one of {', '.join(PASSES)}")
        if not self.values:
            raise ValueError(f"values of {self.field}: expected at least one")


@runtime_checkable
class Tunable(Protocol):
    """A backend whose configuration can be searched. Optional: a backend without this has nothing to tune."""

    def search_space(self, caps: Capabilities) -> tuple[Knob, ...]:
        """The knobs on this device, those that matter most first. Combinations that ``DeviceConfig`` refuses
        are passed over by the search."""
