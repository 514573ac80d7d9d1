"""Gradient accumulation: the backwards of a block are kept, and make one update as of one large batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tbe_core import Lookup
from tbe_core.validate import check_inputs

from . import policy

if TYPE_CHECKING:
    from .eager import Call

NESTED = "accumulate() inside accumulate() of the same module: expected one block at a time"
ENDED = (
    "the accumulate() block in which this lookup was made has ended: expected its backward inside the block; "
    "nothing was stepped"
)
COMPILED = (
    "a training call under torch.compile or a dispatch mode inside accumulate(): its backward cannot be kept; "
    "expected an eager call"
)
DEFERRED = "a FusedOptimizer(defer=True) was made since another lookup of this accumulate() block was made"
RESPECIFIED = "tables were frozen, unfrozen or moved since another lookup of this accumulate() block was made"


@dataclass(frozen=True)
class _Kept:
    """One micro-batch: copies, since callers reuse their buffers from one micro-batch to the next."""

    lookup: Lookup
    grad: torch.Tensor
    stream: torch.cuda.Stream | None

    @classmethod
    def of(cls, lookup: Lookup, grad: torch.Tensor) -> _Kept:
        weights = lookup.per_sample_weights
        copies = replace(
            lookup,
            indices=lookup.indices.clone(),
            offsets=lookup.offsets.clone(),
            per_sample_weights=None if weights is None else weights.detach().clone(),
        )
        stream = torch.cuda.current_stream(grad.device) if grad.device.type == "cuda" else None
        return cls(copies, grad.clone(memory_format=torch.contiguous_format), stream)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (self.lookup.indices, self.lookup.offsets, self.grad)
        if self.lookup.per_sample_weights is not None:
            yield self.lookup.per_sample_weights


class Block:
    """What one ``accumulate()`` has kept so far."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._call: Call | None = None

    def keep(self, call: Call, grad: torch.Tensor) -> None:
        """In place of an update. Raises ``RuntimeError`` where it cannot be one with the others."""
        first, lookup = self._call, call.lookup
        if first is None:
            self._call = call
        elif first.lookup.spec != lookup.spec or first.lookup.weights.data_ptr() != lookup.weights.data_ptr():
            raise RuntimeError(RESPECIFIED)
        elif first.keeper is not call.keeper:
            raise RuntimeError(DEFERRED)
        self._kept.append(_Kept.of(lookup, grad))

    def update(self) -> None:
        """One step of every touched row, on the current stream; or one to keep, for an optimizer that defers."""
        if self._call is None:
            return
        self._join_streams()
        merged, grad = merge([k.lookup for k in self._kept], [k.grad for k in self._kept])
        self._kept.clear()
        spec, device, weights = merged.spec, merged.weights.device, merged.per_sample_weights
        check_inputs(spec, device, merged.indices, merged.offsets, weights)
        # The backend of the forwards, by its name; what it is asked now may differ in dtypes and weights.
        backend, plan = policy.backend_for(
            spec, device, merged.indices.dtype, merged.offsets.dtype, weights is not None,
            f"accumulate() after forwards of backend |{merged.plan.backend}",
        )  # fmt: skip
        lookup = replace(merged, plan=plan)
        self._call.of(backend, lookup).update(grad, backend.prepare(lookup))

    def _join_streams(self) -> None:
        """Backwards run on the streams of their forwards: wait for them, and hold what is theirs."""
        for kept in self._kept:
            if kept.stream is not None:
                here = torch.cuda.current_stream(kept.grad.device)
                if here != kept.stream:
                    here.wait_stream(kept.stream)
                    for tensor in kept.tensors():
                        tensor.record_stream(here)


class Accumulator:
    """A module's place for its block. A copy of the module, or a pickled one, starts outside of any."""

    def __init__(self) -> None:
        self.block: Block | None = None

    def __reduce__(self) -> tuple[type[Accumulator], tuple[()]]:
        return Accumulator, ()

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Keep backwards until the end of the block, then update once; if the block raises, not at all."""
        if self.block is not None:
            raise RuntimeError(NESTED)
        block = self.block = Block()
        try:
            yield
        finally:
            self.block = None
        with torch.no_grad():
            block.update()


def merge(lookups: list[Lookup], grads: list[torch.Tensor]) -> tuple[Lookup, torch.Tensor]:
    """One lookup of all bags, and its gradient: a feature's bags are those of the first lookup, then the next's.

    ``lookups`` have one spec; their batch sizes, dtypes and whether they are weighted may differ. Only sizes are
    read on the host, so nothing synchronises.
    """
    first, features = lookups[0], lookups[0].spec.layout.features
    if len(lookups) == 1:
        return first, grads[0]
    lengths = [k.offsets.long().diff().view(features, k.batch).clamp(min=0) for k in lookups]
    ends = torch.cat(lengths, dim=1).flatten().cumsum(0)
    n = sum(k.indices.numel() for k in lookups)
    dtype = torch.int64 if any(k.offsets.dtype == torch.int64 for k in lookups) or n >= 2**31 else torch.int32
    indices, grad = torch.cat([k.indices for k in lookups]), torch.cat(grads)
    weights = None
    if any(k.per_sample_weights is not None for k in lookups):
        weights = torch.cat([_weights_of(k) for k in lookups])
    if n:
        source = _sources(lookups, lengths, n)
        indices = indices[source]
        weights = None if weights is None else weights[source]
        grad = grad[source] if first.spec.pooling == "none" else grad
    merged = replace(first, indices=indices, offsets=F.pad(ends, (1, 0)).to(dtype), per_sample_weights=weights)
    return merged, grad


def _weights_of(lookup: Lookup) -> torch.Tensor:
    if lookup.per_sample_weights is not None:
        return lookup.per_sample_weights
    return torch.ones(lookup.indices.numel(), device=lookup.indices.device)


def _sources(lookups: list[Lookup], lengths: list[torch.Tensor], n: int) -> torch.Tensor:
    """``[N]``: of each merged position, its position among the concatenated ones."""
    base, starts = 0, []
    for lookup in lookups:
        features, batch = lookup.spec.layout.features, lookup.batch
        at = lookup.offsets[:-1:batch] if batch else lookup.offsets.new_zeros(features)
        starts.append(at.long() + base)
        base += lookup.indices.numel()
    counts = torch.stack([part.sum(1) for part in lengths], dim=1).flatten()
    ends, position = counts.cumsum(0), torch.arange(n, device=counts.device)
    # Clamped: bad offsets, which a GPU reads as empty bags, must not reach past the ids.
    piece = torch.searchsorted(ends, position, right=True).clamp(max=counts.numel() - 1)
    shift = torch.stack(starts, dim=1).flatten() - (ends - counts)
    return (position + shift[piece]).clamp(0, n - 1)
