"""The front door: an nn.Module over the operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from tbe_core import Layout, Optimizer, Plan, Spec, Table, Training
from tbe_core.dtypes import STATE_DTYPE
from tbe_core.types import BoundsCheck, Pooling
from tbe_core.validate import check_inputs

from . import exported, module_state, ops, policy, sparse_gradients, vbe_ops
from . import hyper as hyper_parameters
from .accumulate import COMPILED, Accumulator
from .bounds import BadLookups
from .deferred import Deferred
from .eager import Call, TrainingLookup
from .init import DEFAULT_STD, UNWRITTEN, Init, Initialiser, fill_from, normal, per_table
from .options import checked_limit, mask_gradient, wants_gradient, with_frozen

NOT_COMPILED = "a module with FusedOptimizer(defer=True) inside torch.compile: expected an uncompiled call"


class TableBatchedEmbeddingBags(nn.Module):
    """Looks up and pools the ids of every feature at once; the backward steps the tables in place.

    T features over the tables, B bags a feature, N ids in all.

    Args:
        tables: the tables, with distinct names.
        feature_table_map: T table numbers, one a feature; features may share a table. Default: one feature a
            table, in order.
        pooling: ``"sum"``, ``"mean"`` (over the bag's length) or ``"none"`` (one row an id; one dim for all).
        optimizer: the fused optimizer, e.g. ``RowwiseAdagrad(lr=0.05)``; or ``NoOptimizer()``: tables are then
            parameters ``<table>.weight`` that get sparse gradients, for an optimizer of torch.
        weights_dtype: float32, float16 or bfloat16.
        output_dtype: float32, float16 or bfloat16; sums accumulate in fp32 and round once.
        bounds_check: ``"error"`` raises before anything is written (synchronises a GPU); ``"warn"`` counts bad
            ids, which contribute and train nothing, and warns when that costs no wait (a compiled module only
            in ``flush``); ``"ignore"`` is silent; ``"none"`` leaves bad input undefined.
        backend: a backend's name; refused with reasons where it cannot serve. Default: the best that can.
        device: where the tables live.
        deterministic: bitwise repeatable on one device. False allows an unfixed order of additions.
        stochastic_rounding: float16 and bfloat16 tables only: a stepped row is rounded to one of its two
            neighbours at random, so that small steps are not lost on average. Without: to nearest.
        rounding_seed: of its random numbers, which depend on seed, step, row and column alone.
        gradient_clipping: clamp every element of the output's gradient to [-x, x] before it is summed into rows
            or becomes a gradient of ``per_sample_weights``. Default: no clamp.
        init: what rows start from: one of ``tbe.init`` for all tables, or a mapping by table name. Default, for
            tables that are left out too: normal(0, 0.01).
        generator: of the random values, on ``device``. Default: torch's own.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and what was expected.
        BackendError: no backend, or not the one asked for, serves this problem; with every reason.

    Values may also be written through ``split_embedding_weights`` under ``no_grad``.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        feature_table_map: Sequence[int] | None = None,
        pooling: Pooling = "sum",
        *,
        optimizer: Optimizer,
        weights_dtype: torch.dtype = torch.float32,
        output_dtype: torch.dtype = torch.float32,
        bounds_check: BoundsCheck = "warn",
        backend: str | None = None,
        device: torch.device | str | None = None,
        deterministic: bool = True,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
        gradient_clipping: float | None = None,
        init: Init | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        layout = Layout.make(tables, feature_table_map)
        self.spec = Spec(
            layout, optimizer, pooling, weights_dtype, output_dtype, bounds_check, bool(deterministic),
            bool(stochastic_rounding), checked_limit(gradient_clipping),
        )  # fmt: skip
        if (
            isinstance(rounding_seed, bool)
            or not isinstance(rounding_seed, int)
            or not 0 <= rounding_seed < 2**63
        ):
            raise ValueError(f"rounding_seed={rounding_seed!r}: expected an integer in [0, 2**63)")
        self.requested_backend = backend
        where = torch.device(torch.get_default_device() if device is None else device)
        if where.type == "cuda" and where.index is None:
            where = torch.device("cuda", torch.cuda.current_device())
        policy.plan_for(self.spec.problem(), where, policy.request(backend))
        self._respecify(self.spec)
        self._bad_lookups, self._accumulator = BadLookups(), Accumulator()
        # By table name: what reset_rows draws again; None where that was a tensor.
        self._init: dict[str, Initialiser | None] = {}
        chosen = {} if init is None else per_table(init, layout.tables, weights_dtype)
        if init is None:
            weights = torch.empty(layout.total_elements, dtype=weights_dtype, device=where)
            weights.normal_(0, DEFAULT_STD, generator=generator)
        else:
            weights = torch.zeros(layout.total_elements, dtype=weights_dtype, device=where)
        self.weights: torch.Tensor
        if optimizer.STEPS:
            self.weights = nn.Parameter(weights, requires_grad=False)
        else:  # the parameters are its views
            self.register_buffer("weights", weights)
        if init is not None and init is not UNWRITTEN:
            self._initialise({t.name: chosen.get(t.name, normal()) for t in layout.tables}, generator)
        # The hook makes autograd call the backward: the tables themselves ask for no gradient.
        self.hook = nn.Parameter(torch.empty(0, dtype=STATE_DTYPE, device=where), requires_grad=optimizer.STEPS)
        for state in optimizer.STATE:
            length = layout.total_rows if state.kind == "row" else layout.total_elements
            self.register_buffer(f"state_{state.name}", torch.zeros(length, dtype=STATE_DTYPE, device=where))
        self.hyper: torch.Tensor
        hyper = torch.tensor(optimizer.hyper_values(), dtype=STATE_DTYPE, device=where)
        self.register_buffer("hyper", hyper)
        self.counter: torch.Tensor | None
        counter = torch.tensor([0, rounding_seed], device=where) if self.spec.counts_steps else None
        self.register_buffer("counter", counter)
        # In the host's precision; None where the value is known on the device only.
        self._hyper_values: list[float | None] = [*optimizer.hyper_values()]
        self._deferred: Deferred | None = None
        self.bad: torch.Tensor
        self.register_buffer("bad", torch.zeros(2, dtype=torch.int64, device=where), persistent=False)
        if not optimizer.STEPS:
            sparse_gradients.enter(self)

    @property
    def states(self) -> list[torch.Tensor]:
        """The flat optimizer states, in the order of the optimizer's ``STATE``."""
        buffers: dict[str, Any] = self._buffers  # get_buffer resolves a path, on every call
        return [buffers[f"state_{s.name}"] for s in self.spec.optimizer.STATE]

    @property
    def plan(self) -> Plan:
        """The plan for int64 ids, unweighted: the backend, its configuration and who was passed over."""
        return policy.plan_for(self.spec.problem(), self.weights.device, policy.request(self.requested_backend))

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
        *,
        feature_requires_grad: torch.Tensor | None = None,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """Look up and pool.

        Args:
            indices: ``[N]`` int32 or int64; -1 is a pruned id and is skipped.
            offsets: ``[T*B+1]`` int32 or int64, feature-major: bag (t, b) is
                ``indices[offsets[t*B+b] : offsets[t*B+b+1]]``.
            per_sample_weights: ``[N]`` factors, multiplied in fp32; differentiable.
            feature_requires_grad: ``[T]`` bool or numbers; where zero, the feature's ``per_sample_weights`` get
                the gradient 0. The tables train as without it.
            batch_size_per_feature_per_rank: ``[T][R]`` ints on the host: how many bags each feature has of each
                rank. ``offsets`` then has one entry a bag and one more, a feature's ranks in order.

        Returns:
            ``[B, sum of feature dims]``, feature t at its running column; ``[N, D]`` with pooling none; flat, by
            rank, feature, bag and element, with ``batch_size_per_feature_per_rank``.

        Raises:
            ValueError: an input is wrong; nothing has been changed.
        """
        if torch.compiler.is_exporting():
            return exported.forward(self, indices, offsets, per_sample_weights, batch_size_per_feature_per_rank)
        asked = policy.request(self.requested_backend)
        training = self._trains and self.hook.requires_grad and torch.is_grad_enabled()
        eager = not torch.compiler.is_compiling() and (
            self._deferred is not None or not torch._C._len_torch_dispatch_stack()
        )
        flatten = None
        if batch_size_per_feature_per_rank is not None:
            sizes = batch_size_per_feature_per_rank
            offsets, flatten = vbe_ops.enter(self._handle, self.weights.device, indices, offsets, sizes, eager)
        if not torch.compiler.is_compiling():
            check_inputs(self.spec, self.weights.device, indices, offsets, per_sample_weights)
        if feature_requires_grad is not None:
            per_sample_weights = mask_gradient(self.spec, offsets, per_sample_weights, feature_requires_grad)
        if not self.spec.optimizer.STEPS and not eager and torch.is_grad_enabled():
            if not torch.compiler.is_compiling():
                raise RuntimeError(sparse_gradients.DISPATCHED)
            self._check(indices, offsets, asked)
            out = sparse_gradients.lookup_uncompiled(self, indices, offsets, per_sample_weights, asked)
            return out if flatten is None else flatten(out)
        if eager:
            out = self._eager(indices, offsets, per_sample_weights, asked, training)
            return out if flatten is None else flatten(out)
        if training and self._accumulator.block is not None:
            raise RuntimeError(COMPILED)
        if training and self._deferred is not None:
            raise RuntimeError(NOT_COMPILED)
        self._check(indices, offsets, asked)
        out = torch.ops.tbe.lookup(
            self.weights, self.states, self.hyper, self.counter, self.hook, indices, offsets, per_sample_weights,
            self._handle, asked, training,
        )[0]  # fmt: skip
        return out if flatten is None else flatten(out)

    def _eager(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None,
        asked: str,
        training: bool,
    ) -> torch.Tensor:
        if self.spec.bounds_check != "none":
            self._check(indices, offsets, asked)
        if not self.spec.optimizer.STEPS:
            got: torch.Tensor = sparse_gradients.lookup(self, indices, offsets, per_sample_weights, asked)
            return got
        backend, lookup = policy.lookup_for(
            self.spec, self.weights.data, indices, offsets, per_sample_weights, asked
        )
        if not training and not wants_gradient(per_sample_weights):
            return backend.forward(lookup, False)[0]
        stepped = Training(tuple(self.states), self.hyper, self.counter) if training else None
        call = Call(backend, lookup, stepped, self._accumulator, self._deferred)
        apply: Any = TrainingLookup.apply
        out: torch.Tensor = apply(self.hook, per_sample_weights, call)
        return out

    def _check(self, indices: torch.Tensor, offsets: torch.Tensor, asked: str) -> None:
        mode = self.spec.bounds_check
        # On a GPU the kernels skip bad ids by themselves: "ignore" needs no launch for it.
        if mode == "none" or (mode == "ignore" and self.weights.device.type != "cpu"):
            return
        torch.ops.tbe.check(self.weights, indices, offsets, self.bad, self._handle, asked)
        if mode == "warn" and not torch.compiler.is_compiling():
            self._bad_lookups.poll(self.bad)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the frozen tables, in table order."""
        return tuple(self.spec.layout.tables[t].name for t in self.spec.frozen)

    def freeze(self, *names: str) -> None:
        """Step these tables no more: they are looked up as before, and rows and state keep their bits.

        Not part of a checkpoint, as ``requires_grad`` is not. Raises ``ValueError`` for a name of no table.
        """
        self._respecify(with_frozen(self.spec, names, True))

    def unfreeze(self, *names: str) -> None:
        """Let these tables train again. Raises ``ValueError`` for a name of no table."""
        self._respecify(with_frozen(self.spec, names, False))

    def _respecify(self, spec: Spec) -> None:
        self.spec, self._handle = spec, ops.register(spec)
        # Kept beside the spec: a compiled module reads it, and guards on it.
        self._trains = bool(spec.trained)

    def accumulate(self) -> AbstractContextManager[None]:
        """Micro-batches: keep the backwards of this block and step once at its end, as one large batch does.

        The block's lookups see the tables as they were before it. Where it raises, nothing is stepped.
        ``per_sample_weights`` get their gradients at each backward. Ids and output gradients are held until the
        end. Raises ``RuntimeError`` for a block inside a block, a compiled training call in it, and a backward
        after it of a lookup made in it.
        """
        if not self.spec.optimizer.STEPS:
            raise RuntimeError(sparse_gradients.ACCUMULATE)
        return self._accumulator.collect()

    def flush(self) -> None:
        """Wait for the device and report every bad id and offset counted so far."""
        self._bad_lookups.flush(self.bad)

    def set_hyper(self, **values: float | torch.Tensor) -> None:
        """Change hyper-parameters of the fused optimizer by name: ``lr``, ``eps``, ...

        Captured graphs and compiled models see them at their next step. A one-element tensor is copied, on a GPU
        without waiting and therefore unchecked. Raises ``ValueError`` for an unknown name or a bad value, and
        changes nothing then.
        """
        hyper_parameters.write(self, hyper_parameters.checked(self, values))

    def set_learning_rate(self, lr: float | torch.Tensor) -> None:
        """``set_hyper(lr=lr)``."""
        self.set_hyper(lr=lr)

    def split_embedding_weights(self) -> list[torch.Tensor]:
        """The tables, ``[rows, dim]`` views in table order."""
        return self._split(self.weights.detach())

    def split_optimizer_states(self) -> list[dict[str, torch.Tensor]]:
        """Per table: state name to a view, ``[rows]`` or ``[rows, dim]`` fp32."""
        split: list[dict[str, torch.Tensor]] = [{} for _ in self.spec.layout.tables]
        for spec, state in zip(self.spec.optimizer.STATE, self.states, strict=True):
            views = self._split(state) if spec.kind == "element" else self._split_rows(state)
            for into, view in zip(split, views, strict=True):
                into[spec.name] = view
        return split

    def reset_rows(
        self,
        table: str | int,
        ids: torch.Tensor | Sequence[int],
        init: Initialiser | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        """Start rows of a table anew: fresh weights, optimizer state zero. Waits for a GPU.

        Args:
            table: its name or number.
            ids: ``[n]`` int32 or int64, or a sequence; a row may be named twice.
            init: one of ``tbe.init``. Default: what the table was made with.
            generator: on the tables' device.

        Raises:
            ValueError: names the table or the first id that is wrong; nothing has been changed.
        """
        from .rows import reset_rows

        reset_rows(self, table, ids, init, generator)

    @torch.no_grad()
    def _initialise(self, chosen: Mapping[str, Initialiser], generator: torch.Generator | None) -> None:
        for table, view in zip(self.spec.layout.tables, self.split_embedding_weights(), strict=True):
            if (make := chosen.get(table.name)) is not None:
                fill_from(view, make, 0, generator)
                self._init[table.name] = make if make.repeatable else None

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        layout = self.spec.layout
        return [
            flat[base : base + t.rows * t.dim].view(t.rows, t.dim)
            for t, base in zip(layout.tables, layout.element_bases, strict=True)
        ]

    def _split_rows(self, flat: torch.Tensor) -> list[torch.Tensor]:
        layout = self.spec.layout
        return [flat[b : b + t.rows] for t, b in zip(layout.tables, layout.row_bases, strict=True)]

    def _named_views(self) -> dict[str, torch.Tensor]:
        return module_state.named_views(self)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, view in self._named_views().items():
            destination[prefix + name] = view

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        module_state.load(self, state_dict, prefix, missing_keys, unexpected_keys, error_msgs)

    def _apply(self, fn: Any, recurse: bool = True) -> TableBatchedEmbeddingBags:
        # Asked of empty tensors, so that a refusal leaves the module as it was.
        for what, dtype in (("tables", self.spec.weights_dtype), ("optimizer state", STATE_DTYPE)):
            probe = fn(torch.empty(0, dtype=dtype, device=self.weights.device))
            if probe.dtype != dtype:
                raise ValueError(
                    f"cannot convert {what} of {dtype} to {probe.dtype}: weights_dtype and output_dtype are set "
                    f"when the module is made, and state stays {STATE_DTYPE}; .to(device) moves the module"
                )
        policy.plan_for(self.spec.problem(), probe.device, policy.request(self.requested_backend))
        base: Any = super()
        with nullcontext() if self.spec.optimizer.STEPS else sparse_gradients.let_go(self):
            base._apply(fn, recurse)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        base: Any = super()
        base.__setstate__(state)
        self._handle = ops.register(self.spec)
        if not self.spec.optimizer.STEPS:
            sparse_gradients.link(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bad_lookups": self._bad_lookups.forked(), "_deferred": None}

    def extra_repr(self) -> str:
        layout, spec = self.spec.layout, self.spec
        return (
            f"{len(layout.tables)} tables, {layout.features} features, {layout.total_rows} rows, "
            f"D={','.join(map(str, layout.dims))}, pooling={spec.pooling}, {spec.optimizer}"
        )


def plan(emb: TableBatchedEmbeddingBags) -> Plan:
    """The plan of a module: which backend serves it and why the others do not."""
    return emb.plan
