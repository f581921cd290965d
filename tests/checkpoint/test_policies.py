"""Checkpoints carry what policies need: counts, steps, and counts of ids without a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megalith import SGD, TTL, Capacity, EmbeddingCollection, Feature, MinCount, TableConfig, checkpoint
from megalith.checkpoint.manifest import Manifest
from megalith.errors import CheckpointError, TableFullError
from megalith.reporting.inspection import summarize
from megalith.table import Chunk, Table


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


def with_policies(**policies: object) -> EmbeddingCollection:
    config = TableConfig("t", dim=2, optimizer=SGD(0.1), **policies)  # type: ignore[arg-type]
    return EmbeddingCollection([config], [Feature("t", "t")])


def norm(chunk: Chunk) -> torch.Tensor:
    return chunk.rows.norm(dim=1)


def test_a_manifest_records_policies_and_other_ones_are_noted(tmp_path: Path) -> None:
    saved = with_policies(
        admission=MinCount(2, max_ids=50), eviction=[TTL(60, per_slot={3: 5}), Capacity(9, score=norm)]
    )
    saved.tables["t"].assign(torch.tensor([1]), torch.ones(1, 2))
    checkpoint.save(saved, tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["collections"][""]["tables"]["t"]["policies"] == [
        {"name": "min_count", "settings": {"n": 2, "max_ids": 50}},
        {"name": "ttl", "settings": {"seconds": 60.0, "per_slot": {"3": 5.0}}},
        {"name": "capacity", "settings": {"rows": 9, "max_bytes": None, "score": "norm"}},
    ]
    text = "min_count(n=2, max_ids=50), ttl(seconds=60.0, per_slot={'3': 5.0}), capacity(rows=9, score=norm)"
    assert summarize(checkpoint.read_manifest(tmp_path))[0].policies == text

    assert checkpoint.load(saved, tmp_path).notes == []
    other = with_policies(eviction=TTL(7))
    note = f"table 't' was saved with policies {text}, and is loaded with ttl(seconds=7.0)"
    assert checkpoint.load(other, tmp_path).notes == [note]
    assert len(other.tables["t"]) == 1

    del manifest["collections"][""]["tables"]["t"]["policies"]  # as older versions wrote it
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.load(other, tmp_path).notes == []
    assert summarize(checkpoint.read_manifest(tmp_path))[0].policies == "not recorded"
    manifest["collections"][""]["tables"]["t"]["policies"] = [{"settings": {}}]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="name"):
        checkpoint.load(other, tmp_path)


def test_a_run_that_is_interrupted_often_visits_every_row(tmp_path: Path) -> None:
    def make() -> EmbeddingCollection:
        config = TableConfig("t", dim=1, optimizer=SGD(0.1), eviction=TTL(100))
        return EmbeddingCollection([config], [Feature("t", "t")], evict_every=40)

    alive, old = torch.arange(300), torch.arange(1000, 1100)  # rows to visit before the expired ones
    model = make()
    model.tables["t"].assign(alive, torch.zeros(300, 1), time=150)
    model.tables["t"].assign(old, torch.zeros(100, 1), time=0)
    for _ in range(8):  # each part of the run has a quarter of the steps of a pass
        for _ in range(10):
            model({"t": alive[:1]}, time=150)["t"].sum().backward()
        checkpoint.save(model, tmp_path)
        model = make()
        checkpoint.load(model, tmp_path)

    assert len(model.tables["t"]) == 300
    assert model.global_step == 80


def test_rows_beyond_a_limit_without_a_score_are_refused_before_anything_changes(tmp_path: Path) -> None:
    saved = with_policies()
    saved.tables["t"].assign(torch.arange(5), torch.ones(5, 2))
    checkpoint.save(saved, tmp_path)
    model = with_policies(eviction=Capacity(3, score=None))
    model.tables["t"].assign(torch.tensor([7]), torch.zeros(1, 2))

    with pytest.raises(TableFullError, match="5 rows exceed its Capacity of 3"):
        checkpoint.load(model, tmp_path)

    assert (len(model.tables["t"]), 7 in model.tables["t"]) == (1, True)


def test_a_loaded_table_keeps_its_limit_and_its_order_of_eviction(tmp_path: Path) -> None:
    model = with_policies(eviction=Capacity(3000, score="step"))
    for step in range(30):
        train(model.tables["t"], list(range(100 * step, 100 * step + 100)), step)
    checkpoint.save(model, tmp_path)
    loaded = with_policies(eviction=Capacity(3000, score="step"))
    checkpoint.load(loaded, tmp_path)
    loaded.tables["t"].assign(torch.tensor([-1]), torch.zeros(1, 2))  # as recent as the last saved step

    train(loaded.tables["t"], list(range(5000, 5100)), 30)

    evicted = loaded.tables["t"].drain_evicted().tolist()
    assert len(loaded.tables["t"]) == 3000
    assert len(evicted) == 101
    assert set(evicted) <= set(range(500))  # the lowest eighth would be 375 rows
