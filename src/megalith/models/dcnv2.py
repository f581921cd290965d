"""DCNv2: low-rank cross layers beside an MLP (Wang et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megalith.errors import InputError
from megalith.models.embedding_config import EmbeddingConfig
from megalith.models.model import Model, join, mlp
from megalith.nn import Layout, Slice


class Cross(nn.Module):
    """x -> x0 * (U V x + b) + x, with U V of a low rank: one more degree of products of the inputs."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        """first: the inputs x0 [B, width]. x: what the layer before gave [B, width]."""
        out: Tensor = first * self.up(self.down(x)) + x
        return out


class DCNv2(Model):
    """Cross layers and an MLP read the same inputs, embeddings and dense values; a last layer joins them.

    num_cross: how many cross layers; k of them reach products of k + 1 inputs. rank: of their matrices.
    hidden: widths of the MLP's layers. dropout: behind each of them.
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
        if num_cross < 1 or rank < 1:
            raise InputError(f"DCNv2: num_cross and rank must be at least 1, got {num_cross} and {rank}")
        names, dim = list(embeddings.combiners), embeddings.dim
        self.embeddings = embeddings.collection([Layout("rows", [Slice(name, 0, dim) for name in names])])
        width = len(names) * dim + num_dense
        self.cross = nn.ModuleList(Cross(width, rank) for _ in range(num_cross))
        self.deep = mlp([width, *hidden], dropout=dropout, last=False)
        self.last = nn.Linear(width + ([width, *hidden][-1]), 1)

    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        """rows: rows [B, features * dim]."""
        first = crossed = join(rows["rows"], dense)
        for layer in self.cross:
            crossed = layer(first, crossed)
        logits: Tensor = self.last(torch.cat([crossed, self.deep(first)], 1))
        return logits.squeeze(1)
