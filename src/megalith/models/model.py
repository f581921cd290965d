"""Model: the base class of the example models, a lookup followed by a dense part.

`forward` looks up the ids; `score` is the dense part, from float tensors to logits, which `compile` passes to
torch.compile.
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
from megalith.nn.compiled_batch import column_of, real_places
from megalith.ops import checks
from megalith.ragged import Ragged


class Model(nn.Module):
    """Computes one logit per example from features and, if the model has any, dense values.

    Args:
        num_dense: The number of dense values of an example, 0 for none.

    Attributes:
        embeddings: The EmbeddingCollection.
        masks: FirstN features by name of their mask, for models that need to know which positions hold an id.

    Raises:
        InputError: If `num_dense` is not an integer >= 0.
    """

    embeddings: EmbeddingCollection
    masks: Mapping[str, str] = MappingProxyType({})

    def __init__(self, *, num_dense: int = 0) -> None:
        super().__init__()
        if isinstance(num_dense, bool) or not isinstance(num_dense, int) or num_dense < 0:
            raise InputError(f"{type(self).__name__}: num_dense must be an integer >= 0, got {num_dense!r}")
        self.num_dense = num_dense

    def forward(self, features: Any, dense: Tensor | None = None, time: float | None = None) -> Tensor:
        """Return the logits, float [B].

        Args:
            features: As for EmbeddingCollection.
            dense: float [B, num_dense]; a model without dense values ignores it.
            time: Seconds; the last-update time of the rows that this forward trains.

        Returns:
            The logits; their sigmoid is the predicted probability.

        Raises:
            InputError: If dense is missing or has another shape.
        """
        rows = self.embed(features, time)
        return self.score(rows, self._dense(dense, rows))

    def embed(self, features: Any, time: float | None) -> dict[str, Tensor]:
        """Return the input of `score`: the embeddings, and a mask bool [B, n] for each of `masks`.

        Args:
            features: As for EmbeddingCollection.
            time: As for `forward`.

        Returns:
            The outputs of the collection, and the masks, by name.
        """
        rows: dict[str, Tensor] = self.embeddings(features, time=time)
        if self.masks:
            columns = features if isinstance(features, Mapping) else Ragged.from_keyed(features)
            known = {feature.name: feature for feature in self.embeddings.features}
            for name, feature in self.masks.items():
                rows[name] = real_places(known[feature], column_of(known[feature], columns[feature]))
        return rows

    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        """Return the logits, float [B].

        Args:
            rows: The result of `embed`.
            dense: float [B, num_dense], or None for a model without dense values.

        Returns:
            The logits.
        """
        raise NotImplementedError

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the dense part in place.

        Args:
            args: As for torch.compile.
            options: As for torch.compile.
        """
        self.score = torch.compile(self.score, *args, **options)  # type: ignore[method-assign]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those that `embeddings.step` would apply.

        Args:
            set_to_none: As for `torch.nn.Module.zero_grad`.
        """
        super().zero_grad(set_to_none)
        self.embeddings.zero_grad(set_to_none)

    def _dense(self, dense: Tensor | None, rows: dict[str, Tensor]) -> Tensor | None:
        if self.num_dense == 0:
            return None
        first: Tensor | list[Tensor] = next(iter(rows.values()))  # a layout of kind "none" gives a list
        size = (first[0] if isinstance(first, list) else first).shape[0]
        shape = (size, self.num_dense)
        if not isinstance(dense, Tensor) or tuple(dense.shape) != shape or not dense.is_floating_point():
            got = f"{dense.dtype} {list(dense.shape)}" if isinstance(dense, Tensor) else repr(dense)[:100]
            raise InputError(f"{type(self).__name__}: dense must be floats {list(shape)}, got {got}")
        return dense


class BatchLike(Protocol):
    """The part of a batch that `forward_batch` reads; `megalith.data.Batch` has it."""

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
    """Return the logits of a model for a batch, float [B].

    Args:
        model: The model. It may be wrapped, e.g. by DDP.
        batch: A `megalith.data.Batch`, or an object with `features`, `dense` and `time`.

    Returns:
        The logits, float [B].

    Raises:
        InputError: The batch is of another kind, or it does not match the model.
    """
    checks.instance(model, nn.Module, "forward_batch: model")
    if not all(hasattr(batch, name) for name in ("features", "dense", "time")):
        raise InputError(
            "forward_batch: batch must have features, dense and time, as a Batch has; "
            f"got {type(batch).__name__}"
        )
    logits: Tensor = model(batch.features, dense=batch.dense, time=batch.time)
    return logits


def mlp(sizes: Sequence[int], *, dropout: float = 0.0, last: bool = True) -> nn.Sequential:
    """Return linear layers sizes[0] -> ... -> sizes[-1] with ReLU and dropout between them."""
    checks.sizes(sizes, "widths of layers")
    if not 0 <= checks.number(dropout, "dropout") < 1:
        raise InputError(f"dropout must be from 0 to below 1, got {dropout}")
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    if last:
        layers = layers[: -2 if dropout else -1]
    return nn.Sequential(*layers)


def join(rows: Tensor, dense: Tensor | None) -> Tensor:
    # rows: float [B, w]; dense: float [B, k]; returns: float [B, w + k].
    return rows if dense is None else torch.cat([rows, dense], 1)
