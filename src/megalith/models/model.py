"""Model: what the example models share. A look-up, then a dense part that knows no ids.

`forward` looks up, `score` is the dense part: plain float tensors in, logits out, and so the part that
`compile` hands to torch.compile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megalith.errors import InputError
from megalith.nn import EmbeddingCollection
from megalith.nn.batch_preparer import column_of, real_places
from megalith.ragged import Ragged


class Model(nn.Module):
    """Features, and dense values if it has any, to one logit each.

    embeddings: the EmbeddingCollection. num_dense: how many dense values an example has, 0 for none.
    masks: name -> FirstN feature, for models that must know which places of it are real.
    """

    embeddings: EmbeddingCollection
    masks: Mapping[str, str] = MappingProxyType({})

    def __init__(self, *, num_dense: int = 0) -> None:
        super().__init__()
        if isinstance(num_dense, bool) or not isinstance(num_dense, int) or num_dense < 0:
            raise InputError(f"{type(self).__name__}: num_dense must be 0 or above, got {num_dense!r}")
        self.num_dense = num_dense

    def forward(self, features: Any, dense: Tensor | None = None, time: float | None = None) -> Tensor:
        """Logits, float [B].

        features: as for EmbeddingCollection. dense: float [B, num_dense]; a model without dense values
        leaves it alone. time: seconds, for the rows this forward trains. Raises InputError if dense is
        missing or of another shape.
        """
        rows = self.embed(features, time)
        return self.score(rows, self._dense(dense, rows))

    def embed(self, features: Any, time: float | None) -> dict[str, Tensor]:
        """What `score` needs of the features: the embeddings, and a mask bool [B, n] for each of `masks`."""
        rows: dict[str, Tensor] = self.embeddings(features, time=time)
        if self.masks:
            columns = features if isinstance(features, Mapping) else Ragged.from_keyed(features)
            known = {feature.name: feature for feature in self.embeddings.features}
            for name, feature in self.masks.items():
                rows[name] = real_places(known[feature], column_of(known[feature], columns[feature]))
        return rows

    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        """The dense part: what `embed` gave -> logits [B]."""
        raise NotImplementedError

    def compile(self, *args: Any, **options: Any) -> None:
        """Compiles the dense part in place; arguments are torch.compile's."""
        self.score = torch.compile(self.score, *args, **options)  # type: ignore[method-assign]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, also those that `embeddings.step` would apply."""
        super().zero_grad(set_to_none)
        self.embeddings.zero_grad(set_to_none)

    def _dense(self, dense: Tensor | None, rows: dict[str, Tensor]) -> Tensor | None:
        if self.num_dense == 0:
            return None
        first: Tensor | list[Tensor] = next(iter(rows.values()))  # a layout of kind "none" gives a list
        size = (first[0] if isinstance(first, list) else first).shape[0]
        shape = (size, self.num_dense)
        if dense is None or tuple(dense.shape) != shape:
            got = "none" if dense is None else list(dense.shape)
            raise InputError(f"{type(self).__name__}: dense must be {list(shape)}, got {got}")
        return dense


class BatchLike(Protocol):
    """What `forward_batch` reads of a batch; `megalith.data.Batch` has it."""

    @property
    def features(self) -> Any:
        """Columns of ids by name."""

    @property
    def dense(self) -> Tensor | None:
        """float [B, k]."""

    @property
    def time(self) -> float | None:
        """Seconds."""


def forward_batch(model: nn.Module, batch: BatchLike) -> Tensor:
    """The model's logits [B] for a `megalith.data.Batch`. The model may be wrapped, by DDP for instance."""
    logits: Tensor = model(batch.features, dense=batch.dense, time=batch.time)
    return logits


def mlp(sizes: Sequence[int], *, dropout: float = 0.0, last: bool = True) -> nn.Sequential:
    """Linear layers sizes[0] -> ... -> sizes[-1], ReLU and dropout between them.

    last: the last layer gives what it gives; False puts ReLU and dropout behind it too.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    if last:
        layers = layers[: -2 if dropout else -1]
    return nn.Sequential(*layers)


def join(rows: Tensor, dense: Tensor | None) -> Tensor:
    """Rows [B, w] and dense values [B, k], if any, side by side."""
    return rows if dense is None else torch.cat([rows, dense], 1)
