"""On a GPU with TLX: updates of one long run are right, and repeat bit for bit where they promise it.

Usage: python ci/tlx_check.py [REPEATS]. Runs of 1 to 400,000 lookups of one row, beside others of one lookup; the
results of `tlx` are also those of `triton`, bit for bit. Modules with deterministic=False are held to the
tolerance.
"""

from __future__ import annotations

import sys

import torch

import tbe
from tbe_core import tolerances
from tbe_core.reference import Reference

RUNS = (1, 2, 15, 16, 17, 100, 1000, 3000, 20_000, 400_000)
OTHERS, DIM, BAGS = 5000, 128, 512


def inputs(run: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids (row 0 ``run`` times, others once), offsets, and the output's gradient; on the CPU."""
    generator = torch.Generator().manual_seed(run)
    ids = torch.cat([torch.zeros(run, dtype=torch.int64), torch.arange(1, OTHERS)])
    ids = ids[torch.randperm(len(ids), generator=generator)]
    offsets = torch.linspace(0, len(ids), BAGS + 1).long()
    return ids, offsets, torch.randn(BAGS, DIM, generator=generator) * 1e-3


def stepped(backend: str, run: int, deterministic: bool) -> tuple[torch.Tensor, tbe.TableBatchedEmbeddingBags]:
    """The table after one step, and the module before it."""
    emb = tbe.TableBatchedEmbeddingBags(
        [tbe.Table("t", OTHERS, DIM)],
        optimizer=tbe.SGD(lr=0.5),
        deterministic=deterministic,
        backend=backend,
        device="cuda",
    )
    with torch.no_grad():
        emb.weights.copy_(torch.randn(emb.weights.shape, generator=torch.Generator().manual_seed(1)))
    before = emb.split_embedding_weights()[0].cpu().clone()
    ids, offsets, grad = inputs(run)
    emb(ids.cuda(), offsets.cuda()).backward(grad.cuda())
    return before, emb


def check(run: int, repeats: int) -> None:
    """SystemExit where a result differs."""
    before, emb = stepped("tlx", run, True)
    first = emb.split_embedding_weights()[0].cpu()
    for number in range(1, repeats):
        again = stepped("tlx", run, True)[1].split_embedding_weights()[0].cpu()
        if not torch.equal(first, again):
            raise SystemExit(f"run of {run}: repeat {number} differs")
    portable = stepped("triton", run, True)[1].split_embedding_weights()[0].cpu()
    if not torch.equal(first, portable):
        raise SystemExit(f"run of {run}: tlx and triton differ")
    ids, offsets, grad = inputs(run)
    reference = Reference.of(emb.spec, [before], [{}])
    reference.backward_update(grad.double(), ids, offsets, None, [0.5])
    sizes = Reference.of(emb.spec, [torch.zeros_like(before)], [{}])
    sizes.backward_update(grad.double().abs(), ids, offsets, None, [0.5])
    limit = tolerances.weights("sgd", torch.float32) * (before.double().abs() - sizes.tables[0])
    loose = stepped("tlx", run, False)[1].split_embedding_weights()[0].cpu()
    for name, got in (("deterministic", first), ("not deterministic", loose)):
        wrong = (got.double() - reference.tables[0]).abs() > limit
        if bool(wrong.any()):
            raise SystemExit(f"run of {run}, {name}: {int(wrong.sum())} elements are wrong")
    print(
        f"run of {run}: {repeats} repeats are one, triton's bits, within the tolerance also unordered", flush=True
    )


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    unavailable = {b.name: b.unavailable for b in tbe.backends("cuda")}["tlx"]
    if unavailable is not None:
        raise SystemExit(f"tlx: {unavailable}")
    for run in RUNS:
        check(run, repeats)


if __name__ == "__main__":
    main()
