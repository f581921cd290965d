"""Batch, Samples and the reader contract, by way of MemoryReader."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from megalith import Ragged
from megalith.data import Batch, MemoryReader, Samples
from megalith.errors import InputError
from tests.data.support import assert_same_batches, check_shards, labels_of, rows_of


def samples(n: int) -> Samples:
    """Row i has label i, i % 3 ids that are i, one dense value i, and time 100 + i."""
    ids = Ragged.from_lists([[i] * (i % 3) for i in range(n)])
    numbers = torch.arange(n, dtype=torch.float32)
    return Samples({"f": ids}, numbers, numbers[:, None], numbers + 1, torch.arange(n) + 100)


def test_batches_have_the_size_asked_for_and_the_last_may_be_short() -> None:
    batches = list(MemoryReader(samples(7), batch_size=3))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert labels_of(batches) == list(range(7))
    assert batches[1].features["f"].to_lists() == [[], [4], [5, 5]]
    assert batches[1].dense.tolist() == [[3.0], [4.0], [5.0]]
    assert batches[1].weights.tolist() == [4.0, 5.0, 6.0]
    assert [batch.time for batch in batches] == [102, 105, 106]
    assert [len(batch) for batch in MemoryReader(samples(7), batch_size=3, drop_last=True)] == [3, 3]
    assert list(MemoryReader(samples(0), batch_size=3)) == []


@settings(max_examples=25)
@given(n=st.integers(2, 20), batch_size=st.integers(1, 20), shuffle=st.none() | st.integers(0, 99))
def test_resume_and_shards(n: int, batch_size: int, shuffle: int | None) -> None:
    data = samples(n)
    batch_size = min(batch_size, n - 1)
    check_resume_by_epoch(data, batch_size, shuffle)
    check_shards(lambda: MemoryReader(data, batch_size=batch_size, shuffle=shuffle))


def check_resume_by_epoch(data: Samples, batch_size: int, shuffle: int | None) -> None:
    """Two epochs, stopped anywhere, give the same batches."""
    reader = MemoryReader(data, batch_size=batch_size, shuffle=shuffle)
    uninterrupted = [*reader, *reader]
    for done, batch in enumerate(uninterrupted[:-1], 1):
        resumed = MemoryReader(data, batch_size=batch_size, shuffle=shuffle)
        resumed.seek(batch.position)
        rest = list(resumed)
        while len(rest) < len(uninterrupted) - done:
            rest += list(resumed)
        assert_same_batches(rest, uninterrupted[done:])


def test_each_epoch_is_shuffled_its_own_way() -> None:
    reader = MemoryReader(samples(50), batch_size=8, shuffle=3)
    one, two = labels_of(reader), labels_of(reader)
    assert sorted(one) == sorted(two) == list(range(50))
    assert one != two
    assert one == labels_of(MemoryReader(samples(50), batch_size=8, shuffle=3))
    assert one != labels_of(MemoryReader(samples(50), batch_size=8, shuffle=4))


def test_a_loop_that_was_left_is_continued_by_the_next() -> None:
    reader = MemoryReader(samples(10), batch_size=4)
    for batch in reader:
        assert batch.labels.tolist() == [0, 1, 2, 3]
        break
    assert labels_of(reader) == [4, 5, 6, 7, 8, 9]
    assert labels_of(reader) == list(range(10))


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ([], "position must be a dict, got list"),
        ({"epoch": 0, "row": 0}, r"belongs to shard None .* the reader is shard \[0, 1\]"),
        ({"epoch": 0, "row": 0, "shard": [0, 2]}, r"belongs to shard \[0, 2\]"),
        ({"epoch": 0, "row": 11, "shard": [0, 1]}, "'row' of the position is 11, above 10"),
        ({"epoch": 0, "row": -1, "shard": [0, 1]}, "'row' of a position must be an integer"),
        ({"epoch": 0, "row": True, "shard": [0, 1]}, "'row' of a position must be an integer"),
        ({"row": 0, "shard": [0, 1]}, "'epoch' of a position must be an integer of 0 or more, got None"),
    ],
)
def test_invalid_positions(position: object, message: str) -> None:
    reader = MemoryReader(samples(10), batch_size=4)
    with pytest.raises(InputError, match=message):
        reader.seek(position)  # type: ignore[arg-type]
    assert labels_of(reader) == list(range(10))


def test_a_data_loader_with_one_worker_gives_the_same_batches() -> None:
    reader = MemoryReader(samples(10), batch_size=4)
    loaded = list(DataLoader(reader, batch_size=None, num_workers=1))
    assert_same_batches(loaded, list(MemoryReader(samples(10), batch_size=4)))


def test_a_batch_can_be_moved_and_sent() -> None:
    batch = next(iter(MemoryReader(samples(5), batch_size=5)))
    moved = batch.to("cpu")
    assert isinstance(moved, Batch)
    assert rows_of([moved]) == rows_of([pickle.loads(pickle.dumps(batch))]) == rows_of([batch])


def test_a_sent_batch_carries_only_its_own_rows() -> None:
    reader = MemoryReader(samples(100_000), batch_size=1000)
    batch = next(iter(reader))
    sent = pickle.dumps(batch)
    assert len(sent) < 100_000
    assert rows_of([pickle.loads(sent)]) == rows_of([batch])


def test_a_worker_sends_batches_as_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    single = [Ragged.from_numpy(np.arange(i, i + 4)) for i in range(2)]
    weighted = Ragged.from_lists([[1], [2], [3], [4]], weights=[[0.5]] * 4)
    features = {"a": single[0], "b": single[1], "w": weighted, "t": torch.arange(4, dtype=torch.int32)}
    batch = Batch(features, torch.ones(4, 2), torch.ones(4, 1), time=3, position={"row": 4})
    monkeypatch.setattr("megalith.data.batch.get_worker_info", lambda: (0, 1))
    sent = pickle.dumps(batch)
    monkeypatch.undo()
    back = pickle.loads(sent)
    assert torch.equal(back.labels, batch.labels)
    assert [back.features[name].to_lists() for name in "abw"] == [features[name].to_lists() for name in "abw"]
    assert (back.time, back.position, back.weights) == (3, {"row": 4}, None)
    assert back.features["a"].row_splits is back.features["b"].row_splits
    assert back.features["w"].weights.tolist() == [0.5] * 4
    assert back.features["t"].dtype == torch.int32
    assert b"torch.storage" in sent, "the tensor of another type is sent as a tensor"


def test_columns_of_tensors_are_shuffled_and_joined_like_ragged_ones() -> None:
    rows = Samples({"f": torch.arange(10)}, torch.arange(10.0))
    batches = list(MemoryReader(rows, batch_size=4, shuffle=3))
    assert sorted(torch.cat([batch.features["f"] for batch in batches]).tolist()) == list(range(10))
    for batch in batches:
        assert batch.features["f"].tolist() == batch.labels.tolist() != list(range(len(batch)))
    assert Samples.concat([rows, rows]).features["f"].tolist() == [*range(10), *range(10)]


def test_selected_rows_keep_weights_of_ids() -> None:
    ids = Ragged.from_lists([[1, 2], [], [3]], weights=[[0.1, 0.2], [], [0.3]])
    picked = Samples({"f": ids}, torch.arange(3.0)).select(torch.tensor([2, 0, 2])).features["f"]
    assert picked.to_lists() == [[3], [1, 2], [3]]
    assert picked.weights is not None
    assert picked.weights.tolist() == pytest.approx([0.3, 0.1, 0.2, 0.3])


def test_importing_the_readers_imports_no_pyarrow() -> None:
    code = "import sys, megalith.data; print('pyarrow' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "False"
