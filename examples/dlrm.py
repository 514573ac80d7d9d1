"""Train a small DLRM: dense layers by a torch optimizer, all embedding tables by one fused operator.

    python examples/dlrm.py [--device cuda] [--compile] [--steps 200] [--batch 512]

Clicks are synthetic; the loss falls below that of always predicting the mean click rate, 0.69.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import tbe

DENSE, DIM = 4, 16
TABLES = [tbe.Table("user", 2000, DIM), tbe.Table("item", 5000, DIM), tbe.Table("country", 50, DIM)]


class DLRM(nn.Module):
    """A bottom MLP, pooled embeddings, their pairwise dot products and a top MLP."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(DENSE, 32), nn.ReLU(), nn.Linear(32, DIM))
        self.emb = tbe.TableBatchedEmbeddingBags(TABLES, optimizer=tbe.RowwiseAdagrad(lr=0.1), device=device)
        vectors = len(TABLES) + 1
        self.top = nn.Sequential(nn.Linear(DIM + vectors * vectors, 32), nn.ReLU(), nn.Linear(32, 1))
        self.to(device)

    def forward(self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom, self.emb(indices, offsets)], dim=1)
        vectors = vectors.view(dense.shape[0], len(TABLES) + 1, DIM)
        dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([bottom, dots], dim=1)).squeeze(1)


def clicks(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Dense features [batch, 4], ids [N], offsets [3*batch + 1] and labels [batch].

    Bags hold none to three ids. Whether a click happens depends on the ids alone: even ones speak for it.
    """
    lengths = torch.randint(0, 4, (len(TABLES), batch), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    ids = [
        (torch.rand(int(n), generator=generator) ** 3 * t.rows).long()  # few ids are frequent
        for t, n in zip(TABLES, lengths.sum(dim=1), strict=True)
    ]
    indices = torch.cat(ids)
    bags = torch.repeat_interleave(torch.arange(len(TABLES) * batch), lengths.flatten()) % batch
    votes = torch.zeros(batch).index_add(0, bags, 1.0 - 2.0 * (indices % 2))
    labels = (torch.rand(batch, generator=generator) < torch.sigmoid(2 * votes)).float()
    return torch.randn(batch, DENSE, generator=generator), indices, offsets, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model, in one graph")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=512)
    options = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = DLRM(options.device)
    print(model.emb.plan)
    run = torch.compile(model, fullgraph=True) if options.compile else model
    # All parameters may be given to it: the tables ask for no gradient and are left alone.
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    recent = []
    for step in range(1, options.steps + 1):
        dense, indices, offsets, labels = (t.to(options.device) for t in clicks(options.batch, generator))
        loss = binary_cross_entropy_with_logits(run(dense, indices, offsets), labels)
        dense_optimizer.zero_grad()
        loss.backward()  # the tables take their step here
        dense_optimizer.step()
        recent.append(loss.detach())
        if step % max(1, options.steps // 10) == 0:
            print(f"step {step}: loss {torch.stack(recent).mean().item():.4f}")
            recent = []
    model.emb.flush()  # reports ids outside their tables, if there were any


if __name__ == "__main__":
    main()
