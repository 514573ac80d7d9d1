"""Values on a GPU, before anything else: every dtype and tier of the Triton backend beside the fp64 reference."""

import time

import torch

import tbe
from tbe_core.reference import Reference


def main() -> None:
    torch.manual_seed(0)
    worst = 0.0
    start = time.time()
    for dims, pooling in (
        ((128,) * 3, "sum"),
        ((8, 3, 200), "sum"),
        ((64,) * 3, "mean"),
        ((16,) * 3, "none"),
    ):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for hot in (1, 40, 3000):
                emb = tbe.TableBatchedEmbeddingBags(
                    [tbe.Table(f"t{i}", 50 + i, d) for i, d in enumerate(dims)],
                    [1, 0, 1, 2],
                    pooling,
                    optimizer=tbe.RowwiseAdagrad(lr=0.05),
                    weights_dtype=dtype,
                    device="cuda",
                )
                lengths = torch.randint(0, 6, (20,))
                lengths[3] = hot
                offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
                indices = torch.randint(-1, 50, (int(offsets[-1]),))
                indices[offsets[3] : offsets[4]] = 7
                weights = None if pooling == "none" else torch.rand(len(indices), device="cuda")
                ref = Reference.of(emb.spec, emb.split_embedding_weights(), emb.split_optimizer_states())
                out = emb(indices.cuda(), offsets.cuda(), weights)
                expected = ref.forward(indices, offsets, weights)
                grad = torch.randn_like(out)
                out.backward(grad)
                ref.backward_update(grad, indices, offsets, weights, emb.spec.optimizer.hyper_values())
                scale = expected.abs().max().item() + 1e-6
                f = (out.cpu() - expected).abs().max().item() / scale
                u = max(
                    (a.cpu() - b).abs().max().item()
                    for a, b in zip(emb.split_embedding_weights(), ref.tables, strict=True)
                )
                bound = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
                assert f < 1e-5 and u < bound, (dims, pooling, dtype, hot, f, u)
                worst = max(worst, f)
    print(f"ok, worst forward {worst:.1e}, {time.time() - start:.1f} s")


if __name__ == "__main__":
    main()
