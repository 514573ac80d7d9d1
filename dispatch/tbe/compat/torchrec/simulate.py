"""What TorchRec's planner expects of the tables of MLPerf's DLRM-DCNv2 on many GPUs, at the measured speeds.

    python -m tbe.compat.torchrec.simulate [--gpus 8] [--gpus 64]

Nothing is run on a GPU: it is arithmetic. docs/distributed.md says how far to trust it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer

from tbe.bench.workloads import select

from .figures import H200, Figures

GIB, GB = 1024**3, 1e9
MEMORY = 141 * GB
"""Bytes of an H200's memory: its datasheet."""
NVLINK, NETWORK = 450.0, 50.0
"""GB/s a GPU and direction, by datasheet, not measured: H200's NVLink (900 both ways) and one 400 Gb/s port."""
GLOBAL_BATCH = 65536
"""Samples a step of all GPUs."""


@dataclass(frozen=True)
class Prediction:
    """Milliseconds a step on the slowest GPU; communication is what the assumed links would need."""

    gpus: int
    forward: float
    update: float
    communication: float
    slowest: float
    mean: float
    """Of all GPUs' sums: the rest is imbalance."""
    sharding: dict[str, int]
    """Tables by sharding type."""


def predict(
    gpus: int, figures: Figures, batch: int, nvlink: float = NVLINK, network: float = NETWORK
) -> Prediction:
    """Plan the 26 tables in fp16 on ``gpus``, 8 a host, ``batch`` samples of all GPUs a step.

    Raises:
        ValueError: ``batch`` is not a multiple of ``gpus``, or ``gpus`` neither up to 8 nor a multiple of it.
    """
    import torchrec
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

    from .planning import estimator

    if gpus < 1 or (gpus > 8 and gpus % 8):
        raise ValueError(f"gpus={gpus}: expected 1 to 8, or a multiple of 8")
    if batch < gpus or batch % gpus:
        raise ValueError(f"batch={batch}: expected a multiple of gpus={gpus}")
    (workload,) = select("mlperf_dlrm2")
    names = [f"t{i}" for i in range(len(workload.rows))]
    tables = [
        torchrec.EmbeddingBagConfig(
            name=name, embedding_dim=dim, num_embeddings=rows, feature_names=[name],
            data_type=torchrec.DataType.FP16,
        )
        for name, rows, dim in zip(names, workload.rows, workload.dims, strict=True)
    ]  # fmt: skip
    module = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    constraints = {
        name: ParameterConstraints(
            pooling_factors=[float(length)],
            compute_kernels=["fused"],
            sharding_types=["table_wise", "row_wise"],
        )
        for name, length in zip(names, workload.lengths, strict=True)
    }
    topology = Topology(
        world_size=gpus, local_world_size=min(gpus, 8), compute_device="cuda", hbm_cap=int(MEMORY),
        intra_host_bw=nvlink * GB / 1e3, inter_host_bw=network * GB / 1e3,
    )  # fmt: skip
    enumerator = EmbeddingEnumerator(
        topology=topology, batch_size=batch // gpus, constraints=constraints,
        estimator=[
            estimator(topology, constraints, figures),
            EmbeddingStorageEstimator(topology=topology, constraints=constraints),
        ],
    )  # fmt: skip
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=batch // gpus, constraints=constraints, enumerator=enumerator,
        storage_reservation=FixedPercentageStorageReservation(0.15), stats=[], debug=False,
    )  # fmt: skip
    planner.plan(module, [EmbeddingBagCollectionSharder()])
    return _summed(gpus, planner._best_plan)


def _summed(gpus: int, plan: Any) -> Prediction:
    per_gpu = torch.zeros(gpus, 3, dtype=torch.float64)
    sharding: dict[str, int] = {}
    for option in plan:
        sharding[option.sharding_type] = sharding.get(option.sharding_type, 0) + 1
        for shard in option.shards:
            perf = shard.perf
            communication = perf.fwd_comms + perf.bwd_comms + perf.input_dist_comms
            per_gpu[shard.rank] += torch.tensor([perf.fwd_compute, perf.bwd_compute, communication])
    totals = per_gpu.sum(dim=1)
    forward, update, communication = per_gpu[int(totals.argmax())].tolist()
    slowest, mean = float(totals.max()), float(totals.mean())
    return Prediction(gpus, forward, update, communication, slowest, mean, dict(sorted(sharding.items())))


def main(
    gpus: Annotated[list[int] | None, typer.Option(help="How many GPUs; may be given again.")] = None,
    figures: Annotated[str, typer.Option(help=f"Whose measured speeds: {', '.join(H200)}.")] = "uniform_10m",
    batch: Annotated[int, typer.Option(help="Samples a step of all GPUs.")] = GLOBAL_BATCH,
    nvlink: Annotated[float, typer.Option(help="GB/s a GPU and direction inside a host.")] = NVLINK,
    network: Annotated[float, typer.Option(help="GB/s a GPU and direction between hosts.")] = NETWORK,
) -> None:
    """Print TorchRec's plan of MLPerf's 26 tables at the measured speeds, and the milliseconds of a step."""
    logging.disable(logging.WARNING)
    if figures not in H200:
        raise typer.BadParameter(f"{figures!r}: expected one of {', '.join(H200)}", param_hint="--figures")
    print(f"predicted, not measured; kernels at {figures}'s speeds, {batch} samples a step")
    print("GPUs  forward  update  communication  slowest GPU  mean GPU  ms;  tables by sharding")
    for count in gpus or [8, 64]:
        try:
            p = predict(count, H200[figures], batch, nvlink, network)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        kinds = ", ".join(f"{n} {kind}" for kind, n in p.sharding.items())
        print(
            f"{p.gpus:4}  {p.forward:7.3f}  {p.update:6.3f}  {p.communication:13.3f}  {p.slowest:11.3f}  "
            f"{p.mean:8.3f}      {kinds}"
        )


if __name__ == "__main__":
    typer.run(main)
