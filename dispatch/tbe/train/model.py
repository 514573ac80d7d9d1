"""DLRM (Naumov et al., "Deep learning recommendation model for personalization and recommendation systems",
2019): a bottom MLP on the dense features, one table-batched embedding operator for all categories, pairwise
dot products between their vectors, and a top MLP on those."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import torch
from torch import Tensor, nn

import tbe
from tbe.train.clicks import DENSE_FEATURES, SPARSE_FEATURES
from tbe.train.config import TrainConfig
from tbe.train.errors import ConfigError


class DLRM(nn.Module):
    """Click logits from 13 dense and 26 categorical features.

    ``emb`` is the only holder of tables and trains itself in backward; ``dense_parameters`` are everything
    else. ``bottom_mlp`` and ``top_mlp`` are hidden widths; the bottom ends in ``dim``, the top in 1.
    """

    pairs: Tensor

    def __init__(
        self, emb: tbe.TableBatchedEmbeddingBags, dim: int, bottom_mlp: Sequence[int], top_mlp: Sequence[int]
    ) -> None:
        super().__init__()
        self.emb = emb
        self.dim = dim
        self.bottom = nn.Sequential(*_mlp([DENSE_FEATURES, *bottom_mlp, dim]), nn.ReLU())
        vectors = SPARSE_FEATURES + 1
        row, column = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("pairs", row * vectors + column, persistent=False)
        self.top = nn.Sequential(*_mlp([dim + len(row), *top_mlp, 1]))

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        """``dense`` [B, 13], ``indices`` [N] and feature-major ``offsets`` [26*B+1] to logits [B]."""
        bottom = self.bottom(dense)
        pooled = self.emb(indices, offsets)
        vectors = torch.cat([bottom, pooled], dim=1).view(dense.shape[0], SPARSE_FEATURES + 1, self.dim)
        dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        logits: Tensor = self.top(torch.cat([bottom, dots.index_select(1, self.pairs)], dim=1))
        return logits.squeeze(1)

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        """What a torch optimizer should train; the tables are not among them."""
        return chain(self.bottom.parameters(), self.top.parameters())


def _mlp(widths: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]


def describe_tables(config: TrainConfig) -> str:
    """Count, shape and size of the tables, without optimizer state."""
    size = SPARSE_FEATURES * config.rows * config.dim * 4 / 2**20
    return f"{SPARSE_FEATURES} tables of {config.rows} rows and width {config.dim} ({size:.1f} MiB in float32)"


def build_model(config: TrainConfig) -> DLRM:
    """The network of ``config``, initialised from its seed alone, on its device.

    Raises ``ConfigError`` when the tables cannot be made as asked, ``tbe.BackendError`` when the backend
    asked for cannot serve them.
    """
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this torch sees no GPU")
    optimizer = (
        tbe.RowwiseAdagrad(lr=config.lr, eps=1e-8)
        if config.sparse_optimizer == "rowwise_adagrad"
        else tbe.SGD(lr=config.lr)
    )
    try:
        emb = tbe.TableBatchedEmbeddingBags(
            [tbe.Table(f"C{i + 1}", config.rows, config.dim) for i in range(SPARSE_FEATURES)],
            pooling="sum",
            optimizer=optimizer,
            weights_dtype=torch.float32,
            output_dtype=torch.float32,
            bounds_check="warn",
            backend=config.backend,
            device=config.device,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except (RuntimeError, MemoryError) as error:
        # On the CPU torch tells exhaustion from other failures by its text only.
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
            raise ConfigError(f"out of memory for {describe_tables(config)}: lower --rows or --dim") from error
        raise
    torch.manual_seed(config.seed)
    model = DLRM(emb, config.dim, config.bottom_mlp, config.top_mlp).to(config.device)
    # On the CPU whatever the device, so that a GPU run starts from the same tables.
    generator = torch.Generator().manual_seed(config.seed)
    bound = config.dim**-0.5 * 0.1
    with torch.no_grad():
        for table in emb.split_embedding_weights():
            table.copy_(torch.empty(table.shape).uniform_(-bound, bound, generator=generator))
    return model


def build_dense_optimizer(model: DLRM, config: TrainConfig) -> torch.optim.Optimizer:
    """The torch optimizer of everything but the tables."""
    if config.dense_optimizer == "adam":
        return torch.optim.Adam(model.dense_parameters(), lr=config.dense_lr)
    return torch.optim.Adagrad(model.dense_parameters(), lr=config.dense_lr)
