"""TorchRec's planner with this library's measured speeds in place of its own constants."""

from __future__ import annotations

from typing import Any

from torchrec.distributed.planner.estimator.annotations import backward_compute, forward_compute
from torchrec.distributed.planner.estimator.estimator import (
    EmbeddingPerfEstimator,
    EmbeddingPerfEstimatorFactory,
)
from torchrec.distributed.planner.estimator.types import HardwarePerfConfig

from .figures import GRADIENT, H200, Figures

NAME = "tbe_h200"
"""Under which the configuration is registered with TorchRec's ``EmbeddingPerfEstimatorFactory``."""
_MS = 1e-3  # TorchRec's planner counts in milliseconds


def config(figures: Figures) -> type[Any]:
    """TorchRec's description of a device whose kernels run at ``figures``.

    What a shard moves is counted as the figures count it: every lookup's row, in the table's dtype. Communication
    is left to the topology's bandwidths and TorchRec's formulas.
    """

    class MeasuredPerfConfig(HardwarePerfConfig):  # type: ignore[misc, unused-ignore]
        name = f"{NAME}:{figures.workload}"
        # Outputs are fp32 where the sharder asks for nothing else; TorchRec would assume the tables' dtype.
        _default_output_data_type_size = float(GRADIENT)

        def _ranks(self, ctx: Any) -> int:
            """Whose samples a shard serves: with a copy of the table on every rank, its own."""
            ranks: int = 1 if ctx.sharding_type == "data_parallel" else ctx.world_size
            return ranks

        def _lookups(self, ctx: Any) -> float:
            """Lookups that reach the shard in a step, of all ranks; a row-wise shard sees its part of them."""
            shared = ctx.world_size if ctx.sharding_type == "row_wise" else 1
            shared = ctx.intra_group_size if ctx.sharding_type in ("table_row_wise", "grid_shard") else shared
            lookups: float = ctx.batch_inputs * self._ranks(ctx) / shared
            return lookups

        @forward_compute()  # type: ignore[misc, untyped-decorator, unused-ignore]
        def forward(self, ctx: Any) -> float:
            a_lookup = ctx.emb_dim * ctx.table_data_type_size + ctx.input_data_type_size
            output = ctx.batch_outputs * self._ranks(ctx) * ctx.emb_dim * ctx.output_data_type_size
            size = self._lookups(ctx) * a_lookup + output
            return float(size / (figures.forward_speed * _MS))

        @backward_compute()  # type: ignore[misc, untyped-decorator, unused-ignore]
        def backward(self, ctx: Any) -> float:
            a_lookup = ctx.emb_dim * (ctx.output_data_type_size + 2 * ctx.table_data_type_size)
            return float(self._lookups(ctx) * a_lookup / (figures.update_speed * _MS))

    return MeasuredPerfConfig


EmbeddingPerfEstimatorFactory.register(NAME)(config(H200["uniform_10m"]))


def estimator(topology: Any, constraints: Any = None, figures: Figures = H200["uniform_10m"]) -> Any:
    """TorchRec's ``EmbeddingPerfEstimator`` at these figures, for ``EmbeddingEnumerator(estimator=[...])``.

    Args:
        topology: TorchRec's ``Topology``.
        constraints: table name to ``ParameterConstraints``, the same that the planner gets.
        figures: one of ``H200``, or of your own device.
    """
    return EmbeddingPerfEstimator(topology=topology, constraints=constraints, config=config(figures)())
