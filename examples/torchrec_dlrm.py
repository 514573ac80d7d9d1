"""A small DLRM under TorchRec's DistributedModelParallel, over this library's kernels or FBGEMM_GPU's.

    torchrun --nproc-per-node 2 examples/torchrec_dlrm.py --kernel tbe
    torchrun --nproc-per-node 2 examples/torchrec_dlrm.py --kernel fbgemm

print the same losses. With ``--save DIR`` a checkpoint is written at the end; ``--resume DIR`` goes on from it,
under either kernel. ``--device cuda`` takes one GPU a process, over NCCL.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import tbe.compat.torchrec

DENSE, DIM = 13, 16


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernel", choices=("tbe", "fbgemm"), default="tbe")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tables", type=int, default=6)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64, help="samples a process and step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save", help="folder for a checkpoint at the end")
    parser.add_argument("--resume", help="folder of a checkpoint to go on from")
    return parser.parse_args()


def make_batch(options: argparse.Namespace, step: int, device: torch.device) -> torchrec.datasets.utils.Batch:
    """Synthetic clicks: whether one does depends on the ids, so that there is something to learn."""
    draw = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    lengths = torch.randint(0, 4, (options.tables * options.batch,), generator=draw)
    values = torch.randint(0, options.rows, (int(lengths.sum()),), generator=draw)
    keys = [f"f{i}" for i in range(options.tables)]
    features = torchrec.KeyedJaggedTensor(keys, values, lengths=lengths)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), (values % 2).cumsum(0)])
    odd = (ends[features.offsets()[1:]] - ends[features.offsets()[:-1]]).view(options.tables, -1).sum(0)
    labels = (odd > lengths.view(options.tables, -1).sum(0) / 2).float()
    dense = torch.randn(options.batch, DENSE, generator=draw)
    return torchrec.datasets.utils.Batch(dense.to(device), features.to(device), labels.to(device))


def build(options: argparse.Namespace, device: torch.device) -> DistributedModelParallel:
    """The same values on every process and under every kernel."""
    tables = [
        torchrec.EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=DIM, num_embeddings=options.rows, feature_names=[f"f{i}"]
        )
        for i in range(options.tables)
    ]
    torch.manual_seed(0)
    embeddings = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    dlrm = DLRM(embeddings, DENSE, [32, DIM], [32, 1], dense_device=device)
    model = DLRMTrain(dlrm)
    apply_optimizer_in_backward(
        torchrec.optim.RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": 0.05}
    )
    planner = EmbeddingShardingPlanner(topology=Topology(dist.get_world_size(), device.type))
    plan = planner.collective_plan(model, get_default_sharders(), dist.group.WORLD)
    installed = tbe.compat.torchrec.install() if options.kernel == "tbe" else contextlib.nullcontext()
    with installed:
        sharded = DistributedModelParallel(model, device=device, plan=plan)
    for name, tensor in sharded.state_dict().items():
        if hasattr(tensor, "local_shards"):
            for shard in tensor.local_shards():
                seed = sum(map(ord, name)) + sum(shard.metadata.shard_offsets)
                draw = torch.Generator().manual_seed(seed)
                shard.tensor.copy_(torch.randn(shard.tensor.shape, generator=draw) * 0.1)
    return sharded


def main() -> None:
    options = arguments()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # TorchRec's own
    rank = int(os.environ["RANK"])
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = build(options, device)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda p: torch.optim.SGD(p, lr=0.1)
    )
    first = 0
    if options.resume:
        state = {"model": model.state_dict(), "fused": model.fused_optimizer.state_dict(), "step": torch.zeros(1)}
        dcp.load(state, checkpoint_id=options.resume)
        model.load_state_dict(state["model"])
        model.fused_optimizer.load_state_dict(state["fused"])
        first = int(state["step"])
    for step in range(first, first + options.steps):
        dense.zero_grad()
        model.fused_optimizer.zero_grad()
        loss, _ = model(make_batch(options, step, device))
        loss.backward()
        dense.step()
        everywhere = loss.detach().clone()
        dist.all_reduce(everywhere)
        if rank == 0:
            print(f"step {step} loss {float(everywhere) / dist.get_world_size():.6f}", flush=True)
    if options.save:
        step = torch.tensor([float(first + options.steps)])
        state = {"model": model.state_dict(), "fused": model.fused_optimizer.state_dict(), "step": step}
        dcp.save(state, checkpoint_id=options.save)
    # Nobody leaves while another still writes or reads, and no tensor of the group outlives it.
    dist.barrier()
    del model, dense
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
