"""Recorded launches: a replay uses the arguments of the call that was recorded, so all of them must stay.

Without a GPU, a replay is the recorded Python call again, with its first arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from megalith import (
    SGD,
    Adagrad,
    Adam,
    Capacity,
    Constant,
    EmbeddingCollection,
    Feature,
    Layout,
    LocalShards,
    Mean,
    MinCount,
    Ragged,
    Slice,
    TableConfig,
    Zeros,
)
from megalith.errors import UsageError
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.table.engines.cuda import graphs, updates
from megalith.table.engines.cuda.engine_group import CudaEngineGroup
from tests.table.engines.cuda_configs import ON_GPU
from tests.table.engines.programs import everything

BATCH = 5


class Recorder:
    """Counts replays. On a GPU it records as `graphs.record` does."""

    def __init__(self) -> None:
        self.replays = 0
        self._record = graphs.record

    def __call__(self, launch: Callable[[], None]) -> graphs.Graph:
        return Replayed(self, self._record(launch).replay if ON_GPU else launch)


class Replayed:
    def __init__(self, recorder: Recorder, launch: Callable[[], None]) -> None:
        self._recorder, self._launch = recorder, launch

    def replay(self) -> None:
        self._recorder.replays += 1
        self._launch()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(graphs, "can_record", lambda device: True)
    monkeypatch.setattr(graphs, "record", recorder)
    return recorder


def train(
    configs: list[TableConfig],
    features: list[Feature],
    layouts: list[Layout] | None,
    column: Callable[[Feature, torch.Generator], torch.Tensor | Ragged],
    steps: int,
) -> EmbeddingCollection:
    """Train on the cuda and on the reference engine; outputs and rows must be equal."""
    both = [EmbeddingCollection(configs, features, layouts=layouts, engine=e) for e in ("cuda", "reference")]
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = {feature.name: column(feature, generator) for feature in features}
        results = [
            collection({name: own.to(collection.shards.device) for name, own in batch.items()})
            for collection in both
        ]
        for name, got in results[0].items():
            torch.testing.assert_close(got.cpu(), results[1][name], rtol=1e-6, atol=1e-7)
        for own in results:
            sum((value * value).sum() + value.sum() for value in own.values()).backward()
    for config in configs:
        got, expected = (everything(collection.tables[config.name]) for collection in both)
        assert got.ids.tolist() == expected.ids.tolist()
        torch.testing.assert_close(got.rows, expected.rows, rtol=1e-6, atol=1e-7)
    return both[0]


def one_id(feature: Feature, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 9, (BATCH,), generator=generator)


def ragged(feature: Feature, generator: torch.Generator) -> Ragged:
    lengths = torch.randint(0, 3, (BATCH,), generator=generator)
    ids = torch.randint(0, 9, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(ids.numel(), generator=generator) if feature.name == "weighted" else None
    return Ragged.from_lengths(ids, lengths, weights)


def slots(collection: EmbeddingCollection) -> list[int]:
    group = collection.shards.engines  # type: ignore[attr-defined]
    assert isinstance(group, CudaEngineGroup)
    return [len(own) for own in group._slots._slots.values()]


def test_steps_of_equal_sizes(recorded: Recorder) -> None:
    configs = [TableConfig(name, dim=4, optimizer=Adagrad(0.1)) for name in ("a", "b")]
    features = [Feature("x", "a"), Feature("y", "b")]
    layouts = [Layout("both", [Slice("x", 0, 4), Slice("y", 0, 4)])]
    collection = train(configs, features, layouts, one_id, 7)
    assert slots(collection) == [1]
    # Two steps find out that the size repeats, and two allocate what launches need.
    assert recorded.replays >= 2 * (7 - 4)


def test_ragged_steps_of_about_the_same_size(recorded: Recorder) -> None:
    configs = [TableConfig("a", dim=4, optimizer=Adam(0.1)), TableConfig("b", dim=3, optimizer=Adam(0.2))]
    features = [Feature("x", "a"), Feature("y", "b", combiner=Mean()), Feature("weighted", "a")]
    train(configs, features, None, ragged, 8)
    assert recorded.replays >= 4


def test_kinds_of_tables_whose_features_are_added_up(recorded: Recorder) -> None:
    configs = [
        TableConfig("a", dim=4, optimizer=SGD(0.1)),
        TableConfig("b", dim=4, optimizer=Adagrad(0.1)),
        TableConfig("c", dim=9, optimizer=SGD(0.1)),
    ]
    features = [Feature("x", "a"), Feature("y", "b"), Feature("z", "c")]
    layouts = [
        Layout("sum", [Slice("z", 1, 4), Slice("x", 0, 3), Slice("y", 1, 4)], kind="add"),
        Layout("rest", [Slice("y", 0, 2), Slice("z", 0, 9)]),
    ]
    train(configs, features, layouts, ragged, 7)
    assert recorded.replays > 8


def test_sums_by_atomic_additions(recorded: Recorder) -> None:
    configs = [TableConfig(n, dim=4, optimizer=SGD(0.125), deterministic=False) for n in ("a", "b")]
    train(configs, [Feature("x", "a"), Feature("y", "b")], None, ragged, 6)
    assert recorded.replays > 4


def test_an_assignment_between_lookup_and_update(recorded: Recorder) -> None:
    """The rows that the lookup found are then not those of the update."""
    config = TableConfig("a", dim=2, optimizer=SGD(1.0))
    both = [EmbeddingCollection([config], [Feature("x", "a")], engine=e) for e in ("cuda", "reference")]
    for step in range(6):
        ids = torch.tensor([step, step + 1])
        for collection in both:
            out = collection({"x": ids})["x"]
            collection.tables["a"].assign(torch.tensor([step + 1]), torch.ones(1, 2))
            out.sum().backward()
    got, expected = (everything(collection.tables["a"]) for collection in both)
    torch.testing.assert_close(got.rows, expected.rows, rtol=0, atol=0)
    assert recorded.replays == 6 - 3  # the lookups


def test_lookups_in_progress_have_slots_of_their_own(recorded: Recorder) -> None:
    config = TableConfig("a", dim=2, optimizer=SGD(1.0))
    both = [EmbeddingCollection([config], [Feature("x", "a")], engine=e) for e in ("cuda", "reference")]
    for step in range(6):
        for collection in both:
            outs = [collection({"x": torch.tensor([step, step + own])})["x"] for own in range(3)]
            for out in outs:
                out.sum().backward()
    got, expected = (everything(collection.tables["a"]) for collection in both)
    torch.testing.assert_close(got.rows, expected.rows, rtol=0, atol=0)
    assert slots(both[0]) == [3]


def test_gradients_that_are_copied_live_until_they_are_read() -> None:
    """The gradient of a part of a concatenation is not contiguous, so the engine reads a copy."""
    tables = [TableConfig(name, dim=4, optimizer=SGD(1.0), initializer=Zeros()) for name in "ab"]
    collection = EmbeddingCollection(tables, [Feature("x", "a"), Feature("y", "b")], engine="cuda")
    for step in range(6):
        ids = torch.arange(3, device=collection.shards.device) + 3 * step
        out = collection({"x": ids, "y": ids})
        (torch.cat([out["x"], out["y"]], 1) * torch.ones(3, 8, device=ids.device)).sum().backward()
        columns = torch.ones(4, 3, device=ids.device).t(), torch.ones(3, 8, device=ids.device)[:, ::2]
        more = dict.fromkeys("ab", ids + 1000)
        collection.shards.apply_gradients(more, dict(zip("ab", columns, strict=True)), step=step)
        for table in collection.tables.values():
            for own in (ids, ids + 1000):
                assert torch.equal(table.lookup(own).cpu(), torch.full((3, 4), -1.0))


def test_policies_are_applied_in_every_step(recorded: Recorder) -> None:
    plain = {"dim": 4, "optimizer": SGD(0.1), "initializer": Constant(0.5)}
    tables = [
        TableConfig("counted", admission=MinCount(3), **plain),
        TableConfig("limited", eviction=Capacity(rows=4), **plain),
    ]
    features = [Feature("x", "counted"), Feature("y", "limited")]
    collection = EmbeddingCollection(tables, features, engine="cuda")
    for step in range(8):
        ids = torch.tensor([step // 3, 100 + step], device=collection.shards.device)
        out = collection({"x": ids, "y": ids})
        (out["x"].sum() + out["y"].sum()).backward()
    assert sorted(everything(collection.tables["counted"]).ids.tolist()) == [0, 1]
    assert len(collection.tables["limited"]) == 4


def test_memory_of_a_used_lookup_belongs_to_the_next_one(recorded: Recorder) -> None:
    shards = LocalShards([TableConfig("t", dim=1, optimizer=SGD(0.1))], engine="cuda")
    shards.assign({"t": (torch.arange(8), torch.arange(8.0).view(8, 1))})
    pooling = Pooling.sum("t", torch.arange(3, device=shards.device), 1)
    for _ in range(3):
        shards.lookup({"t": torch.tensor([0, 1])}).pool(pooling)
    first = shards.lookup({"t": torch.tensor([0, 1])})
    first.pool(pooling)
    shards.apply_gradients(first, [torch.ones(2, 1)], step=0, pooling=Pooling(pooling.outputs, {}))
    shards.lookup({"t": torch.tensor([6, 7])}).pool(pooling)
    assert first.pool(pooling)[0].flatten().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("engine", ["cuda", "reference"])
def test_ids_outside_of_bags_get_no_row(engine: str) -> None:
    shards = LocalShards([TableConfig("t", dim=1, optimizer=SGD(0.1))], engine=engine)
    parts = (OutputSlice(0, 0, 0, 1),)
    for ids in (torch.arange(0), torch.arange(5)):
        offsets = torch.zeros(1, dtype=torch.int64, device=shards.device)
        pooling = Pooling(((0, 1),), {"t": (Bags(offsets, parts),)})
        lookup = shards.lookup({"t": ids})
        lookup.pool(pooling)
        shards.apply_gradients(lookup, [torch.zeros(0, 1)], step=0, pooling=pooling)
    assert len(shards.local["t"]) == 0


def test_rows_of_a_lookup_and_policies(recorded: Recorder) -> None:
    chance = torch.Generator().manual_seed(3)
    configs = [
        TableConfig("a", dim=4, optimizer=SGD(0.5), eviction=Capacity(rows=20)),
        TableConfig("b", dim=4, optimizer=SGD(0.5), admission=MinCount(2)),
    ]
    engines = [LocalShards(configs, engine=name) for name in ("cuda", "reference")]
    for shards in engines:
        shards.reserve({"a": 500, "b": 500})  # a table that grows is recorded again
    for step in range(8):
        ids = {name: torch.randint(0, 40, (BATCH,), generator=chance) for name in ("a", "b")}
        grads = {name: torch.randint(-9, 9, (BATCH, 4), generator=chance).float() for name in ids}
        rows = []
        for shards in engines:
            lookup = shards.lookup(ids)
            rows.append([lookup.rows[name].cpu() for name in ids])
            shards.apply_gradients(lookup, grads, step=step, time=step)
        for got, expected in zip(*rows, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    for name in ("a", "b"):
        got, expected = (shards.local[name] for shards in engines)
        assert got.drain_evicted().tolist() == expected.drain_evicted().tolist()
        assert got.drain_refused().tolist() == expected.drain_refused().tolist()
        assert got.stats().counters == expected.stats().counters
    assert recorded.replays >= 4


def test_an_update_in_a_graph_of_the_user_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = LocalShards([TableConfig("t", dim=2, optimizer=SGD(1.0))], engine="cuda")
    monkeypatch.setattr(updates, "is_captured", lambda device: True)
    with pytest.raises(UsageError, match="tables t: an update cannot be part of a CUDA graph of yours"):
        shards.apply_gradients({"t": torch.tensor([1])}, {"t": torch.ones(1, 2)}, step=0)
