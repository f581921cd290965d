"""What tests of readers share: batches as plain rows, and the contract every reader keeps."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from megalith.data import Batch, Reader

Row = tuple[Any, ...]


def rows_of(batches: Iterable[Batch]) -> list[Row]:
    """Each row as (label, dense, weight, ids by feature); NaN labels as None."""
    rows: list[Row] = []
    for batch in batches:
        features = {name: ragged.to_lists() for name, ragged in batch.features.items()}
        for i, label in enumerate(batch.labels.tolist()):
            dense = None if batch.dense is None else tuple(batch.dense[i].tolist())
            weight = None if batch.weights is None else batch.weights[i].item()
            ids = tuple((name, tuple(lists[i])) for name, lists in features.items())
            rows.append((None if math.isnan(label) else label, dense, weight, ids))
    return rows


def labels_of(batches: Iterable[Batch]) -> list[float]:
    return [label for batch in batches for label in batch.labels.tolist()]


def assert_same_batches(one: list[Batch], two: list[Batch]) -> None:
    assert [len(batch) for batch in one] == [len(batch) for batch in two]
    assert rows_of(one) == rows_of(two)
    assert [batch.time for batch in one] == [batch.time for batch in two]
    assert [batch.position for batch in one] == [batch.position for batch in two]


def check_resume(make: Callable[[], Reader]) -> None:
    """From every batch's position, through JSON, a new reader continues without a difference.

    It counts exactly the bad rows that the first one had not passed there.
    """
    whole = make()
    before, uninterrupted = [], []
    for batch in whole:
        uninterrupted.append(batch)
        before.append(Counter(whole.skipped_before))
    assert whole.skipped_before == whole.skipped
    assert len(uninterrupted) > 1
    for done, batch in enumerate(uninterrupted, 1):
        reader = make()
        reader.seek(json.loads(json.dumps(batch.position)))
        assert_same_batches(list(reader), uninterrupted[done:])
        assert before[done - 1] + reader.skipped == whole.skipped
        assert len(list(reader)) == len(uninterrupted), "the next epoch is a whole one"
    reader = make()
    first = next(iter(reader))
    assert reader.position == first.position == uninterrupted[0].position
    assert_same_batches(list(reader), uninterrupted[1:])


def check_shards(make: Callable[[], Reader], worlds: Iterable[int] = (1, 2, 3, 7)) -> None:
    """Ranks' rows are disjoint and together everything; each shard can be resumed."""
    everything = sorted(rows_of(make()), key=repr)
    assert len(set(map(repr, everything))) == len(everything), "rows of this test must differ"
    for world in worlds:
        shards = [rows_of(make().shard(rank, world)) for rank in range(world)]
        assert sorted((row for shard in shards for row in shard), key=repr) == everything
    if len(list(make().shard(1, 2))) > 1:
        check_resume(lambda: make().shard(1, 2))


def check_appended(make: Callable[[], Reader], append: Callable[[], None], batches: list[int]) -> None:
    """Shards that have read some batches each continue with appended files: no row is lost or repeated."""
    read: list[Row] = []
    positions = []
    for rank, number in enumerate(batches):
        shard = make().shard(rank, len(batches))
        position = shard.position
        for batch in islice(shard, number):
            read += rows_of([batch])
            position = batch.position
        positions.append(json.loads(json.dumps(position)))
    append()
    for rank, position in enumerate(positions):
        shard = make().shard(rank, len(batches))
        shard.seek(position)
        read += rows_of(shard)
        assert shard.position == make().shard(rank, len(batches)).position, "the next epoch is a new one"
    assert sorted(read, key=repr) == sorted(rows_of(make()), key=repr)
