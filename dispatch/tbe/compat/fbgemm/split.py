"""FBGEMM_GPU's fused module over this library's operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tbe.init import UNWRITTEN
from tbe.module import TableBatchedEmbeddingBags
from tbe_core.optimizers import StateKind

from . import arguments, inputs, optimizers, preallocated, state
from .enums import (
    BoundsCheckMode,
    CacheAlgorithm,
    OptimType,
    PoolingMode,
    RecordCacheMetrics,
    SparseType,
    WeightDecayMode,
    member,
)


class Tables(TableBatchedEmbeddingBags):
    """The operator inside the drop-in, which writes and reads its checkpoints."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(self, *args: Any) -> None:
        pass


class SplitTableBatchedEmbeddingBagsCodegen(nn.Module):
    """``fbgemm_gpu``'s module of this name, served by this library's backends.

    Constructor, call, methods and checkpoints are FBGEMM_GPU's; ``docs/fbgemm.md`` lists what is served and what
    differs. Tables live whole in the memory of their device, so ``cache_*``, ``enforce_hbm``,
    ``prefetch_pipeline``, ``uvm_host_mapped`` and ``use_experimental_tbe`` have no effect, and neither has
    ``embedding_shard_info``. Stochastic rounding is a GPU's alone, as there.

    Args:
        embedding_specs: ``(rows, dim, EmbeddingLocation, ComputeDevice)`` a table; ``HOST`` with ``CPU`` or
            ``DEVICE`` with ``CUDA``. Any dim >= 1.
        feature_table_map: T table numbers, one a feature. Default: one feature a table.

    Raises:
        NotImplementedError: an argument asks for what is not provided; the message names it and its value.
        ValueError: an argument is wrong; likewise.

    ``tables`` is the operator itself, with everything that this library has beyond FBGEMM_GPU.
    """

    def __init__(
        self,
        embedding_specs: Sequence[tuple[int, int, Any, Any]],
        feature_table_map: Sequence[int] | None = None,
        cache_algorithm: Any = CacheAlgorithm.LRU,
        cache_load_factor: float = 0.2,
        cache_sets: int = 0,
        cache_reserved_memory: float = 0.0,
        cache_precision: Any = None,
        weights_precision: Any = SparseType.FP32,
        output_dtype: Any = SparseType.FP32,
        enforce_hbm: bool = False,
        optimizer: Any = OptimType.EXACT_SGD,
        record_cache_metrics: RecordCacheMetrics | None = None,
        gather_uvm_cache_stats: bool | None = False,
        stochastic_rounding: bool = True,
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
        max_norm: float = 0.0,
        learning_rate: float = 0.01,
        eps: float = 1.0e-8,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        weight_decay_mode: Any = WeightDecayMode.NONE,
        eta: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        ensemble_mode: Any = None,
        emainplace_mode: Any = None,
        counter_based_regularization: Any = None,
        cowclip_regularization: Any = None,
        pooling_mode: Any = PoolingMode.SUM,
        device: str | int | torch.device | None = None,
        bounds_check_mode: Any = BoundsCheckMode.WARNING,
        uvm_non_rowwise_momentum: bool = False,
        use_experimental_tbe: bool = False,
        prefetch_pipeline: bool = False,
        stats_reporter_config: Any = None,
        table_names: list[str] | None = None,
        optimizer_state_dtypes: Mapping[str, Any] | None = None,
        multipass_prefetch_config: Any = None,
        global_weight_decay: Any = None,
        uvm_host_mapped: bool = False,
        extra_optimizer_config: Any = None,
        tbe_input_multiplexer_config: Any = None,
        embedding_table_index_type: torch.dtype = torch.int64,
        embedding_table_offset_type: torch.dtype = torch.int64,
        embedding_shard_info: Any = None,
        enable_raw_embedding_streaming: bool = False,
        res_params: Any = None,
        is_qr_tbe: bool = False,
        preallocated_host_buffers: Any = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        super().__init__()
        arguments.refuse_unsupported(given)
        placed = arguments.placed(embedding_specs, table_names, device)
        self.embedding_specs, self.table_names = list(embedding_specs), table_names
        self.dims = [table.dim for table in placed.tables]
        self.feature_table_map = arguments.checked_map(feature_table_map, len(placed.tables))
        self.optimizer, self.pooling_mode = optimizer, pooling_mode
        self.weights_precision, self.weight_decay_mode = weights_precision, weight_decay_mode
        self.stochastic_rounding = stochastic_rounding
        self.location, self.current_device = placed.location, placed.device
        self.use_cpu = placed.device.type == "cpu"
        self._mode = arguments.bounds_mode(bounds_check_mode)
        for name in ("embedding_table_index_type", "embedding_table_offset_type"):
            if given[name] not in (torch.int32, torch.int64):
                raise ValueError(f"{name}={given[name]!r}: expected torch.int32 or torch.int64")
        self.embedding_table_index_type = embedding_table_index_type
        self.embedding_table_offset_type = embedding_table_offset_type
        self.optimizer_args = optimizers.OptimizerArgs(
            **{name: given[name] for name in optimizers.OptimizerArgs._fields}
        )
        dtype = arguments.dtype_of("weights_precision", weights_precision)
        pooling = member(PoolingMode, "pooling_mode", pooling_mode)
        self.output_dtype = member(SparseType, "output_dtype", output_dtype).as_int()
        self.is_nobag = pooling is PoolingMode.NONE
        options: dict[str, Any] = {"gradient_clipping": max_gradient} if gradient_clipping else {}
        self.tables = Tables(
            placed.tables,
            self.feature_table_map,
            arguments.POOLING[pooling],
            optimizer=optimizers.make(optimizer, learning_rate, self.optimizer_args),
            weights_dtype=dtype,
            output_dtype=arguments.dtype_of("output_dtype", output_dtype),
            bounds_check="none",
            device=placed.device,
            stochastic_rounding=stochastic_rounding and not self.use_cpu and dtype != torch.float32,
            init=UNWRITTEN,
            **options,
        )
        layout = self.tables.spec.layout
        self.total_D, self.max_D = layout.output_width, max(self.dims)
        for name, kept in (("bounds_check_warning", True), ("bad_values", False)):
            self.register_buffer(name, torch.zeros(1, dtype=torch.int64, device=placed.device), persistent=kept)
        described = state.structure(layout, self.tables.spec.optimizer, dtype, placed.location)
        self._described = tuple(described)
        for name, value in described.items():
            # FBGEMM_GPU keeps this one on the host.
            self.register_buffer(name, value if name == "feature_dims" else value.to(placed.device))

    @property
    def bounds_check_mode_int(self) -> int:
        return self._mode.value

    def __getattr__(self, name: str) -> Any:
        """Also ``weights_dev``, ``momentum1_host``, ``iter``, ...: FBGEMM_GPU's tensors, to be written through.

        Raises ``AttributeError`` where the storage has not FBGEMM_GPU's order, so that one would be a copy.
        """
        if name.startswith(("weights_", "momentum")) or name in ("iter", "placeholder_autograd_tensor"):
            if name in self._buffers or name not in (found := self._flat_state()):
                return super().__getattr__(name)
            kind: StateKind = "row" if found[name].numel() == self.tables.spec.layout.total_rows else "element"
            if name.startswith(("weights_", "momentum")) and not state.in_order(self.tables.spec.layout, kind):
                raise AttributeError(
                    f"{name}: tables of different dims are not one tensor here; use split_embedding_weights() "
                    "or split_optimizer_states()"
                )
            return found[name]
        return super().__getattr__(name)

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
        feature_requires_grad: torch.Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        total_unique_indices: int | None = None,
        hash_zch_identities: torch.Tensor | None = None,
        hash_zch_runtime_meta: torch.Tensor | None = None,
        vbe_output: torch.Tensor | None = None,
        vbe_output_offsets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look up and pool; the backward steps the tables.

        Args:
            indices: ``[N]`` int32 or int64. By ``bounds_check_mode``, bad ids are set to 0 in this very tensor.
            offsets: ``[T*B+1]``, feature-major; mended in place likewise, if it has the dtype of indices.
            per_sample_weights: ``[N]`` or None.
            feature_requires_grad: ``[T]``; where zero, the feature's weights get no gradient.
            batch_size_per_feature_per_rank: ``[T][R]`` ints on the host.
            total_unique_indices: without effect; FBGEMM_GPU reads it for ``OptimType.NONE`` alone.
            hash_zch_identities, hash_zch_runtime_meta: without effect; read for embedding streaming alone.
            vbe_output, vbe_output_offsets: with variable batches, a tensor to write the output into, and
                ``[R, T]`` int64, where each rank's and feature's part begins in it. It is what is returned.

        Returns:
            ``[B, total_D]``; ``[N, D]`` without pooling; flat with ``batch_size_per_feature_per_rank``.

        Raises:
            RuntimeError: a bad id or offset in mode FATAL; nothing has been changed.
            ValueError: an input is wrong; likewise.
        """
        sizes, spec, device = batch_size_per_feature_per_rank, self.tables.spec, self.tables.weights.device
        into = preallocated.check(
            vbe_output, vbe_output_offsets, sizes, spec.layout.features, spec.output_dtype, device
        )
        indices, offsets, weights = self._checked(indices, offsets, per_sample_weights, sizes)
        options: dict[str, Any] = {}
        if sizes is not None:
            options["batch_size_per_feature_per_rank"] = sizes
        if feature_requires_grad is not None and weights is not None:
            options["feature_requires_grad"] = feature_requires_grad
        out: torch.Tensor = self.tables(indices, offsets, weights, **options)
        return out if into is None else preallocated.place(out, spec.layout.feature_dims, *into)

    def _checked(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        sizes: inputs.Sizes | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        indices, offsets, weights = inputs.cast(indices, offsets, weights, self.embedding_table_index_type)
        ends = inputs.bag_ends(len(self.feature_table_map), offsets, sizes)
        if weights is not None and weights.numel() != indices.numel():
            raise ValueError(
                f"per_sample_weights has length {weights.numel()}: expected {indices.numel()}, one for "
                "every index"
            )
        if indices.device != self.tables.weights.device:
            raise ValueError(f"indices is on {indices.device}: expected {self.tables.weights.device}")
        if offsets.device != indices.device:
            raise ValueError(f"offsets is on {offsets.device}: expected {indices.device}")
        buffers: dict[str, Any] = self._buffers
        rows, counter, total = (buffers[n] for n in ("rows_per_table", "bounds_check_warning", "bad_values"))
        indices, offsets = inputs.check(self._mode, indices, offsets, ends, rows, counter, total)
        indices, offsets = indices.contiguous(), offsets.contiguous()
        indices, offsets, weights = inputs.without_lead(indices, offsets, weights, not self.is_nobag)
        return indices, offsets, None if weights is None else weights.contiguous()

    def prefetch(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        forward_stream: torch.cuda.Stream | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
    ) -> None:
        """The bounds check of ``forward``, ahead of it, and no more: every row is in device memory already."""
        self._checked(indices, offsets, None, batch_size_per_feature_per_rank)

    def flush(self) -> None:
        """No row is held anywhere but in its table. On a GPU, mode WARNING tells here what it mended since."""
        bad = self.get_buffer("bad_values")
        if bad.device.type != "cpu" and (found := int(bad)):
            bad.zero_()
            inputs.report(found, 3)

    def reset_cache_states(self) -> None:
        """Nothing: no row is held anywhere but in its table."""

    @torch.no_grad()
    def init_embedding_weights_uniform(self, min_val: float, max_val: float) -> None:
        """Fill every table with uniform random numbers in ``[min_val, max_val)``."""
        for weight in self.split_embedding_weights():
            weight.uniform_(min_val, max_val)

    def split_embedding_weights(self) -> list[torch.Tensor]:
        """The tables, ``[rows, dim]`` views in table order."""
        return self.tables.split_embedding_weights()

    def split_optimizer_states(self) -> list[list[torch.Tensor]]:
        """Per table: views of its states, ``momentum1`` first, ``[rows]`` or ``[rows, dim]``. SGD: ``[]``."""
        split = [list(of_table.values()) for of_table in self.tables.split_optimizer_states()]
        return split if any(split) else []

    def get_optimizer_state(self) -> list[dict[str, torch.Tensor]]:
        """Per table: ``sum``, ``exp_avg``, ``exp_avg_sq`` or ``momentum_buffer`` to a view. SGD: ``[]``."""
        split = self.tables.split_optimizer_states()
        return split if any(split) else []

    def get_optimizer_buffer(self, state: str) -> torch.Tensor:
        """A state or buffer by its name in a checkpoint; raises ``ValueError`` for an unknown one."""
        found = {**dict(self.named_buffers(recurse=False)), **self._flat_state()}
        if state not in found:
            raise ValueError(f"state={state!r}: expected one of {', '.join(found)}")
        return found[state]

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate."""
        self.tables.set_hyper(lr=lr)

    def get_learning_rate(self) -> float:
        """The present learning rate, as fp32 has it."""
        return float(self.tables.hyper[0])

    def update_hyper_parameters(self, params_dict: Mapping[str, float]) -> None:
        """Change ``lr, eps, beta1, beta2, weight_decay``; one that the optimizer does not read has no effect.

        Raises:
            NotImplementedError: another name; nothing has been changed.
            ValueError: a bad value; likewise.
        """
        for name, value in params_dict.items():
            if name not in optimizers.UPDATABLE:
                why = "this hyper-parameter cannot be changed"
                raise arguments.refuse(name, value, why, f"one of {', '.join(optimizers.UPDATABLE)}")
        self.tables.set_hyper(**optimizers.effective(self.tables.spec.optimizer, params_dict))
        given: dict[str, Any] = {name: value for name, value in params_dict.items() if name != "lr"}
        self.optimizer_args = self.optimizer_args._replace(**given)

    def set_optimizer_step(self, step: int) -> None:
        """Set how many steps the optimizer has made; without effect for one that does not count them."""
        if self.tables.counter is not None:
            self.tables.counter[0] = step

    def _flat_state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds beyond this module's buffers."""
        tables, suffix = self.tables, arguments.LOCATIONS[self.location]
        layout, optimizer = tables.spec.layout, tables.spec.optimizer
        found = {"placeholder_autograd_tensor": tables.hook.detach()}
        weights = self.split_embedding_weights()
        found[f"weights_{suffix}"] = state.flat(layout, "element", tables.weights, weights)
        split = self.split_optimizer_states()
        for nth, (name, kind) in enumerate(state.moments(optimizer).items()):
            views = [of_table[nth] for of_table in split]
            found[f"{name}_{suffix}"] = state.flat(layout, kind, tables.states[nth], views)
        if optimizer.COUNTS_STEPS and tables.counter is not None:
            found["iter"] = tables.counter[:1]
        return found

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        base: Any = super()
        base._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in self._flat_state().items():
            destination[prefix + name] = value

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
        kept = (*self._described, "bounds_check_warning")
        mine = {**{name: self.get_buffer(name) for name in kept}, **self._flat_state()}
        missing_keys += [prefix + name for name in mine if prefix + name not in state_dict]
        unexpected_keys += [
            key for key in state_dict if key.startswith(prefix) and key.removeprefix(prefix) not in mine
        ]
        found = {name: state_dict[prefix + name] for name in mine if prefix + name in state_dict}
        errors = [wrong for name, value in found.items() if (wrong := self._mismatch(name, mine[name], value))]
        error_msgs += [prefix + error for error in errors]
        if not errors:
            self._write({name: value for name, value in found.items() if name not in self._described})

    def _mismatch(self, name: str, mine: torch.Tensor, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor):
            return f"{name} is a {type(value).__name__}: expected a tensor"
        if value.shape != mine.shape:
            return f"{name} is {list(value.shape)}: expected {list(mine.shape)}"
        if name in self._described and not torch.equal(value.to(mine.device), mine):
            return f"{name}={value.tolist()}: expected {mine.tolist()}, a checkpoint of the same tables"
        return None

    @torch.no_grad()
    def _write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take what ``_flat_state`` or ``bounds_check_warning`` is in a checkpoint."""
        tables, suffix = self.tables, arguments.LOCATIONS[self.location]
        layout = tables.spec.layout
        split = self.split_optimizer_states()
        places: dict[str, tuple[StateKind, list[torch.Tensor]]] = {}
        places[f"weights_{suffix}"] = ("element", self.split_embedding_weights())
        for nth, (name, kind) in enumerate(state.moments(tables.spec.optimizer).items()):
            places[f"{name}_{suffix}"] = (kind, [of_table[nth] for of_table in split])
        for name, value in values.items():
            if name in places:
                kind, views = places[name]
                for view, piece in zip(views, state.unflatten(layout, kind, value), strict=True):
                    view.copy_(piece)
            elif name == "iter" and tables.counter is not None:
                tables.counter[:1] = value
            elif name == "bounds_check_warning":
                self.get_buffer(name).copy_(value)

    def extra_repr(self) -> str:
        return f"optimizer={self.optimizer}, bounds_check_mode={self._mode.name}, {self.location.name}"
