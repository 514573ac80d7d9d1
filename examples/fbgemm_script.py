"""A program written for FBGEMM_GPU's table-batched embeddings. One import differs from the original:

    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

FBGEMM_GPU need not be installed. Run it by ``python examples/fbgemm_script.py [--steps 50]``.
"""

import argparse

import torch

from tbe.compat.fbgemm import (
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    PoolingMode,
    SparseType,
    SplitTableBatchedEmbeddingBagsCodegen,
)

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
options = parser.parse_args()

torch.manual_seed(0)
rows, batch = [1000, 200], 64
embeddings = SplitTableBatchedEmbeddingBagsCodegen(
    embedding_specs=[(r, 16, EmbeddingLocation.HOST, ComputeDevice.CPU) for r in rows],
    optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    learning_rate=0.1,
    eps=1.0e-4,
    weights_precision=SparseType.FP32,
    pooling_mode=PoolingMode.SUM,
)
embeddings.init_embedding_weights_uniform(-0.1, 0.1)
over = torch.nn.Linear(32, 1)
dense = torch.optim.Adam(over.parameters(), lr=0.01)

lengths = torch.randint(0, 5, (len(rows) * batch,))
offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
counts = lengths.view(len(rows), batch).sum(dim=1).tolist()
indices = torch.cat([torch.randint(0, r, (n,)) for r, n in zip(rows, counts, strict=True)])
labels = torch.rand(batch).round()

for step in range(1, options.steps + 1):
    dense.zero_grad()
    logits = over(embeddings(indices, offsets)).squeeze(1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    loss.backward()
    dense.step()
    if step % max(1, options.steps // 5) == 0:
        print(f"step {step}: loss {loss.item():.4f}")
print({name: list(value.shape) for name, value in embeddings.state_dict().items()})
