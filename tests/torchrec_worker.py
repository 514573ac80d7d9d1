"""Two gloo processes that train TorchRec models over FBGEMM_GPU's kernels and over ours, and write what came out.

    python torchrec_worker.py FOLDER

One process group serves every case, since starting it costs more than all of them. Results are judged in
test_torchrec.py, which imports this file's cases too.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

WORLD, BATCH, STEPS, LR = 2, 4, 4, 0.1
LATER_LR = 0.05
"""From step 2 on, set through TorchRec's optimizer."""
ROWS, FEATURES = (21, 30, 8), (("f0", "f1"), ("f2",), ("f3",))
FEATURE_ROWS = (21, 21, 30, 8)
VARIABLE = (3, 2, 4, 1)
"""Bags a rank of each feature with variable batches; rank 1 has one more of each, but with row-wise sharding."""


@dataclass(frozen=True)
class Case:
    """A model and how it is sharded."""

    sharding: str = "table_wise"
    optimizer: str = "EXACT_ROWWISE_ADAGRAD"
    weighted: bool = False
    variable: bool = False
    mean: tuple[int, ...] = ()
    """Tables with mean pooling."""
    dims: tuple[int, ...] = (8, 16, 8)
    kernel: str = "fused"
    sequence: bool = False
    half: bool = False
    theirs: bool = True
    """Whether FBGEMM_GPU has it on the CPU."""


CASES = {
    **{
        f"{sharding}-{optimizer}": Case(sharding, optimizer)
        for sharding in ("table_wise", "row_wise", "column_wise")
        for optimizer in ("EXACT_SGD", "EXACT_ROWWISE_ADAGRAD")
    },
    **{f"{s}-ADAM": Case(s, "ADAM", theirs=False) for s in ("table_wise", "row_wise", "column_wise")},
    **{f"{s}-weighted": Case(s, weighted=True) for s in ("table_wise", "row_wise", "column_wise")},
    **{f"{s}-variable": Case(s, variable=True) for s in ("table_wise", "column_wise")},
    "row_wise-variable": Case("row_wise", variable=True, dims=(8, 8, 8)),
    "variable-weighted": Case(variable=True, weighted=True, optimizer="EXACT_SGD"),
    "adagrad": Case(optimizer="EXACT_ADAGRAD"),
    # Rank 0 has a group of tables for each pooling, which write into one tensor: FBGEMM_GPU's on GPUs alone.
    "variable-groups": Case(variable=True, mean=(2,), theirs=False),
    "mean": Case(mean=(0, 1, 2)),
    "row_wise-mean": Case("row_wise", mean=(0, 1, 2)),
    "mixed": Case("mixed"),
    "half": Case(half=True, optimizer="EXACT_SGD"),
    "data_parallel": Case("data_parallel", "EXACT_SGD", kernel="dense"),
    "dense": Case("table_wise", "EXACT_SGD", kernel="dense"),
    "sequence-table_wise": Case(sequence=True, dims=(8, 8, 8)),
    "sequence-row_wise": Case("row_wise", sequence=True, dims=(8, 8, 8)),
    "sequence-column_wise": Case("column_wise", sequence=True, dims=(8, 8, 8)),
}


@dataclass(frozen=True)
class Batch:
    """One rank's inputs: bags of every feature, feature by feature."""

    lengths: torch.Tensor
    values: torch.Tensor
    weights: torch.Tensor
    bags: tuple[int, ...]
    """Per feature."""
    inverse: torch.Tensor
    """``[features, BATCH]``: with variable batches, the bag of each sample."""

    def per_feature(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Lengths, values and weights of each feature."""
        lengths = self.lengths.split(list(self.bags))
        counts = [int(of.sum()) for of in lengths]
        return list(zip(lengths, self.values.split(counts), self.weights.split(counts), strict=True))


def batch(case: Case, step: int, rank: int) -> Batch:
    """The same on every process, so that the reference can see all ranks' inputs."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    # Gloo gathers row-wise outputs of one size alone.
    more = 0 if case.sharding == "row_wise" else rank
    bags = tuple(n + more for n in VARIABLE) if case.variable else (BATCH,) * len(FEATURE_ROWS)
    lengths = torch.randint(0, 5, (sum(bags),), generator=draw)
    counts = [int(of.sum()) for of in lengths.split(list(bags))]
    ids = [torch.randint(0, rows, (n,), generator=draw) for rows, n in zip(FEATURE_ROWS, counts, strict=True)]
    inverse = torch.stack([torch.randint(0, n, (BATCH,), generator=draw) for n in bags])
    return Batch(lengths, torch.cat(ids), torch.rand(sum(counts), generator=draw) + 0.5, bags, inverse)


def target(shape: torch.Size, step: int, rank: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7 + 100 * step + rank))


def start(table: int, dim: int) -> torch.Tensor:
    """A table's first rows, ``[rows, dim]``."""
    return torch.rand(ROWS[table], dim, generator=torch.Generator().manual_seed(table)) - 0.5


