"""Checkpoints carry what policies need: counts, steps, and counts of ids without a row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalith import SGD, Capacity, EmbeddingCollection, Feature, MinCount, TableConfig, checkpoint
from megalith.checkpoint.manifest import Manifest
from megalith.errors import CheckpointError
from megalith.table import Table


def make_model() -> EmbeddingCollection:
    config = TableConfig(
        "t", dim=2, optimizer=SGD(0.1), admission=MinCount(3), eviction=Capacity(100, score="lfu")
    )
    return EmbeddingCollection([config], [Feature("t", "t")])


def train(table: Table, ids: list[int], step: int) -> None:
    table.apply_gradients(torch.tensor(ids), torch.ones(len(ids), 2), step=step, time=step)


def contents(table: Table) -> dict[int, tuple[int, int, int]]:
    (chunk,) = table.scan()
    assert chunk.count is not None
    assert chunk.step is not None
    columns = zip(chunk.time.tolist(), chunk.count.tolist(), chunk.step.tolist(), strict=True)
    return dict(zip(chunk.ids.tolist(), columns, strict=True))


def trained() -> EmbeddingCollection:
    model = make_model()
    table = model.tables["t"]
    train(table, [1, 1, 1, 2, 2, 3], 4)
    train(table, [1, 3], 5)
    return model


def test_a_checkpoint_restores_counts_steps_and_pending_ids(tmp_path: Path) -> None:
    model, loaded = trained(), make_model()
    checkpoint.save(model, tmp_path)

    checkpoint.load(loaded, tmp_path)

    assert contents(loaded.tables["t"]) == {1: (5, 2, 5)}
    assert [x.tolist() for x in loaded.tables["t"].pending()] == [[2, 3], [2, 2]]
    assert not checkpoint.verify(tmp_path).problems


def test_a_delta_replaces_the_pending_counts(tmp_path: Path) -> None:
    model, loaded = trained(), make_model()
    checkpoint.save(model, tmp_path)
    train(model.tables["t"], [2, 7], 6)
    checkpoint.save_delta(model, tmp_path)

    checkpoint.load(loaded, tmp_path)

    assert set(contents(loaded.tables["t"])) == {1, 2}
    assert [x.tolist() for x in loaded.tables["t"].pending()] == [[3, 7], [2, 1]]


def test_resharding_moves_the_pending_counts_to_their_shards(tmp_path: Path) -> None:
    model, loaded = trained(), make_model()
    checkpoint.save(model, tmp_path / "one")

    written = checkpoint.reshard(tmp_path / "one", tmp_path / "three", num_shards=3)
    checkpoint.load(loaded, tmp_path / "three")

    assert sorted(p.shard for p in written.tables()["t"][0].pending) == [0, 2]
    assert contents(loaded.tables["t"]) == {1: (5, 2, 5)}
    assert sorted(zip(*(x.tolist() for x in loaded.tables["t"].pending()), strict=True)) == [(2, 2), (3, 2)]


def test_a_damaged_file_of_counts_is_refused(tmp_path: Path) -> None:
    checkpoint.save(trained(), tmp_path)
    text = (tmp_path / "manifest.json").read_text()
    (piece,) = Manifest.from_json(text, "here").tables()["t"][0].pending
    path = tmp_path / piece.file.path
    path.write_bytes(path.read_bytes()[:-8] + b"\xff" * 8)

    with pytest.raises(CheckpointError, match="pending"):
        checkpoint.load(make_model(), tmp_path)
    assert checkpoint.verify(tmp_path).problems


def test_a_state_dict_restores_counts_and_pending_ids() -> None:
    model, loaded = trained(), make_model()

    loaded.load_state_dict(model.state_dict())

    assert contents(loaded.tables["t"]) == {1: (5, 2, 5)}
    assert [x.tolist() for x in loaded.tables["t"].pending()] == [[2, 3], [2, 2]]
