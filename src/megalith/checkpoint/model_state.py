"""A model as a checkpoint sees it: its collections by module path, its dense weights, and its last save.

Each collection remembers the save that its rows come from (`CheckpointState.last_save`). A delta holds the
rows changed since that save, so it can only be added to that checkpoint, and only if that save is still the
last one there, the tip of the chain. It also remembers the routing that its tables were saved with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megalith.checkpoint.manifest import Manifest, Routing
from megalith.checkpoint.sharded_weights import copy_into, ranks_of_weights, reshard_fsdp
from megalith.distributed.dense_parameters import fsdp1_module
from megalith.distributed.ranks import Ranks
from megalith.errors import CheckpointError, InputError, UsageError
from megalith.nn import EmbeddingCollection
from megalith.shards import Shards
from megalith.storage.store import Store


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
    reshard_fsdp(model)
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


CONSUMER = "checkpoint"
"""The name under which tables track the rows changed since the last save."""


def check_idle(collections: Mapping[str, EmbeddingCollection]) -> None:
    """Raise if a save of one of the collections is in progress."""
    for path, collection in collections.items():
        if collection.checkpoint_state.save_in_progress is not None:
            raise UsageError(f"a save of collection {path!r} is in progress: call wait() on its handle first")


def set_busy(collection: EmbeddingCollection, job: object) -> None:
    """Record that a save of a collection begins."""
    collection.checkpoint_state.save_in_progress = job


def set_idle(collection: EmbeddingCollection, job: object) -> None:
    """Record that a save has ended, successfully or not. Does nothing if another save is in progress."""
    if collection.checkpoint_state.save_in_progress is job:
        collection.checkpoint_state.save_in_progress = None


def set_last_save(collections: Iterable[EmbeddingCollection], store: Store, id: str) -> None:
    """Record the save that the rows of these collections are now equal to."""
    for collection in collections:
        collection.checkpoint_state.last_save = (store.address, id)


def forget_last_save(collections: Iterable[EmbeddingCollection]) -> None:
    """Record that the rows are equal to no save, so that no delta can be added."""
    for collection in collections:
        collection.checkpoint_state.last_save = None


def check_last_save(collections: Iterable[EmbeddingCollection], store: Store, manifest: Manifest) -> None:
    """Raise unless a delta of these collections can be added to a checkpoint."""
    saves = {collection.checkpoint_state.last_save for collection in collections}
    save = saves.pop() if len(saves) == 1 else None
    if save is None or save[0] != store.address:
        last = "none" if save is None else save[0]
        raise UsageError(
            f"a delta can only be added to the checkpoint that this model last saved or loaded, which is "
            f"{last}, not {store.where}: save a full checkpoint there first"
        )
    if save[1] != manifest.tip:
        raise CheckpointError(
            f"{store.where} was changed since this model saved or loaded it: its last save is "
            f"{manifest.tip}, this model's rows come from {save[1]}; save a full checkpoint, or load it first"
        )


def track_changes(shards: Shards) -> None:
    """Track the rows that change from now on, and forget earlier changes."""
    shards.track(CONSUMER)
    shards.drain_touched(CONSUMER)


def ranks_of(model: nn.Module) -> Ranks:
    """Return the ranks that the tables of a model are spread over, or without tables its sharded weights."""
    collections = collections_of(model)
    groups = [c.shards.ranks for c in collections.values()]
    ranks = max(groups, key=lambda ranks: ranks.size, default=Ranks())
    if ranks.size > 1:
        return ranks
    sharing = ranks_of_weights(dense_state(model))
    if collections and sharing.size > 1:
        raise UsageError(
            f"the dense weights are sharded over {sharing.size} ranks, but the tables are LocalShards, so "
            "each rank has its own: build the collection from TableConfigs, or from SyncShards"
        )
    return sharing


def check_equal_options(ranks: Ranks, call: str, options: Mapping[str, Any]) -> None:
    """Raise on every rank unless all ranks pass equal options. A collective call."""
    everywhere = ranks.gather(dict(options))
    for rank, other in enumerate(everywhere):
        for name, value in everywhere[0].items():
            if other[name] != value:
                raise InputError(
                    f"{call}: rank 0 passes {name}={value!r}, but rank {rank} passes {other[name]!r}: pass "
                    "the same on every rank"
                )


def keep_routing(collection: EmbeddingCollection, table: str, routing: Routing) -> None:
    """Remember the routing that a table was saved with; with one shard nothing else records it."""
    collection.checkpoint_state.routing[table] = routing.dist_type, routing.block_size


def routing_of(shards: Shards, table: str, kept: Mapping[str, tuple[str, int | None]]) -> Routing:
    """Return the routing of a table, as a save or an export records it."""
    router = shards.router(table)
    if router is None:
        mode, block_size = kept.get(table, ("roundrobin", None))
        configured = shards.configs[table].dist_type or mode
        return Routing(configured, block_size=block_size if configured == mode else None)
    return Routing(router.mode, router.num_shards, router.block_size, router.skip_first)
