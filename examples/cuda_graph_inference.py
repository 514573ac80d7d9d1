"""Inference replayed from a CUDA graph: the batch is copied into fixed buffers, one launch runs the whole model.

    python examples/cuda_graph_inference.py [--device cuda] [--batches 100] [--batch 64]

A CUDA graph needs a GPU. Without one the same loop runs the same buffers uncaptured, and says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn

import tbe

TABLES = [tbe.Table("user", 10_000, 32), tbe.Table("item", 50_000, 32)]
LONGEST = 8


class Scores(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.emb = tbe.TableBatchedEmbeddingBags(
            TABLES, optimizer=tbe.RowwiseAdagrad(), bounds_check="ignore", device=device
        )
        self.over = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid()).to(device)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.over(self.emb(indices, offsets)).squeeze(1)


def requests(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of ``batch`` requests, padded with pruned ids (-1) to one length, and offsets, feature-major.

    A graph's shapes are fixed. What varies is padded: a bag keeps its ids and takes up to LONGEST slots.
    """
    bags = len(TABLES) * batch
    ids = torch.cat([torch.randint(0, t.rows, (batch, LONGEST), generator=generator) for t in TABLES])
    lengths = torch.randint(0, LONGEST + 1, (bags, 1), generator=generator)
    ids[torch.arange(LONGEST) >= lengths] = -1
    return ids.flatten(), torch.arange(0, bags * LONGEST + 1, LONGEST)


def captured(model: Scores, indices: torch.Tensor, offsets: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that replays the model on what the two buffers hold."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm up: kernels are compiled and memory is found outside the graph
        for _ in range(3):
            model(indices, offsets)
    torch.cuda.current_stream().wait_stream(side)
    tbe.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores = model(indices, offsets)

    def replay() -> torch.Tensor:
        graph.replay()
        return scores

    return replay


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Scores(options.device).eval()
    indices, offsets = (t.to(options.device) for t in requests(options.batch, generator))
    if options.device.startswith("cuda"):
        run = captured(model, indices, offsets)
        print("replaying a CUDA graph")
    else:
        print(f"not captured: a CUDA graph needs a GPU, and the device is {options.device}")

        def run() -> torch.Tensor:
            return model(indices, offsets)

    total, worst = 0.0, 0.0
    for _ in range(options.batches):
        ids, ends = requests(options.batch, generator)
        indices.copy_(ids)
        offsets.copy_(ends)
        scores = run().clone()
        total += scores.mean().item()
        worst = max(worst, (scores - model(indices, offsets)).abs().max().item())
    print(f"{options.batches} batches, mean score {total / options.batches:.6f}")
    print(f"largest difference from an uncaptured call: {worst}")


if __name__ == "__main__":
    main()
