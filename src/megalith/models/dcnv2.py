"""DCNv2: low-rank cross layers in parallel with an MLP (Wang et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megalith.models.embedding_config import EmbeddingConfig
from megalith.models.model import Model, join, mlp
from megalith.nn import Layout, Slice
from megalith.ops import checks


class Cross(nn.Module):
    """x -> x0 * (U V x + b) + x with a low-rank U V, which raises the degree of input products by one."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        # returns: float [B, width].
        out: Tensor = first * self.up(self.down(x)) + x
        return out


class DCNv2(Model):
    """Cross layers and an MLP over the same inputs (embeddings and dense values), combined by a last layer.

    Args:
        embeddings: The features and tables.
        num_dense: The number of dense values of an example.
        num_cross: The number of cross layers; k layers model products of k + 1 inputs.
        rank: The rank of their matrices.
        hidden: The widths of the layers of the MLP.
        dropout: The dropout probability after each of them.
    """

    def __init__(
        self,
        embeddings: EmbeddingConfig,
        *,
        num_dense: int = 0,
        num_cross: int = 2,
        rank: int = 32,
        hidden: Sequence[int] = (64, 32),
        dropout: float = 0.0,
    ) -> None:
        super().__init__(num_dense=num_dense)
        checks.instance(embeddings, EmbeddingConfig, f"{type(self).__name__}: embeddings")
        checks.integer(num_cross, "DCNv2: num_cross")
        checks.integer(rank, "DCNv2: rank")
        layers = checks.sizes(hidden, "DCNv2: hidden")
        names, dim = list(embeddings.combiners), embeddings.dim
        self.embeddings = embeddings.collection([Layout("rows", [Slice(name, 0, dim) for name in names])])
        width = len(names) * dim + num_dense
        self.cross = nn.ModuleList(Cross(width, rank) for _ in range(num_cross))
        self.deep = mlp([width, *layers], dropout=dropout, last=False)
        self.last = nn.Linear(width + ([width, *layers][-1]), 1)

    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        # Rows: rows [B, features * dim].
        first = crossed = join(rows["rows"], dense)
        for layer in self.cross:
            crossed = layer(first, crossed)
        logits: Tensor = self.last(torch.cat([crossed, self.deep(first)], 1))
        return logits.squeeze(1)