def jagged(case: Case, found: Batch) -> Any:
    from torchrec import KeyedJaggedTensor

    keys = [name for names in FEATURES for name in names]
    options: dict[str, Any] = {"weights": found.weights.clone()} if case.weighted else {}
    if case.variable:
        options["stride_per_key_per_rank"] = [[n] for n in found.bags]
        options["inverse_indices"] = (keys, found.inverse)
    return KeyedJaggedTensor(keys, found.values.clone(), lengths=found.lengths.clone(), **options)


def output(case: Case, model: Any, found: Batch) -> torch.Tensor:
    """``[BATCH, sum of dims]``; for sequences ``[N, D]``, feature by feature."""
    out = model(jagged(case, found))
    keys = [name for names in FEATURES for name in names]
    if case.sequence:
        return torch.cat([out[key].values() for key in keys])
    return torch.cat([out[key] for key in keys], dim=1)


def build(case: Case) -> Any:
    """The sharded model, over whatever kernels TorchRec makes at present."""
    import torchrec
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel, sharding_plan
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingPlan

    config = torchrec.EmbeddingConfig if case.sequence else torchrec.EmbeddingBagConfig
    tables = []
    for i, (dim, rows, names) in enumerate(zip(case.dims, ROWS, FEATURES, strict=True)):
        extra: dict[str, Any] = {"data_type": torchrec.DataType.FP16} if case.half else {}
        if not case.sequence:
            extra["pooling"] = torchrec.PoolingType.MEAN if i in case.mean else torchrec.PoolingType.SUM
        tables.append(
            config(name=f"t{i}", embedding_dim=dim, num_embeddings=rows, feature_names=list(names), **extra)
        )
    meta = torch.device("meta")
    module: Any
    if case.sequence:
        module = torchrec.EmbeddingCollection(tables=tables, device=meta)
    else:
        module = torchrec.EmbeddingBagCollection(tables=tables, is_weighted=case.weighted, device=meta)
    fused = {"optimizer": EmbOptimType[case.optimizer], "learning_rate": LR}
    sharder = (EmbeddingCollectionSharder if case.sequence else EmbeddingBagCollectionSharder)(fused_params=fused)
    kernel = case.kernel
    kinds: dict[str, Callable[[int], Any]] = {
        "table_wise": lambda i: sharding_plan.table_wise(rank=i % WORLD, compute_kernel=kernel),
        "row_wise": lambda i: sharding_plan.row_wise(compute_kernel=kernel),
        "column_wise": lambda i: sharding_plan.column_wise(
            size_per_rank=[4, 4] if case.dims[i] == 8 else [8, 8], compute_kernel=kernel
        ),
        "data_parallel": lambda i: sharding_plan.data_parallel(),
    }
    kinds["mixed"] = lambda i: kinds[("column_wise", "row_wise", "table_wise")[i]](i)
    # TorchRec's plans leave row-wise sharding on the CPU out; its collectives have it.
    every = {f"t{i}": kinds[case.sharding](i) for i in range(len(ROWS))}
    plan = sharding_plan.construct_module_sharding_plan(
        module, every, sharder=sharder, local_size=WORLD, world_size=WORLD, device_type="cpu"
    )
    model = DistributedModelParallel(
        module, device=torch.device("cpu"), plan=ShardingPlan({"": plan}), sharders=[sharder]
    )
    fill(case, model)
    return model


def fill(case: Case, model: Any) -> None:
    """The same first rows for every kernel and sharding."""
    for name, tensor in model.state_dict().items():
        table = int(name.split(".")[-2][1:])
        whole = start(table, case.dims[table])
        for view, (row, column) in shards(tensor):
            view.copy_(whole[row : row + view.shape[0], column : column + view.shape[1]])


def shards(tensor: Any) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """This process's parts of a tensor, and where in the whole they are."""
    if hasattr(tensor, "local_shards"):
        return [(s.tensor.detach(), tuple(s.metadata.shard_offsets)) for s in tensor.local_shards()]
    return [(tensor.detach(), (0,) * tensor.dim())]


def local(state: Any) -> dict[str, list[tuple[tuple[int, ...], torch.Tensor]]]:
    """Name to the parts of this process, copied."""
    return {
        name: [(at, view.clone()) for view, at in shards(tensor)]
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor) or hasattr(tensor, "local_shards")
    }


def optimizer_state(model: Any) -> dict[str, Any]:
    state = model.fused_optimizer.state_dict()["state"]
    return {f"{param}/{name}": value for param, of in state.items() for name, value in of.items()}


def train(case: Case, model: Any, steps: range, rank: int) -> dict[str, Any]:
    """Losses and outputs of the steps, then tables and optimizer state."""
    outs, losses = [], []
    dense = None
    if case.kernel == "dense":
        dense = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    for step in steps:
        if dense is not None:
            dense.zero_grad()
            dense.param_groups[0]["lr"] = LATER_LR if step >= 2 else LR
        for group in model.fused_optimizer.param_groups:
            group["lr"] = LATER_LR if step >= 2 else LR
        model.fused_optimizer.zero_grad()
        out = output(case, model, batch(case, step, rank)).float()
        loss = (out * target(out.shape, step, rank)).sum() + 0.5 * (out**2).sum()
        loss.backward()
        model.fused_optimizer.step()
        if dense is not None:
            dense.step()
        outs.append(out.detach().clone())
        losses.append(loss.item())
    return {
        "losses": losses,
        "outs": outs,
        "tables": local(model.state_dict()),
        "states": local(optimizer_state(model)),
        "parameters": [name for name, _ in model.named_parameters()],
        "kernels": kernels(model),
    }


