"""Where this library takes FBGEMM_GPU's place inside TorchRec, and how it is taken out again."""

from __future__ import annotations

import importlib
from types import TracebackType
from typing import Any

MODULE = "torchrec.distributed.batched_embedding_kernel"
"""TorchRec's module that makes FBGEMM_GPU's training modules; every other one of it only asks ``isinstance``."""
FULLY_SHARDED = ("ShardedBatchedFusedEmbedding", "ShardedBatchedFusedEmbeddingBag")

_installed: list[Installation] = []


class Installation:
    """What ``install`` changed. ``close()``, or leaving the ``with`` block, undoes it."""

    def __init__(self, original: dict[str, tuple[Any, Any]]) -> None:
        self._original = original

    @property
    def active(self) -> bool:
        """Whether TorchRec makes its kernels over this library because of this call."""
        return self in _installed

    def close(self) -> None:
        """TorchRec makes FBGEMM_GPU's modules again; modules that were made meanwhile go on as they are.

        Closing twice does nothing.

        Raises:
            RuntimeError: a later ``install()`` has not been closed yet.
        """
        if not self.active:
            return
        if _installed[-1] is not self:
            raise RuntimeError("close(): a later install() has not been closed, expected the last one first")
        for name, (owner, value) in self._original.items():
            setattr(owner, name, value)
        _installed.remove(self)

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _refuse_fully_sharded(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(
        "sharding_strategy=FULLY_SHARDED is not supported: it frees the tables between forward and backward; "
        "expected ShardingStrategy.DEFAULT or PER_MODULE"
    )


def install() -> Installation:
    """Let TorchRec build its compute kernels ``FUSED`` and ``DENSE`` over this library.

    It acts on models that are sharded while it is in force: by ``DistributedModelParallel``, a sharder or
    ``shard``. Sharding, collectives, planner and optimizer stay TorchRec's. Use it as a context manager, or keep
    the result and ``close()`` it; calls may be nested.

    Raises:
        ImportError: torchrec or fbgemm_gpu is missing, or is of a version without the names that are replaced.
    """
    try:
        kernel = importlib.import_module(MODULE)
        lookup = importlib.import_module("torchrec.distributed.embedding_lookup")
        from . import kernels
    except ImportError as error:
        raise ImportError(
            f"tbe.compat.torchrec needs torchrec and fbgemm_gpu: {error}; see docs/torchrec.md for how to install"
        ) from error
    wanted = [(kernel, name, value) for name, value in kernels.REPLACED.items()]
    wanted += [(lookup, name, _refuse_fully_sharded) for name in FULLY_SHARDED]
    missing = [f"{owner.__name__}.{name}" for owner, name, _ in wanted if not hasattr(owner, name)]
    if missing:
        raise ImportError(f"torchrec has no {', '.join(missing)}: expected version 1.8, see docs/torchrec.md")
    done = Installation({name: (owner, getattr(owner, name)) for owner, name, _ in wanted})
    for owner, name, value in wanted:
        setattr(owner, name, value)
    _installed.append(done)
    return done
