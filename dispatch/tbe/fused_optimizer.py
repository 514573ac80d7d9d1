"""A torch optimizer's view of the optimizers that are fused into the backward: for schedulers and scalers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from . import hyper
from .deferred import Deferred
from .module import TableBatchedEmbeddingBags


class HyperGroup(dict[str, Any]):
    """A param group whose hyper-parameters are the module's: writing one reaches the device at once.

    Reading sees what ``set_hyper`` or ``load_state_dict`` of the module wrote. Other keys, such as a
    scheduler's ``initial_lr``, are the group's own. ``copy()`` is a plain dict.
    """

    def __init__(self, module: TableBatchedEmbeddingBags, others: Mapping[str, Any]) -> None:
        self._module = module
        super().__init__(others)
        self._refresh()

    def _refresh(self) -> None:
        for name, value in hyper.present(self._module).items():
            super().__setitem__(name, value)

    def __getitem__(self, key: str) -> Any:
        self._refresh()
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def update(self, *others: Any, **more: Any) -> None:
        """Write several values; a refused hyper-parameter leaves all as they were."""
        values = dict(*others, **more)
        own = hyper.present(self._module)
        self._module.set_hyper(**{name: value for name, value in values.items() if name in own})
        for name in values.keys() - own.keys():
            super().__setitem__(name, values[name])

    def __ior__(self, other: Any) -> HyperGroup:  # type: ignore[override,misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            super().__setitem__(key, default)
        return self[key]

    def get(self, key: str, default: Any = None) -> Any:
        self._refresh()
        return super().get(key, default)

    def items(self) -> Any:
        self._refresh()
        return super().items()

    def values(self) -> Any:
        self._refresh()
        return super().values()

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # defined, so that dict(group) and {**group} read through __getitem__

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __repr__(self) -> str:
        return repr(self.copy())

    def __eq__(self, other: object) -> bool:
        return self.copy() == (other.copy() if isinstance(other, HyperGroup) else other)

    __hash__ = None

    def _keep(self, key: str) -> None:
        if key in hyper.present(self._module):
            raise ValueError(f"{key!r} cannot be removed: it is a hyper-parameter of the fused optimizer")

    def __delitem__(self, key: str) -> None:
        self._keep(key)
        super().__delitem__(key)

    def pop(self, key: str, *default: Any) -> Any:
        self._keep(key)
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        raise ValueError("a param group of a FusedOptimizer cannot be emptied")

    def clear(self) -> None:
        raise ValueError("a param group of a FusedOptimizer cannot be emptied")

    def __reduce__(self) -> tuple[Any, ...]:
        own = hyper.present(self._module)
        return HyperGroup, (self._module, {k: v for k, v in self.items() if k not in own})


class FusedOptimizer(Optimizer):
    """The fused optimizer of one module, or of several, as a ``torch.optim.Optimizer``: one param group each.

    A group has every hyper-parameter by its name (``lr``, ``eps``, ...; ``beta1`` and ``beta2`` also as torch's
    ``betas``), so any ``torch.optim.lr_scheduler`` works on it. The backward has stepped the tables already:
    ``step()`` changes nothing then, and is what schedulers expect to be called before them.

    Args:
        modules: a module or a sequence of modules, already on their device.
        defer: keep the backward's work until ``step()``, as ``torch.amp.GradScaler`` needs: ``scaler.step()``
            then unscales the gradients and, where one is infinite or NaN, updates nothing, without waiting for
            the device. ``zero_grad()`` drops what is kept.
        watch: with ``defer`` and a scaler, parameters whose gradients decide too: the tables are left alone
            when one of them is infinite or NaN.

    Raises:
        ValueError: no module, a module given twice, one that another optimizer defers, or ``watch`` without
            ``defer``.
    """

    # Asks GradScaler to hand over its scale and its finding as tensors instead of reading them on the host.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        modules: TableBatchedEmbeddingBags | Sequence[TableBatchedEmbeddingBags],
        *,
        defer: bool = False,
        watch: Iterable[torch.Tensor] = (),
    ) -> None:
        given = [modules] if isinstance(modules, TableBatchedEmbeddingBags) else list(modules)
        self._watched = list(watch)
        _check(given, defer, self._watched)
        self._modules = given
        self._deferred = [Deferred(m.weights.device) for m in given] if defer else []
        first = hyper.present(given[0])
        shared = {k: v for k, v in first.items() if all(k in hyper.present(m) for m in given)}
        super().__init__([{"params": self._parameters(i)} for i in range(len(given))], shared)
        self.param_groups = [
            HyperGroup(module, {k: v for k, v in group.items() if k not in shared})
            for module, group in zip(given, self.param_groups, strict=True)
        ]
        self._link()

    def _parameters(self, at: int) -> list[torch.Tensor]:
        return [self._modules[at].weights, *(d.probe for d in self._deferred[at : at + 1])]

    def _link(self) -> None:
        for module, deferred in zip(self._modules, self._deferred, strict=bool(self._deferred)):
            module._deferred = deferred

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Used by torch while the optimizer is made; refused afterwards."""
        if len(self.param_groups) == len(self._modules):
            raise ValueError("add_param_group: expected every module when the FusedOptimizer is made")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call ``closure``, if any; then, with ``defer``, step what the backwards since the last step kept.

        Returns what the closure returned.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is not None and self._watched:
            found = found + sum((~p.grad.isfinite().all()).to(found) for p in self._watched if p.grad is not None)
        for deferred in self._deferred:
            deferred.step(scale, found)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """With ``defer``, drop what is kept and not stepped yet."""
        for deferred in self._deferred:
            deferred.clear()

    def __getstate__(self) -> dict[str, Any]:
        if any(d.calls for d in self._deferred):
            raise RuntimeError("a FusedOptimizer with work that is kept: expected step() or zero_grad() before")
        own = {name: getattr(self, name) for name in ("_modules", "_deferred", "_watched")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Torch calls this for unpickling, and from ``load_state_dict`` with plain groups."""
        groups = state["param_groups"]
        if not all(isinstance(group, HyperGroup) for group in groups):
            state = {**state, "param_groups": self._loaded(groups)}
        super().__setstate__(state)
        self._link()

    def _loaded(self, groups: list[dict[str, Any]]) -> list[HyperGroup]:
        """This optimizer's own groups with the values of ``groups``; nothing changes where one is refused."""
        own: list[HyperGroup] = self.param_groups  # type: ignore[assignment]
        for at, (mine, theirs) in enumerate(zip(own, groups, strict=True)):
            names = hyper.present(mine._module)
            missing = [name for name in names if name not in theirs]
            if missing:
                raise ValueError(f"param_groups[{at}] has no {', '.join(missing)}: expected {', '.join(names)}")
            hyper.checked(mine._module, {k: v for k, v in theirs.items() if k in names})
        for mine, theirs in zip(own, groups, strict=True):
            mine.update({k: v for k, v in theirs.items() if k != "params"})
        return own


def _check(modules: list[TableBatchedEmbeddingBags], defer: bool, watched: list[torch.Tensor]) -> None:
    if not modules:
        raise ValueError("modules is empty: expected at least one TableBatchedEmbeddingBags")
    for at, module in enumerate(modules):
        if not isinstance(module, TableBatchedEmbeddingBags):
            raise ValueError(f"modules[{at}] is a {type(module).__name__}: expected a TableBatchedEmbeddingBags")
        if not module.spec.optimizer.STEPS:
            raise ValueError(
                f"modules[{at}] has NoOptimizer: expected a fused optimizer; give its parameters() to torch's"
            )
        if module in modules[:at]:
            raise ValueError(f"modules[{at}] is given twice: expected distinct modules")
        if defer and module._deferred is not None:
            raise ValueError(f"defer=True: modules[{at}] is deferred by another FusedOptimizer, expected one")
    if watched and not defer:
        raise ValueError("watch without defer=True: the backward steps the tables before it could decide")
