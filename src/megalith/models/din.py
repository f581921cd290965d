"""DIN: attention of a target item over a history of items (Zhou et al. 2018).

History and target share a table. The history has a fixed number of positions (FirstN); a mask marks those
that hold an item.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.errors import InputError, UnknownNameError
from megalith.models.embedding_config import EmbeddingConfig
from megalith.models.model import Model, join, mlp
from megalith.nn import Feature, FirstN, Layout, Slice
from megalith.ops import checks


class DIN(Model):
    """An MLP over all features, the dense values, and a mean of the history weighted by a second MLP.

    Unlike in the paper, the weights are a softmax over the items, so that long histories do not weigh more
    than short ones. An empty history gives zeros.

    Args:
        embeddings: The features and tables.
        target: The feature whose table the history shares.
        history: The column of past items; it must not be in `embeddings.features`.
        max_length: The number of items of a history that are used, from its beginning.
        num_dense: The number of dense values of an example.
        hidden: The widths of the hidden layers of the MLP.
        attention: The widths of the hidden layers of the second MLP.
        dropout: The dropout probability after each hidden layer of the MLP.

    Raises:
        UnknownNameError: If `target` is not a feature.
        InputError: If `history` is a feature.
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
        checks.instance(embeddings, EmbeddingConfig, f"{type(self).__name__}: embeddings")
        names, dim = list(embeddings.combiners), embeddings.dim
        checks.text(history, "DIN: history")
        if not isinstance(target, str) or target not in names:
            known = ", ".join(map(repr, names))
            raise UnknownNameError(f"DIN: target {target!r} is not a feature (known: {known})")
        if history in names:
            raise InputError(f"DIN: history {history!r} is also in features: remove it there")
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
        self.attention = mlp([4 * dim, *checks.sizes(attention, "DIN: attention"), 1])
        self.deep = mlp(
            [(len(names) + 1) * dim + num_dense, *checks.sizes(hidden, "DIN: hidden"), 1], dropout=dropout
        )

    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        # rows: rows [B, features * dim], target [B, dim], history [B, n, dim], mask [B, n].
        past, mask = rows["history"], rows["mask"]
        target = rows["target"][:, None].expand_as(past)
        scores = self.attention(torch.cat([past, target, past - target, past * target], 2)).squeeze(2)
        # The minimum instead of -inf: an empty history gives a mean of zeros instead of NaN.
        weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(1)
        interest = (weights[:, :, None] * past).sum(1)
        logits: Tensor = self.deep(join(torch.cat([rows["rows"], interest], 1), dense))
        return logits.squeeze(1)
