"""The drop-in's modules as TorchRec knows them: instances of FBGEMM_GPU's classes, with what TorchRec reads.

TorchRec asks ``isinstance`` in many places, and of modules made before ``install()`` and after it was undone too.
So these classes have FBGEMM_GPU's among their bases, for that question alone: nothing of its code runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fbgemm_gpu.split_table_batched_embeddings_ops_training as training
from torch import nn

import tbe.compat.fbgemm as compat
from tbe.compat.fbgemm.arguments import LOCATIONS
from tbe.compat.fbgemm.state import starts


def _refusing(name: str) -> Callable[..., Any]:
    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name}() is not supported by {type(self).__name__} of tbe: docs/fbgemm.md")

    return refused


def _bare(theirs: Any, ours: type) -> Any:
    """A base between ours and theirs: sets up a plain module, and refuses methods that only theirs has."""
    only_theirs = [
        name
        for name, value in vars(theirs).items()
        if not name.startswith("__") and (callable(value) or isinstance(value, staticmethod | property))
        if not hasattr(ours, name)
    ]
    members: dict[str, Any] = {name: _refusing(name) for name in only_theirs}
    members["__init__"] = lambda self: nn.Module.__init__(self)
    return type(f"Bare{theirs.__name__}", (theirs,), members)


_BareSplit = _bare(training.SplitTableBatchedEmbeddingBagsCodegen, compat.SplitTableBatchedEmbeddingBagsCodegen)
_BareDense = _bare(training.DenseTableBatchedEmbeddingBagsCodegen, compat.DenseTableBatchedEmbeddingBagsCodegen)


class SplitTableBatchedEmbeddingBagsCodegen(compat.SplitTableBatchedEmbeddingBagsCodegen, _BareSplit):  # type: ignore[misc, valid-type]
    """The module inside TorchRec's fused kernels; arguments are those of ``tbe.compat.fbgemm``'s."""

    @property
    def weights_physical_offsets(self) -> list[int]:
        """Per table: its first element in ``weights_host`` or ``weights_dev``."""
        return list(self.tables.spec.layout.element_bases)

    def __getattr__(self, name: str) -> Any:
        """``weights_host`` or ``weights_dev`` is the storage as it is, whatever the tables' order."""
        held = name in ("weights_host", "weights_dev") and "tables" in self._modules
        if held and name == f"weights_{LOCATIONS[self.location]}":
            return self.tables.weights
        return super().__getattr__(name)


class DenseTableBatchedEmbeddingBagsCodegen(compat.DenseTableBatchedEmbeddingBagsCodegen, _BareDense):  # type: ignore[misc, valid-type]
    """The module inside TorchRec's dense kernels; arguments are those of ``tbe.compat.fbgemm``'s."""

    @property
    def weights_physical_offsets(self) -> list[int]:
        """Per table: its first element in ``weights``."""
        return starts(self.spec.layout, "element")[:-1]


def stand_in(theirs: Any, ours: Any) -> Any:
    """A class in place of ``theirs``: makes an instance of ours, and is to ``isinstance`` what theirs is."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return ours(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, theirs)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, theirs)

    return Meta(theirs.__name__, (theirs,), {"__doc__": f"Makes {ours.__module__}.{ours.__name__}."})


REPLACED: dict[str, Any] = {
    ours.__name__: stand_in(theirs, ours)
    for theirs, ours in (
        (training.SplitTableBatchedEmbeddingBagsCodegen, SplitTableBatchedEmbeddingBagsCodegen),
        (training.DenseTableBatchedEmbeddingBagsCodegen, DenseTableBatchedEmbeddingBagsCodegen),
    )
}
"""What takes the place of FBGEMM_GPU's classes where TorchRec makes its kernels, by name."""


def served(model: nn.Module) -> list[Any]:
    """The modules of this library inside a sharded model, for a look at their ``tables``.

    TorchRec keeps its lookups out of ``model.modules()``: this finds them there.
    """
    kinds = (SplitTableBatchedEmbeddingBagsCodegen, DenseTableBatchedEmbeddingBagsCodegen)
    lookups = [lookup for module in model.modules() for lookup in getattr(module, "_lookups", ())]
    found = [m for root in (model, *lookups) for m in root.modules() if isinstance(m, kinds)]
    return list({id(module): module for module in found}.values())
