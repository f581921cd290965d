"""Batches that a thread reads ahead: the same, in order, and with the positions and errors of the reader."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

from megalith import Ragged
from megalith.data import Batch, CsvReader, MemoryReader, Reader, Samples, Schema, SyntheticReader
from megalith.data.reader import AHEAD, read_ahead
from megalith.distributed.ranks import Ranks
from megalith.training.batches import RunBatches, StepBatch
from tests.data.support import Row, rows_of


def threads() -> int:
    return sum(thread.name == "read-ahead" for thread in threading.enumerate())


def test_batches_are_those_of_the_reader() -> None:
    reader = SyntheticReader(batch_size=4, num_batches=7)
    expected = rows_of(reader)
    assert rows_of(read_ahead(reader)) == expected
    assert threads() == 0


def test_an_error_comes_after_the_batches_before_it() -> None:
    def broken() -> Iterator[Batch]:
        yield from SyntheticReader(batch_size=4, num_batches=AHEAD + 2)
        raise OSError("the disk is gone")

    found: list[Batch] = []
    with pytest.raises(OSError, match="disk"):
        found.extend(read_ahead(broken()))
    assert len(found) == AHEAD + 2
    assert threads() == 0


def test_a_loop_that_is_left_ends_the_thread() -> None:
    batches = read_ahead(SyntheticReader(batch_size=4))  # endless
    for _ in range(3):
        next(batches)
    assert threads() == 1
    batches.close()
    assert threads() == 0


def test_a_read_that_does_not_end_is_an_error_and_does_not_hold_up_the_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("megalith.data.reader.LEAVE_SECONDS", 0.05)
    go_on = threading.Event()

    class Stuck(SyntheticReader):
        def __iter__(self) -> Iterator[Batch]:
            go_on.wait(60)
            yield from super().__iter__()

    ranks = Ranks()
    ranks.timeout = 0.1
    batches = iter(RunBatches(Stuck(batch_size=4, num_batches=1), ranks, ahead=True))
    with pytest.raises(TimeoutError, match=r"Stuck: no batch was read within 0\.1 s: check the storage"):
        next(batches)
    assert "its thread still reads a batch" in caplog.text
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "read-ahead":
            thread.join(60)
    assert threads() == 0


@pytest.mark.parametrize("kind", ["memory", "synthetic"])
def test_a_run_continues_after_the_last_batch_it_has_seen(kind: str) -> None:
    def batches(ahead: bool) -> RunBatches:
        reader: Reader
        if kind == "memory":
            ids = Ragged.from_lists([[k] for k in range(23)])
            reader = MemoryReader(Samples({"item": ids}, torch.zeros(23)), batch_size=3, shuffle=5)
        else:
            reader = SyntheticReader(batch_size=3, num_batches=8)
        return RunBatches(reader, Ranks(), ahead=ahead)

    def some(run: RunBatches, n: int) -> list[Row]:
        return rows_of(step.batch for step in islice(run, n))

    plain, ahead, resumed = batches(False), batches(True), batches(True)
    for n in (3, 2, 99, 4, 99, 99):  # within an epoch, to its end, into the next ones
        expected = some(plain, n)
        assert some(ahead, n) == expected
        assert ahead.position() == plain.position()
        assert some(resumed, n) == expected
        position = resumed.position()
        resumed = batches(True)
        resumed.seek(position)
    assert threads() == 0


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_parts_of_a_step_have_each_row_once(parts: int) -> None:
    (batch,) = SyntheticReader(batch_size=5, num_batches=1)
    whole = rows_of([batch])
    every = range(parts)
    assert rows_of(StepBatch(batch, None).part(k, parts, every) for k in every) == whole
    own = range(4, 4 + parts)  # of a rank that has read its own rows
    assert rows_of(StepBatch(batch, [5, 5]).part(k, 9, own) for k in own) == whole


def test_a_rank_without_a_shard_reads_the_next_epoch_in_the_order_of_the_others(tmp_path: Path) -> None:
    """Shuffled files that two ranks had begun are continued by four."""
    for number in range(8):
        lines = "".join(f"{x}\n" for x in range(8 * number, 8 * number + 8))
        (tmp_path / f"{number}.csv").write_text("y\n" + lines)

    def batches(rank: int, size: int) -> RunBatches:
        ranks = Ranks()
        ranks.rank, ranks.size = rank, size
        schema = Schema(label="y", features={"f": "y"})
        return RunBatches(CsvReader(tmp_path, schema, batch_size=8, shuffle=1), ranks, shards=True)

    def labels(steps: Iterable[StepBatch]) -> list[float]:
        return [label for step in steps for label in step.batch.labels.tolist()]

    begun = [batches(rank, 2) for rank in range(2)]
    read = [label for each in begun for label in labels(each) + labels(islice(each, 2))]
    positions = [each._sharded.positions()[rank] for rank, each in enumerate(begun)]
    first, second = [], []
    for rank in range(4):
        each = batches(rank, 4)
        each.seek({"shards": positions})
        first += labels(each)
        second += labels(each)
    assert sorted(read + first) == sorted([*range(64)] * 2)
    assert sorted(second) == list(range(64))
