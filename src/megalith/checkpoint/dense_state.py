"""A model as a checkpoint sees it: collections by module path, and everything dense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megalith.errors import CheckpointError, UsageError
from megalith.nn import EmbeddingCollection
from megalith.shards import Shards


def collections_of(model: nn.Module) -> dict[str, EmbeddingCollection]:
    """The collections of a model by module path ("" if the model is one)."""
    return {name: m for name, m in model.named_modules() if isinstance(m, EmbeddingCollection)}


def tables_of(collections: Mapping[str, EmbeddingCollection]) -> list[tuple[str, str, Shards]]:
    """The tables of this rank: collection path, name, and shards; those that collections share come once."""
    found: list[tuple[str, str, Shards]] = []
    seen: set[int] = set()
    for path, collection in collections.items():
        if id(collection.shards) not in seen:
            seen.add(id(collection.shards))
            found += [(path, name, collection.shards) for name in collection.shards.local]
    return found


def dense_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, without the collections' rows."""
    state: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingCollection):
            continue
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise UsageError(
                f"module {path!r} has extra state, which a checkpoint cannot hold: use progress="
            )
        own: dict[str, Any] = dict(module._parameters)
        transient = module._non_persistent_buffers_set
        own |= {name: b for name, b in module._buffers.items() if name not in transient}
        state |= {f"{path}.{name}".lstrip("."): t for name, t in own.items() if t is not None}
    return state


@dataclass(frozen=True)
class DenseFit:
    """Pairs of a model's tensor and a saved one that fit. missing: the model's that were not saved or do not
    fit; extra: saved ones without a place."""

    pairs: list[tuple[Tensor, Tensor]]
    missing: list[str]
    extra: list[str]

    def copy(self) -> None:
        """Copies the saved ones into the model."""
        for here, there in self.pairs:
            here.data.copy_(there)


def fit_dense(model: nn.Module, saved: Mapping[str, Tensor], allow_missing: bool = False) -> DenseFit:
    """Matches saved dense weights with a model's, by name; copies nothing.

    Raises CheckpointError naming what does not fit, unless allow_missing.
    """
    state = dense_state(model)
    missing, extra = sorted(set(state) - set(saved)), sorted(set(saved) - set(state))
    if (missing or extra) and not allow_missing:
        raise CheckpointError(
            f"dense weights do not fit this model: the checkpoint lacks {missing}, the model lacks {extra}"
        )
    pairs = []
    for name in sorted(set(state) & set(saved)):
        there, here = saved[name].shape, state[name].shape
        if there == here:
            pairs.append((state[name], saved[name]))
        elif allow_missing:
            missing.append(name)
        else:
            raise CheckpointError(f"dense weight {name!r} is {list(there)} when saved, {list(here)} here")
    return DenseFit(pairs, missing, extra)
