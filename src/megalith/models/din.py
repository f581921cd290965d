"""DIN: attention of the item in question over a history of items (Zhou et al. 2018).

History and target share a table. The history has a fixed number of places (FirstN); a mask says which of
them are real.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.errors import InputError, UnknownNameError
from megalith.models.embedding_config import EmbeddingConfig
from megalith.models.model import Model, join, mlp
from megalith.nn import Feature, FirstN, Layout, Slice


class DIN(Model):
    """An MLP reads all features, the dense values, and a mean of the history weighted by a second MLP.

    target: the feature whose table the history shares. history: the column of past items; it is not among
    the config's features. max_length: how many items of a history are looked at, from its beginning.
    hidden, attention: widths of the MLPs' hidden layers. dropout: behind each of the first's.

    Unlike the paper's, the weights are a softmax over the real places, so that long histories do not weigh
    more than short ones. An empty history gives zeros.
    """

    def __init__(
        self,
        embeddings: EmbeddingConfig,
        *,
        target: str,
        history: str,
        max_length: int = 50,
        num_dense: int = 0,
        hidden: Sequence[int] = (64, 32),
        attention: Sequence[int] = (32,),
        dropout: float = 0.0,
    ) -> None:
        super().__init__(num_dense=num_dense)
        names, dim = list(embeddings.combiners), embeddings.dim
        if target not in names:
            known = ", ".join(map(repr, names))
            raise UnknownNameError(f"DIN: target {target!r} is no feature (known: {known})")
        if history in names:
            raise InputError(f"DIN: history {history!r} is also among the features: leave it out there")
        self.masks = {"mask": history}
        past = Feature(history, embeddings.table(target), FirstN(max_length))
        self.embeddings = embeddings.collection(
            [
                Layout("rows", [Slice(name, 0, dim) for name in names]),
                Layout("target", [Slice(target, 0, dim)]),
                Layout("history", [Slice(history, 0, dim)]),
            ],
            more=[past],
        )
        self.attention = mlp([4 * dim, *attention, 1])
        self.deep = mlp([(len(names) + 1) * dim + num_dense, *hidden, 1], dropout=dropout)

    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        """rows: rows [B, features * dim], target [B, dim], history [B, n, dim], mask [B, n]."""
        past, mask = rows["history"], rows["mask"]
        target = rows["target"][:, None].expand_as(past)
        scores = self.attention(torch.cat([past, target, past - target, past * target], 2)).squeeze(2)
        # The least number and not -inf: a history without a real place is a mean of zeros, not of nothing.
        weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(1)
        interest = (weights[:, :, None] * past).sum(1)
        logits: Tensor = self.deep(join(torch.cat([rows["rows"], interest], 1), dense))
        return logits.squeeze(1)
