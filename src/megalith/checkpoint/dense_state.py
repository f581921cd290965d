"""A model as a checkpoint sees it: its collections by module path, and its dense weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megalith.checkpoint.sharded_weights import copy_into, reshard
from megalith.distributed.dense_broadcast import fsdp1_module
from megalith.errors import CheckpointError, InputError, UsageError
from megalith.nn import EmbeddingCollection
from megalith.shards import Shards


def collections_of(model: nn.Module) -> dict[str, EmbeddingCollection]:
    """Find the collections of a model."""
    if not isinstance(model, nn.Module):
        raise InputError(f"a checkpoint is of an nn.Module, got {type(model).__name__}")
    return {name: m for name, m in model.named_modules() if isinstance(m, EmbeddingCollection)}


def tables_of(collections: Mapping[str, EmbeddingCollection]) -> list[tuple[str, str, Shards]]:
    """List the tables of a model."""
    found: list[tuple[str, str, Shards]] = []
    seen: set[int] = set()
    for path, collection in collections.items():
        if id(collection.shards) not in seen:
            seen.add(id(collection.shards))
            found += [(path, name, collection.shards) for name in collection.shards.configs]
    return found


def dense_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the dense weights of a model: what its checkpoint holds besides the rows of its collections."""
    flattened = fsdp1_module(model)
    if flattened is not None:
        raise UsageError(
            f"module {flattened!r} is a FullyShardedDataParallel (FSDP1), whose weights a checkpoint cannot "
            "hold: shard it with torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
    reshard(model)
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
class DenseMatch:
    """Saved dense weights matched with those of a model."""

    pairs: list[tuple[Tensor, Tensor]]  # Pairs of a tensor of the model and the saved tensor for it
    missing: list[str]  # Weights of the model that were not saved, or were saved with another shape
    extra: list[str]  # Saved weights that the model does not have

    def copy(self) -> None:
        """Copy the saved tensors into the model; into a sharded weight, the part of this rank."""
        for here, there in self.pairs:
            copy_into(here, there)


def match_dense(model: nn.Module, saved: Mapping[str, Tensor], allow_missing: bool = False) -> DenseMatch:
    """Match saved dense weights with those of a model, by name, without copying them."""
    state = dense_state(model)
    missing, extra = sorted(set(state) - set(saved)), sorted(set(saved) - set(state))
    if (missing or extra) and not allow_missing:
        raise CheckpointError(
            f"the dense weights do not match this model: the checkpoint lacks {missing}, the model lacks "
            f"{extra}"
        )
    pairs = []
    for name in sorted(set(state) & set(saved)):
        there, here = saved[name].shape, state[name].shape
        if there == here:
            pairs.append((state[name], saved[name]))
        elif allow_missing:
            missing.append(name)
        else:
            raise CheckpointError(
                f"dense weight {name!r} was saved with shape {list(there)}, the model's is {list(here)}"
            )
    return DenseMatch(pairs, missing, extra)
