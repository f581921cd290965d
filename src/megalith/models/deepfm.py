"""DeepFM: a factorisation machine and an MLP over the same embeddings (Guo et al. 2017).

A row is [weight, factors]: one lookup returns the first-order weight and the factors of the pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from megalith.models.embedding_config import EmbeddingConfig
from megalith.models.model import Model, join, mlp
from megalith.nn import Layout, Slice
from megalith.ops import checks
from megalith.table import Optimizer, Segment, Zeros


class DeepFM(Model):
    """logit = weights of the ids + products of all pairs of factors + MLP(factors, dense) + linear(dense).

    Args:
        embeddings: The features and tables.
        num_dense: The number of dense values of an example.
        hidden: The widths of the layers of the MLP.
        dropout: The dropout probability after each of them.
        weight_optimizer: The optimizer of the first-order weights; None: that of the embeddings.
    """

    def __init__(
        self,
        embeddings: EmbeddingConfig,
        *,
        num_dense: int = 0,
        hidden: Sequence[int] = (64, 32),
        dropout: float = 0.0,
        weight_optimizer: Optimizer | None = None,
    ) -> None:
        super().__init__(num_dense=num_dense)
        checks.instance(embeddings, EmbeddingConfig, f"{type(self).__name__}: embeddings")
        names, dim = list(embeddings.combiners), embeddings.dim
        optimizer = embeddings.optimizer if weight_optimizer is None else weight_optimizer
        weight = Segment(1, optimizer=optimizer, initializer=Zeros())
        self.embeddings = embeddings.collection(
            [
                Layout("bias", [Slice(name, 0, 1) for name in names], kind="add"),
                Layout("factors", [Slice(name, 1, 1 + dim) for name in names], kind="stack"),
            ],
            segments=[weight, embeddings.segment()],
        )
        self.deep = mlp(
            [len(names) * dim + num_dense, *checks.sizes(hidden, "DeepFM: hidden"), 1], dropout=dropout
        )
        self.linear = nn.Linear(num_dense, 1, bias=False) if num_dense else None

    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        # Rows: bias [B, 1], factors [B, features, dim].
        factors = rows["factors"]
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1, keepdim=True) / 2
        logits: Tensor = rows["bias"] + pairs + self.deep(join(factors.flatten(1), dense))
        if self.linear is not None:
            logits = logits + self.linear(dense)
        return logits.squeeze(1)
