"""DLRM: dot products of all pairs of embeddings, between two MLPs (Naumov et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megalith.models.embedding_config import EmbeddingConfig
from megalith.models.model import Model, mlp
from megalith.nn import Layout, Slice
from megalith.ops import checks


class DLRM(Model):
    """A bottom MLP turns the dense values into one more embedding; a top MLP reads it and all dot products.

    Without dense values, a learned vector replaces the output of the bottom MLP.

    Args:
        embeddings: The features and tables.
        num_dense: The number of dense values of an example.
        bottom: The widths of the hidden layers of the bottom MLP.
        top: The widths of the hidden layers of the top MLP.
        dropout: The dropout probability after each hidden layer.
    """

    def __init__(
        self,
        embeddings: EmbeddingConfig,
        *,
        num_dense: int = 0,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (64, 32),
        dropout: float = 0.0,
    ) -> None:
        super().__init__(num_dense=num_dense)
        checks.instance(embeddings, EmbeddingConfig, f"{type(self).__name__}: embeddings")
        names, dim = list(embeddings.combiners), embeddings.dim
        self.embeddings = embeddings.collection(
            [Layout("rows", [Slice(name, 0, dim) for name in names], kind="stack")]
        )
        below = [num_dense, *checks.sizes(bottom, "DLRM: bottom"), dim]
        self.bottom = mlp(below, dropout=dropout, last=False) if num_dense else None
        self.vector = nn.Parameter(torch.randn(dim) / dim**0.5) if not num_dense else None
        count = len(names) + 1
        self.top = mlp([dim + count * (count - 1) // 2, *checks.sizes(top, "DLRM: top"), 1], dropout=dropout)

    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        # Rows: rows [B, features, dim].
        embedded = rows["rows"]
        first = self._first(embedded.shape[0], dense)
        vectors = torch.cat([first[:, None], embedded], 1)
        above = torch.triu_indices(vectors.shape[1], vectors.shape[1], offset=1, device=vectors.device)
        pairs = (vectors @ vectors.transpose(1, 2))[:, above[0], above[1]]
        logits: Tensor = self.top(torch.cat([first, pairs], 1))
        return logits.squeeze(1)

    def _first(self, size: int, dense: Tensor | None) -> Tensor:
        if self.vector is not None:
            return self.vector.expand(size, -1)
        assert self.bottom is not None
        out: Tensor = self.bottom(dense)
        return out
