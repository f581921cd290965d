"""diff: it finds exactly the rows, weights and settings that differ between two checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megalith import SGD, Adagrad, EmbeddingCollection, Feature, TableConfig, checkpoint
from megalith.checkpoint import saved_rows
from megalith.checkpoint.compare import Change, LargestChange
from megalith.errors import CheckpointError
from megalith.table import Chunk

Rows = dict[int, list[float]]


def collection(**options: Any) -> EmbeddingCollection:
    config = TableConfig("t", **{"dim": 2, "optimizer": Adagrad(0.1), **options})
    return EmbeddingCollection([config], [Feature("f", "t")])


def put(model: EmbeddingCollection, rows: Rows, time: int = 5) -> None:
    """Assign these rows, or restore them with fresh state: `assign` refuses NaN and Inf."""
    table = model.shards.local["t"]
    ids, weights = torch.tensor(list(rows), dtype=torch.int64), torch.tensor(list(rows.values()))
    if rows and bool(weights.isfinite().all()):
        model.shards.assign({"t": (ids, weights)}, time=time)
    elif rows:
        state = {
            c.key: torch.full((len(rows), c.end - c.start), c.initial) for c in table.config.state_columns
        }
        table.restore(Chunk(ids, weights, state, torch.full_like(ids, time)))


def saved(path: Path, rows: Rows, **options: Any) -> Path:
    model = collection(**options)
    put(model, rows)
    checkpoint.save(model, path)
    return path


def test_rows_added_removed_and_changed_with_the_largest_change(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {1: [1.0, 2.0], 2: [0.0, 0.0], 3: [5.0, 5.0], 2**63 - 1: [1.0, 1.0]})
    b = saved(tmp_path / "b", {1: [1.0, 2.5], 2: [-4.0, 0.0], 3: [5.0, 5.0], -(2**63): [1.0, 1.0]})
    seen: list[int] = []

    table = checkpoint.diff(a, b, on_rows=seen.append).tables["t"]

    assert (table.before, table.after, table.added, table.removed) == (4, 4, 1, 1)
    assert (table.changed, table.weights) == (2, 2)
    assert table.largest == LargestChange(id=2, column=0, before=0.0, after=-4.0, amount=4.0)
    assert seen[-1] == 8


@pytest.mark.parametrize(
    ("before", "after", "amount"),
    [
        ([0.0, 1.0], [0.0, math.nan], math.inf),
        ([0.0, math.inf], [0.0, 1.0], math.inf),
        ([math.inf, 1.0], [math.inf, 3.0], 2.0),
        ([math.nan, 1.0], [math.nan, 3.0], 2.0),
    ],
)
def test_values_that_are_not_finite(
    tmp_path: Path, before: list[float], after: list[float], amount: float
) -> None:
    a, b = saved(tmp_path / "a", {1: before}), saved(tmp_path / "b", {1: after})
    largest = checkpoint.diff(a, b).tables["t"].largest
    assert largest is not None
    assert largest.amount == amount


def test_state_changes_a_row_but_not_its_weights_and_times_are_apart(tmp_path: Path) -> None:
    model = collection()
    put(model, {1: [1.0, 1.0], 2: [2.0, 2.0]})
    checkpoint.save(model, tmp_path / "a")
    put(model, {1: [1.0, 1.0]}, time=99)
    model.shards.apply_gradients({"t": torch.tensor([2])}, {"t": torch.tensor([[0.0, 1.0]])}, step=0, time=5)
    put(model, {2: [2.0, 2.0]})
    checkpoint.save(model, tmp_path / "b")

    table = checkpoint.diff(tmp_path / "a", tmp_path / "b").tables["t"]

    assert (table.changed, table.times, table.weights, table.largest) == (1, 1, 0, None)
    assert not table.same


def test_clock_values_are_shown_but_are_not_differences(tmp_path: Path) -> None:
    """Given equal rows trained at other times in another duration, the checkpoints are the same."""
    for name, time in (("a", 2**31 - 1), ("b", 2**32 - 1)):
        model = collection()
        put(model, {1: [1.0, 1.0], 2: [2.0, 2.0]}, time=time)
        checkpoint.save(model, tmp_path / name, progress={"step": 3, "seconds": float(time)})

    found = checkpoint.diff(tmp_path / "a", tmp_path / "b")

    assert found.same
    assert found.tables["t"].times == 2
    assert found.seconds == Change(2.0**31 - 1, 2.0**32 - 1)
    assert not found.progress


def test_a_chain_equals_the_checkpoint_it_results_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_rows, "PIECE_BYTES", 100)
    model = collection()
    put(model, {i: [float(i), 0.0] for i in range(20)})
    checkpoint.save(model, tmp_path / "a")
    put(model, {3: [7.0, 7.0], 50: [1.0, 1.0]})
    model.shards.remove({"t": torch.tensor([4, 5])})
    checkpoint.save_delta(model, tmp_path / "a")
    put(model, {4: [8.0, 8.0]})
    model.shards.remove({"t": torch.tensor([50])})
    checkpoint.save_delta(model, tmp_path / "a")
    checkpoint.save(model, tmp_path / "b", deltas=False)

    assert checkpoint.diff(tmp_path / "a", tmp_path / "b").same


def test_the_memory_limit_does_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_rows, "PIECE_BYTES", 200)
    a = saved(tmp_path / "a", {i: [float(i), 1.0] for i in range(40)})
    b = saved(tmp_path / "b", {i: [float(i), 1.0 + i] for i in reversed(range(40))})
    at_once = checkpoint.diff(a, b)
    monkeypatch.setitem(checkpoint.diff.__globals__, "BATCH_BYTES", 64)
    assert checkpoint.diff(a, b) == at_once
    assert at_once.tables["t"].largest == LargestChange(id=39, column=1, before=1.0, after=40.0, amount=39.0)
    assert at_once.tables["t"].weights == 39


values = st.sampled_from([0.0, -0.0, 1.0, -2.5, 3e38, math.inf, math.nan])
tables = st.dictionaries(
    st.sampled_from([0, 1, 2, -1, 2**63 - 1, -(2**63)]), st.lists(values, min_size=2, max_size=2), max_size=6
)


@given(tables, tables)
@settings(max_examples=30)
def test_it_agrees_with_a_comparison_of_plain_dicts(
    tmp_path_factory: pytest.TempPathFactory, before: Rows, after: Rows
) -> None:
    root = tmp_path_factory.mktemp("d")
    table = checkpoint.diff(saved(root / "a", before), saved(root / "b", after)).tables["t"]

    def bits(row: list[float]) -> list[int]:
        return torch.tensor(row).view(torch.int32).tolist()

    both = before.keys() & after.keys()
    assert table.added == len(after.keys() - before.keys())
    assert table.removed == len(before.keys() - after.keys())
    assert table.weights == table.changed == sum(bits(before[i]) != bits(after[i]) for i in both)
    assert table.same == (not table.added and not table.removed and not table.changed)


def test_settings_that_differ(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {1: [1.0, 2.0]})
    b = saved(tmp_path / "b", {1: [1.0, 2.5]}, optimizer=SGD(0.5))
    wider = saved(tmp_path / "w", {1: [1.0, 2.0, 3.0]}, dim=3)
    checkpoint.reshard(a, tmp_path / "r", num_shards=3, dist_type="hash_roundrobin")

    table = checkpoint.diff(a, b).tables["t"]
    assert list(table.settings) == ["segment 0 optimizer"]
    assert (table.changed, table.weights) == (1, 1)

    table = checkpoint.diff(a, wider).tables["t"]
    assert table.settings == {"segment 0 dim": Change(2, 3)}
    assert (table.added, table.removed, table.changed, table.largest) == (0, 0, 0, None)

    table = checkpoint.diff(a, tmp_path / "r").tables["t"]
    assert table.changed == table.added == table.removed == 0
    assert table.settings == {"dist_type": Change("roundrobin", "hash_roundrobin"), "shards": Change(1, 3)}

    (piece,) = b.glob("data-*/tables/*/*.safetensors")
    piece.write_bytes(piece.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="bytes, but its manifest states"):
        checkpoint.diff(a, b)


class Model(nn.Module):
    def __init__(self, tables: list[str], width: int = 2) -> None:
        super().__init__()
        configs = [TableConfig(name, dim=1, optimizer=SGD(0.1)) for name in tables]
        self.e = EmbeddingCollection(configs, [Feature(name, name) for name in tables])
        self.d = nn.Linear(width, 1)
        nn.init.zeros_(self.d.weight)
        nn.init.zeros_(self.d.bias)


def test_tables_dense_weights_optimizer_steps_and_progress(tmp_path: Path) -> None:
    one, other = Model(["x", "y"]), Model(["y", "z"])
    for model, name in ((one, "a"), (other, "b")):
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        if model is other:
            model.d(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            model.e.global_step = 7
        progress = {"step": int(model is other), "config": {"lr": 0.1, "dims": [1, 2]}, "name": "run"}
        checkpoint.save(model, tmp_path / name, optimizer=optimizer, progress=progress)

    found = checkpoint.diff(tmp_path / "a", tmp_path / "b")

    assert (found.only_before, found.only_after, list(found.tables)) == (["e.x"], ["e.z"], ["e.y"])
    changes = {name: each.largest for name, each in found.dense.items()}
    assert changes == {name: pytest.approx(0.1) for name in ("d.bias", "d.weight")}
    assert (found.optimizer, found.steps) == (True, {"e": Change(0, 7)})
    assert found.progress == {"step": Change(0, 1)}

    checkpoint.save(Model(["x"], width=3), tmp_path / "w")
    weight = checkpoint.diff(tmp_path / "a", tmp_path / "w").dense["d.weight"]
    assert (weight.shapes, weight.largest) == (Change([1, 2], [1, 3]), None)
