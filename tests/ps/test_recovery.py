"""The log of a server: what was recorded is applied again with the same bits, and nothing twice.

Servers end here by being forgotten: nothing is closed or flushed, as with kill -9. Real processes are killed
in `worker/modes_tests.py`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megalith import Adagrad, TableConfig, checkpoint
from megalith.errors import CheckpointError
from megalith.ps import update_log
from megalith.ps.launch import _within
from megalith.ps.messages import ServerWrite, SpaceSpec
from megalith.ps.recovery import Recovery
from megalith.ps.table_space import TableSpace
from megalith.ps.update_log import UpdateLog, encode_record, read_records

TABLE = TableConfig("t", dim=2, optimizer=Adagrad(0.1))


class Saves:
    """Stands for a store of checkpoints: the rows of each save by its id, of which the last is there."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Any]] = {}

    def save(self, space: TableSpace, id: str, *, complete: bool = True) -> None:
        """What a save does on a server."""
        chunks = list(space.part.shards.scan("t"))
        assert space.part.recovery is not None
        space.part.recovery.frozen(id, "here")
        if complete:
            self.rows = {id: chunks}
        space.part.recovery.ended(id, complete=complete)

    def restore(self, part: Any, place: str, *, only: str) -> str | None:
        if only in self.rows:
            for chunk in self.rows[only]:
                part.shards.restore("t", chunk)
        return next(iter(self.rows), None)


def space(
    folder: Path, saves: Saves, *, log: str = "sync", workers: int = 1, sync: bool = False
) -> TableSpace:
    """A server with the log of a folder; workers join it, or join it again."""
    recovery = Recovery(str(folder), log, saves.restore)
    wires = ("float32", "float32")
    made = TableSpace(SpaceSpec([TABLE], "cpu", 0, wires, sync, None, workers, 5.0, "", recovery), 0, 1)
    made.recover(folder)
    for worker in range(workers):
        made.join(worker, "s")
    return made


def push(number: int, step: int = 0) -> ServerWrite:
    ids = np.arange(number % 3, number % 3 + 2)
    grads = (np.arange(4, dtype=np.float32) + number) / 7
    header = {
        "counts": [2],
        "step": step,
        "time": 5 + number,
        "scale": 0.3,
        "clip_norm": 0.0,
        "rates": {"t": [0.1]},
    }
    return ServerWrite("push", header, {"ids": ids, "grads": grads.view(np.uint8)})


def write(made: TableSpace, *writes: tuple[int, int, ServerWrite]) -> list[Any]:
    """Makes writes of (worker, number) at the same time."""

    async def together() -> list[Any]:
        calls = [made.write(worker, "s", number, each) for worker, number, each in writes]
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(together())


def rows(made: TableSpace) -> dict[int, list[Any]]:
    found = {}
    for chunk in made.part.shards.scan("t"):
        columns = [chunk.rows, *chunk.state.values()]
        for n, id in enumerate(chunk.ids.tolist()):
            found[id] = [*(column[n].tolist() for column in columns), int(chunk.time[n])]
    return found


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    first, second = push(1), ServerWrite("assign", {"x": [1 / 3, None]}, {"a": np.zeros((0, 2), np.float32)})
    path = tmp_path / "log"
    path.write_bytes(b"".join(encode_record(3, 9, first) + encode_record(4, 10, second)))
    found = list(read_records(path, last=True))
    assert [(worker, number, each.kind) for worker, number, each in found] == [
        (3, 9, "push"),
        (4, 10, "assign"),
    ]
    for (_, _, read), written in zip(found, (first, second), strict=True):
        assert read.header == written.header
        assert {k: (x.dtype, x.tolist()) for k, x in read.arrays.items()} == {
            k: (x.dtype, x.tolist()) for k, x in written.arrays.items()
        }
    assert found[1][2].arrays["a"].shape == (0, 2)


def test_a_push_takes_8_bytes_per_id_and_4_per_number_in_the_log() -> None:
    """As the guide on sizes says, besides a header."""
    ids, grads = np.zeros(10_000, np.int64), np.zeros(10_000 * 16 * 4, np.uint8)
    record = encode_record(1, 1, ServerWrite("push", {}, {"ids": ids, "grads": grads}))
    assert sum(map(len, record)) == pytest.approx(10_000 * (8 + 4 * 16), rel=0.001)


