"""read_ahead: results in order, errors when they are due. The memory of a verified store is used again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from megalith.errors import CheckpointError
from megalith.storage.store import LocalStore, read_ahead


def test_results_come_in_order_from_another_thread() -> None:
    names: set[str] = set()

    def read(number: int) -> int:
        names.add(threading.current_thread().name)
        return number * number

    assert list(read_ahead(read, range(9))) == [n * n for n in range(9)]
    assert list(read_ahead(read, [])) == []
    assert threading.current_thread().name not in names


def test_an_error_is_raised_after_the_results_before_it() -> None:
    def read(number: int) -> int:
        if number == 3:
            raise OSError("3")
        return number

    results = read_ahead(read, range(100))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="3"):
        next(results)


def test_few_files_are_read_ahead_and_the_rest_is_not_read_after_an_end() -> None:
    read: list[int] = []
    results = read_ahead(lambda number: read.append(number), range(100))
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert len(read) <= 4


def test_a_verified_store_uses_the_memory_of_dropped_files_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    data = torch.arange(1 << 17, dtype=torch.int64)
    file = store.write("x", [data.numpy()])

    with store.local_copy([file], CheckpointError) as local:
        assert (local.where, local.address) == (store.where, store.address)
        first = local.read_file(file, CheckpointError)
        second = local.read_file(file, CheckpointError)
        assert first.data_ptr() != second.data_ptr()
        assert torch.equal(first.view(torch.int64), data)
        place = first.data_ptr()
        del first
        assert local.read_file(file, CheckpointError).data_ptr() == place
        assert torch.equal(second.view(torch.int64), data)