def kernels(model: Any) -> list[str]:
    """Classes of the modules that look up, in the lookups that TorchRec keeps out of ``modules()``."""
    lookups = [lookup for module in model.modules() for lookup in getattr(module, "_lookups", ())]
    kinds = {type(m) for lookup in lookups for m in lookup.modules() if "BagsCodegen" in type(m).__name__}
    return sorted(f"{kind.__module__}.{kind.__name__}" for kind in kinds)


def over(name: str) -> contextlib.AbstractContextManager[Any]:
    """Kernels of ours, or TorchRec's own."""
    import tbe.compat.torchrec

    return tbe.compat.torchrec.install() if name == "tbe" else contextlib.nullcontext()


def compare(case: Case, rank: int) -> dict[str, Any]:
    found = {}
    for name in ("fbgemm", "tbe") if case.theirs else ("tbe",):
        with over(name):
            model = build(case)
        found[name] = train(case, model, range(STEPS), rank)
    return found


def checkpoints(folder: Path, rank: int) -> dict[str, Any]:
    """Written by one, read by the other, under another sharding too; by torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp

    found = {}
    first = Case("row_wise", "EXACT_ROWWISE_ADAGRAD")
    for writer in ("fbgemm", "tbe"):
        with over(writer):
            model = build(first)
        train(first, model, range(2), rank)
        path = folder / f"{writer}.dcp"
        dcp.save({"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}, checkpoint_id=path)
        straight = train(first, model, range(2, STEPS), rank)
        for sharding in ("row_wise", "table_wise"):
            for reader in ("fbgemm", "tbe"):
                case = replace(first, sharding=sharding)
                with over(reader):
                    other = build(case)
                state = {"model": other.state_dict(), "optim": other.fused_optimizer.state_dict()}
                dcp.load(state, checkpoint_id=path)
                other.load_state_dict(state["model"])
                other.fused_optimizer.load_state_dict(state["optim"])
                resumed = train(case, other, range(2, STEPS), rank)
                found[f"{writer} to {reader}, {sharding}"] = (straight, resumed)
    return found


def adam_resumes(rank: int) -> tuple[Any, Any]:
    """TorchRec's checkpoints leave the step count out: set_optimizer_step brings it."""
    case = CASES["table_wise-ADAM"]
    with over("tbe"):
        model, other = build(case), build(case)
    train(case, model, range(2), rank)
    other.load_state_dict(model.state_dict())
    other.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())
    other.fused_optimizer.set_optimizer_step(2)
    return train(case, model, range(2, STEPS), rank), train(case, other, range(2, STEPS), rank)


def left_alone(rank: int) -> dict[str, Any]:
    """Models of both kinds, made before, inside and after the installation, used outside and inside it."""
    case = replace(CASES["variable-weighted"], dims=(8, 8, 8))
    before = build(case)
    with over("tbe"):
        inside = build(case)
        found = {"theirs, used inside": train(case, before, range(STEPS), rank)}
    found["ours, used outside"] = train(case, inside, range(STEPS), rank)
    found["theirs, made after"] = train(case, build(case), range(STEPS), rank)
    return found


def planned(rank: int) -> dict[str, Any]:
    """TorchRec's own way in: an optimizer put into the backward, and its planner with default sharders."""
    import torch.distributed as dist
    import torchrec
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.sharding_plan import get_default_sharders
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    case, found = Case(), {}
    for name in ("fbgemm", "tbe"):
        tables = [
            torchrec.EmbeddingBagConfig(
                name=f"t{i}", embedding_dim=dim, num_embeddings=rows, feature_names=list(names)
            )
            for i, (dim, rows, names) in enumerate(zip(case.dims, ROWS, FEATURES, strict=True))
        ]
        module = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, module.parameters(), {"lr": LR})
        planner = EmbeddingShardingPlanner(topology=Topology(WORLD, "cpu"))
        plan = planner.collective_plan(module, get_default_sharders(), dist.group.WORLD)
        with over(name):
            model = DistributedModelParallel(module, device=torch.device("cpu"), plan=plan)
        fill(case, model)
        found[name] = train(case, model, range(STEPS), rank)
    return found


def main(rank: int, folder: Path, port: int) -> None:
    import torch.distributed as dist

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD),
        LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(WORLD),
    )  # fmt: skip
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    found: dict[str, Any] = {"cases": {name: compare(case, rank) for name, case in CASES.items()}}
    found["checkpoints"] = checkpoints(folder, rank)
    found["adam resumes"] = adam_resumes(rank)
    found["left alone"] = left_alone(rank)
    found["planned"] = planned(rank)
    torch.save(found, folder / f"{rank}.pt")
    # A model that outlives its process group may abort the process as it exits.
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    mp.spawn(main, (Path(sys.argv[1]), free), WORLD)
