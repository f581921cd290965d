"""Chain: which checkpoint a model last saved or loaded, so that a delta continues that one and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

from megalith.checkpoint.manifest import Manifest
from megalith.distributed.ranks import RankGroup
from megalith.errors import CheckpointError, UsageError
from megalith.nn import EmbeddingCollection
from megalith.shards import Shards
from megalith.storage.store import Store

CONSUMER = "checkpoint"
"""Under which name tables remember what changed since the last save."""

T = TypeVar("T")


@dataclass(frozen=True)
class Tip:
    """The save that a model's rows come from: where it lies, and its id."""

    address: str
    id: str


_tips: WeakKeyDictionary[EmbeddingCollection, Tip] = WeakKeyDictionary()
_under_way: WeakKeyDictionary[EmbeddingCollection, object] = WeakKeyDictionary()


def check_idle(collections: Mapping[str, EmbeddingCollection]) -> None:
    """Raises UsageError if a save of one of them is under way."""
    for path, collection in collections.items():
        if collection in _under_way:
            raise UsageError(f"a save of collection {path!r} is under way: wait() for its handle first")


def set_busy(collection: EmbeddingCollection, job: object) -> None:
    """A save of a collection begins."""
    _under_way[collection] = job


def set_idle(collection: EmbeddingCollection, job: object) -> None:
    """That save has ended, well or not."""
    if _under_way.get(collection) is job:
        del _under_way[collection]


def set_tip(collections: Iterable[EmbeddingCollection], store: Store, id: str) -> None:
    """Remembers the save a model's rows now equal."""
    for collection in collections:
        _tips[collection] = Tip(store.address, id)


def forget_tip(collections: Iterable[EmbeddingCollection]) -> None:
    """The model's rows now equal no save: a delta has nothing to go on top of."""
    for collection in collections:
        _tips.pop(collection, None)


def check_tip(collections: Iterable[EmbeddingCollection], store: Store, manifest: Manifest) -> None:
    """Raises unless a delta of this model may go on top of this checkpoint."""
    tips = {_tips.get(collection) for collection in collections}
    tip = tips.pop() if len(tips) == 1 else None
    if tip is None or tip.address != store.address:
        last = "none" if tip is None else tip.address
        raise UsageError(
            f"a delta goes on top of what this model last saved or loaded, which is {last}, not "
            f"{store.where}: save a full checkpoint there first"
        )
    if tip.id != manifest.tip:
        raise CheckpointError(
            f"{store.where} was changed since this model saved or loaded it: its last save is "
            f"{manifest.tip}, this model's rows come from {tip.id}; save a full checkpoint, or load it first"
        )


def start_over(shards: Shards) -> None:
    """From now on tables remember what changes."""
    shards.track(CONSUMER)
    shards.drain_touched(CONSUMER)


def ranks_of(collections: Mapping[str, EmbeddingCollection]) -> RankGroup:
    """The ranks a model's tables are spread over."""
    spread = [c.shards.ranks for c in collections.values()]
    return max(spread, key=lambda ranks: ranks.size, default=RankGroup())


def agree(ranks: RankGroup, work: Callable[[], T]) -> T:
    """Does some work on every rank; if it fails on one, raises on all."""
    if ranks.size == 1:
        return work()
    try:
        result, problem = work(), None
    except Exception as error:
        result, problem = None, error
    said = ranks.gather(None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    for rank, text in enumerate(said):
        if text is not None:
            raise CheckpointError(f"rank {rank}: {text}")
    return result  # type: ignore[return-value]
