"""A program for FBGEMM's CPU module that knows nothing of this library; a test replaces its imports."""

import json
import sys

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)


class Model(torch.nn.Module):
    def __init__(self, optimizer: EmbOptimType) -> None:
        super().__init__()
        self.embeddings = SplitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=[
                (200, 16, EmbeddingLocation.HOST, ComputeDevice.CPU),
                (30, 8, EmbeddingLocation.HOST, ComputeDevice.CPU),
                (1000, 16, EmbeddingLocation.HOST, ComputeDevice.CPU),
            ],
            feature_table_map=[0, 1, 2, 2],
            weights_precision=SparseType.FP32,
            optimizer=optimizer,
            learning_rate=0.3,
            eps=1.0e-4,
            pooling_mode=PoolingMode.SUM,
            bounds_check_mode=BoundsCheckMode.WARNING,
        )
        self.embeddings.init_embedding_weights_uniform(-0.1, 0.1)
        self.over = torch.nn.Sequential(torch.nn.Linear(56, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.over(self.embeddings(indices, offsets, per_sample_weights=weights)).squeeze(1)


torch.manual_seed(3)
model = Model(EmbOptimType[sys.argv[1]])
dense = torch.optim.Adam(model.over.parameters(), lr=0.01)
rows = [200, 30, 1000, 1000]
batch = 32
lengths = torch.randint(0, 6, (4 * batch,))
offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
per_feature = lengths.view(4, batch).sum(dim=1).tolist()
indices = torch.cat([torch.randint(0, r, (n,)) for r, n in zip(rows, per_feature, strict=True)])
weights = torch.rand(len(indices))
labels = torch.rand(batch).round()
losses = []
for step in range(20):
    if step == 10:
        model.embeddings.set_learning_rate(0.1)
    dense.zero_grad()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(indices, offsets, weights), labels)
    loss.backward()
    dense.step()
    losses.append(loss.item())
model.load_state_dict(model.state_dict())
model.embeddings.flush()
print(json.dumps(losses))