@example(cut=0, flip=281)  # the size of the first record, which then seems to be incomplete
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 400), flip=st.integers(0, 10_000))
def test_a_damaged_log_raises_or_loses_its_last_record_only(tmp_path: Path, cut: int, flip: int) -> None:
    data = bytearray(b"".join(encode_record(0, 1, push(1)) + encode_record(0, 2, push(2))))
    size = len(b"".join(encode_record(0, 1, push(1))))
    path = tmp_path / "log"
    path.write_bytes(data[: len(data) - cut])
    found = [number for _, number, _ in read_records(path, last=True)]
    assert found == [number for number, end in ((1, size), (2, len(data))) if len(data) - cut >= end]
    assert path.stat().st_size == size * len(found)  # what is incomplete is removed
    if 0 < cut < size:
        path.write_bytes(data[: len(data) - cut])
        with pytest.raises(CheckpointError, match="damaged"):
            list(read_records(path, last=False))
    data[flip % size] ^= 1 << flip % 8
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        list(read_records(path, last=True))


@pytest.mark.parametrize("log", ["none", "sync"])
def test_touched_ids_from_before_a_save_are_known_after_it(tmp_path: Path, log: str) -> None:
    saves = Saves()
    first = space(tmp_path, saves, log=log)
    track, remove = ServerWrite("track", {"consumer": "sync"}), ServerWrite("remove", {"counts": [1]})
    remove.arrays["ids"] = np.array([2])
    write(first, (0, 1, track), (0, 2, push(1)), (0, 3, remove))
    saves.save(first, "x")
    again = space(tmp_path, saves, log=log)
    updated, removed = again.part.shards.drain_touched("sync")["t"]
    assert (updated.tolist(), removed.tolist()) == ([1], [2])


events = st.lists(st.sampled_from(["push", "push", "again", "end", "save", "failed save"]), max_size=12)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(work=events)
def test_a_server_that_ends_at_any_time_continues_with_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, work: Sequence[str]
) -> None:
    folder, saves, number = tmp_path_factory.mktemp("log"), Saves(), 0
    made, expected = space(folder, saves), TableSpace(space(folder / "x", saves).spec, 0, 1)
    expected.join(0, "s")
    for position, event in enumerate(work):
        if event == "push":
            number += 1
            write(made, (0, number, push(number, number)))
            write(expected, (0, number, push(number, number)))
        elif event == "again" and number:
            write(made, (0, number, push(number, number)))
        elif event == "end":
            made = space(folder, saves)
        elif event in ("save", "failed save"):
            saves.save(made, f"s{position}", complete=event == "save")
        assert made.members[0].accepted == number
        assert made.step == (number if number else -1)
        assert rows(made) == rows(expected)
    assert rows(space(folder, saves)) == rows(expected)


def test_a_round_in_progress_is_in_the_log(tmp_path: Path) -> None:
    """A server ends after one of two workers has pushed, once before and once after a save in between."""
    saves, expected = Saves(), TableSpace(space(tmp_path / "x", Saves(), workers=2, sync=True).spec, 0, 1)
    for worker in (0, 1):
        expected.join(worker, "s")
    write(expected, (0, 1, push(1)), (1, 1, push(2)))
    for saved in (False, True):
        made = space(tmp_path / str(saved), saves, workers=2, sync=True)

        async def one(made: TableSpace = made, saved: bool = saved) -> None:
            waiting = asyncio.ensure_future(made.write(0, "s", 1, push(1)))
            await asyncio.sleep(0)
            if saved:
                saves.save(made, "during")
            waiting.cancel()

        asyncio.run(one())
        again = space(tmp_path / str(saved), saves, workers=2, sync=True)
        assert rows(again) == {}
        # Worker 0 does not know whether its push arrived, and sends it again.
        assert write(again, (0, 1, push(1)), (1, 1, push(2))) == [None, None]
        assert rows(again) == rows(expected)
        assert rows(space(tmp_path / str(saved), saves, workers=2, sync=True)) == rows(expected)


def test_workers_that_left_are_not_waited_for_after_a_restart(tmp_path: Path) -> None:
    made = space(tmp_path, Saves(), workers=2, sync=True)
    made.remove(1)
    again = TableSpace(made.spec, 0, 1)
    again.recover(tmp_path)
    again.join(0, "s")
    assert write(again, (0, 1, push(1))) == [None]
    assert rows(again)


def test_an_asynchronous_log_loses_what_it_had_not_written(tmp_path: Path) -> None:
    made = space(tmp_path, Saves(), log="async")
    write(made, (0, 1, push(1)), (0, 2, push(2)))
    made.flush_log()  # what the server does every 0.2 s
    before = rows(made)
    write(made, (0, 3, push(3)))
    again = space(tmp_path, Saves(), log="async")
    assert rows(again) == before
    assert again.join(0, "s", 4).accepted == 2  # write 3 was answered, and is lost
    write(again, (0, 4, push(4)))
    assert again.members[0].done == 4


