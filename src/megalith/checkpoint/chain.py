"""Chain: a base and the deltas on top of it, and which of them a model may continue.

Each collection remembers the save that its rows come from (`CheckpointState.last_save`). A delta holds the
rows changed since that save, so it can only be added to that checkpoint, and only if that save is still the
last one there, the tip of the chain. It also remembers the routing that its tables were saved with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from megalith.checkpoint.dense_state import collections_of, dense_state
from megalith.checkpoint.manifest import Manifest, Routing
from megalith.checkpoint.sharded_weights import ranks_of_weights
from megalith.distributed.ranks import RankGroup
from megalith.errors import CheckpointError, InputError, UsageError
from megalith.nn import EmbeddingCollection
from megalith.shards import Shards
from megalith.storage.store import Store

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


def ranks_of(model: nn.Module) -> RankGroup:
    """Return the ranks that the tables of a model are spread over, or without tables its sharded weights."""
    collections = collections_of(model)
    groups = [c.shards.ranks for c in collections.values()]
    ranks = max(groups, key=lambda ranks: ranks.size, default=RankGroup())
    if ranks.size > 1:
        return ranks
    sharing = ranks_of_weights(dense_state(model))
    if collections and sharing.size > 1:
        raise UsageError(
            f"the dense weights are sharded over {sharing.size} ranks, but the tables are LocalShards, so "
            "each rank has its own: build the collection from TableConfigs, or from SyncShards"
        )
    return sharing


def check_equal_options(ranks: RankGroup, call: str, options: Mapping[str, Any]) -> None:
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
