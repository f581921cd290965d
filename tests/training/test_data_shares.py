"""The shares of an epoch: who reads what, positions, and epochs that another placement began."""

from __future__ import annotations

import pytest
import torch

from megalith.data import MemoryReader, Samples
from megalith.errors import InputError
from megalith.ragged import Ragged
from megalith.training.worker_batches import SHARES_PER_WORKER, DataShares


def reader(rows: int = 20, batch_size: int = 3, shuffle: int | None = 1) -> MemoryReader:
    ids = torch.arange(rows)
    columns = Samples({"x": Ragged(ids, torch.arange(rows + 1))}, torch.ones(rows))
    return MemoryReader(columns, batch_size=batch_size, shuffle=shuffle)


def read(shares: DataShares, source: MemoryReader, index: int, batches: int | None = None) -> list[int]:
    """Reads a share as a worker does; returns the ids."""
    share = shares.share(index)
    own = source.shard(share.index, share.count)
    own.seek(share.position)
    found: list[int] = []
    for number, batch in enumerate(own):
        if number == batches:
            break
        found += batch.features["x"].values.tolist()
        shares.record(index, batch.position)
    return found


def read_all(shares: DataShares, source: MemoryReader) -> list[int]:
    found: list[int] = []
    while (share := shares.take()) is not None:
        found += read(shares, source, share.index)
    return found


def test_every_row_is_in_one_share_and_epochs_have_another_order() -> None:
    source, orders = reader(), []
    shares = DataShares(source, split=True)
    for epoch in range(2):
        shares.begin(epoch, workers=2)
        assert shares.share(0).count == 2 * SHARES_PER_WORKER
        orders.append(read_all(shares, source))
        shares.end(epoch + 1)
        assert shares.position() == {"epoch": epoch + 1, "row": 0, "shard": [0, 1]}
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20))
    assert orders[0] != orders[1]


def test_a_share_that_is_given_back_continues_where_it_was() -> None:
    source = reader(shuffle=None)
    shares = DataShares(source, split=True)
    shares.begin(0, workers=1)
    first = shares.take()
    assert first is not None
    begun = read(shares, source, first.index, batches=1)
    shares.give_back(first.index)
    again = shares.take()
    assert again is not None
    assert again.index == first.index
    assert begun + read(shares, source, again.index) == list(range(0, 20, 4))


def test_an_epoch_continues_at_its_position_with_another_number_of_workers() -> None:
    source = reader()
    shares = DataShares(source, split=True)
    shares.begin(0, workers=1)
    done = read(shares, source, 0) + read(shares, source, 1, batches=1)
    saved = shares.position()
    resumed = DataShares(source, split=True)
    resumed.seek(saved)
    resumed.begin(0, workers=7)
    assert sorted(done + read_all(resumed, source)) == list(range(20))


def test_an_epoch_that_one_process_began_is_one_share() -> None:
    source = reader()
    first = next(iter(source))
    shares = DataShares(source, split=True)
    shares.seek(first.position)
    assert shares.position() == first.position
    shares.begin(0, workers=2)
    rest = read(shares, source, 0)
    assert shares.take() is not None
    assert shares.take() is None
    assert sorted(rest + first.features["x"].values.tolist()) == list(range(20))
    shares.end(1)
    shares.begin(1, workers=2)
    assert shares.share(0).count == 2 * SHARES_PER_WORKER


def test_the_start_of_a_later_epoch_is_read_in_shares() -> None:
    shares = DataShares(reader(), split=True)
    shares.seek({"epoch": 3, "row": 0, "shard": [0, 1]})
    assert shares.position()["epoch"] == 3
    shares.begin(3, workers=1)
    assert shares.share(0).count == SHARES_PER_WORKER
    assert shares.share(0).position["epoch"] == 3


def test_wrong_positions_raise() -> None:
    for position in ({"shards": []}, {"shards": [1]}, {"row": 5}, 3):
        with pytest.raises(InputError):
            DataShares(reader(), split=True).seek(position)  # type: ignore[arg-type]