def test_without_a_log_a_server_has_the_rows_of_the_last_checkpoint(tmp_path: Path) -> None:
    saves = Saves()
    made = space(tmp_path, saves, log="none")
    write(made, (0, 1, push(1)))
    before = rows(made)
    saves.save(made, "one")
    write(made, (0, 2, push(2)))
    again = space(tmp_path, saves, log="none")
    assert rows(again) == before
    assert again.members[0].accepted == 1


def test_consumers_of_touched_rows_are_tracked_again(tmp_path: Path) -> None:
    saves = Saves()
    made = space(tmp_path, saves)
    write(made, (0, 1, ServerWrite("track", {"consumer": "early"})), (0, 2, push(1)))
    saves.save(made, "one")
    write(made, (0, 3, ServerWrite("track", {"consumer": "late"})), (0, 4, push(2)))
    again = space(tmp_path, saves)
    assert {int(id) for id in again.part.shards.drain_touched("early")["t"][0]} >= {2, 3}
    assert again.part.shards.drain_touched("late")["t"][0].sort().values.tolist() == [2, 3]


def test_a_log_without_its_checkpoint_raises(tmp_path: Path) -> None:
    saves = Saves()
    made = space(tmp_path, saves)
    write(made, (0, 1, push(1)))
    saves.save(made, "one")
    saves.rows = {"another": []}
    with pytest.raises(CheckpointError, match="checkpoint that is missing: one"):
        space(tmp_path, saves)


def test_a_full_disk_fails_the_write_and_nothing_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = space(tmp_path, Saves())

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(UpdateLog, "append", full)
        (error,) = write(made, (0, 1, push(1)))
    assert "no space left" in str(error)
    assert rows(made) == {}
    assert write(made, (0, 2, push(2))) == [None]
    assert torch.tensor(list(rows(made))).sort().values.tolist() == [2, 3]


def test_a_part_of_a_record_does_not_stay_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, write = UpdateLog(tmp_path / "log", flushed=True), os.write
    log.begin_segment()
    log.append(0, 1, ServerWrite("clear", {"tables": []}))

    def full(file: int, data: memoryview) -> int:
        if len(data) < 50:
            raise OSError(28, "No space left on device")
        return write(file, data[: len(data) - 40])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            log.append(0, 2, ServerWrite("clear", {"tables": []}))
    log.append(0, 3, ServerWrite("clear", {"tables": []}))  # there is room again
    log.close()
    found = read_records(tmp_path / "log" / "log-00000000.bin", last=True)
    assert [number for _, number, _ in found] == [1, 3]


def test_a_log_where_files_are_synced_with_their_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS."""
    monkeypatch.delattr("os.fdatasync")
    log = UpdateLog(tmp_path / "log", flushed=True)
    log.begin_segment()
    log.append(0, 1, push(1))
    log.sync()
    assert [number for _, number, _ in log.records(0)] == [1]


def test_old_segments_are_deleted_by_a_complete_save(tmp_path: Path) -> None:
    saves = Saves()
    made = space(tmp_path, saves)
    for number in range(1, 4):
        write(made, (0, number, push(number)))
        saves.save(made, f"s{number}")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["log-00000003.bin", "point-s3.json"]
    assert checkpoint.recovery(tmp_path).folder("tables", 1, 2) == tmp_path / "tables" / "server-1-of-2"


def test_an_asynchronous_log_that_cannot_be_written_raises_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = Saves()
    made = space(tmp_path, saves, log="async")
    write(made, (0, 1, push(1)))
    with monkeypatch.context() as patch:
        patch.setattr(update_log, "_write_all", no_room)
        made.flush_log()
        (error,) = write(made, (0, 2, push(2)))  # it is not applied, because it might be lost
        assert isinstance(error, OSError)
        made.flush_log()
    with pytest.raises(OSError, match="No space left"):  # a read; it also writes what is left
        asyncio.run(made.wait_for(0, "s", 2))
    asyncio.run(made.wait_for(0, "s", 2))
    assert write(made, (0, 3, push(3))) == [None]
    made.flush_log()
    assert rows(space(tmp_path, saves, log="async")) == rows(made)


def no_room(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_calls_that_do_not_return_are_left_behind() -> None:
    """As those of a Ray that has ended."""
    never = threading.Event()
    assert not _within(0.01, never.wait)
    never.set()
    assert _within(60.0, never.wait)
    with pytest.raises(OSError, match="disk is full"):
        _within(60.0, lambda: _raise(OSError("disk is full")))


def _raise(error: Exception) -> None:
    raise error
