"""Round trips: a load restores what was saved, for all engines, optimizers, precisions and chains."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megalith import SGD, EmbeddingCollection, Feature, Segment, TableConfig, Zeros, checkpoint
from megalith.checkpoint import rewrite, saved_rows
from megalith.errors import CheckpointError, UsageError
from megalith.table import Table
from tests.checkpoint.memory import HookedStore, MemoryStore
from tests.table.support import EXTREME_IDS, OPTIMIZERS, assert_same_tables, dyadic, ints, whole

ENGINES = ("cpu", "reference")
PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
some_ids = st.lists(st.sampled_from([*EXTREME_IDS, *range(100, 120)]), max_size=8)


@pytest.fixture(autouse=True, scope="module")
def many_small_files() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_rows, "PIECE_BYTES", 200)
        patch.setattr(rewrite, "PIECE_BYTES", 200)
        yield


def collection(config: TableConfig, engine: str = "cpu", seed: int = 0) -> EmbeddingCollection:
    return EmbeddingCollection([config], [Feature("f", config.name)], engine=engine, seed=seed)


def table_of(model: EmbeddingCollection) -> Table:
    (table,) = model.shards.local.values()
    return table


segments = st.lists(
    st.builds(
        lambda dim, name: Segment(dim, optimizer=OPTIMIZERS[name]),
        st.integers(1, 4),
        st.sampled_from(list(OPTIMIZERS)),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=50)
@given(segments, st.lists(some_ids, min_size=1, max_size=3), st.data())
def test_any_table_is_restored(segments: list[Segment], steps: list[list[int]], data: st.DataObject) -> None:
    config = TableConfig("t", segments=segments)
    there, here = (data.draw(st.sampled_from(ENGINES)) for _ in range(2))
    precision = data.draw(st.sampled_from(list(PRECISIONS)))
    model = collection(config, there)
    for number, ids in enumerate(steps):
        grads = dyadic(number, len(ids), config.dim)
        table_of(model).apply_gradients(ints(*ids), grads, step=number, time=number)
    store = MemoryStore()
    seen: list[int] = []
    manifest = checkpoint.save(model, store, precision=precision, on_rows=seen.append)

    loaded = collection(config, here, seed=4)
    table_of(loaded).assign(ints(5, -1), torch.ones(2, config.dim))
    report = checkpoint.load(loaded, store)

    wanted = whole(table_of(model))
    rounded = wanted.rows.to(PRECISIONS[precision]).float()
    expected = type(wanted)(wanted.ids, rounded, wanted.state, wanted.time)
    assert_same_tables(whole(table_of(loaded)), expected)
    n = len(table_of(model))
    assert report.tables == {"t": checkpoint.TableReport(read=n, kept=n, refused=0)}
    assert sum(piece.rows for piece in manifest.tables()["t"][0].pieces) == (seen or [0])[-1] == n


# ---- any order of changes, saves and loads, against a plain dict

Contents = dict[int, float]
CONFIG = TableConfig("t", dim=1, optimizer=SGD(1.0), initializer=Zeros())


def contents(table: Table) -> Contents:
    rows = whole(table)
    return dict(zip(rows.ids.tolist(), rows.rows.flatten().tolist(), strict=True))


class Chains(RuleBasedStateMachine):
    """A table (`now`), two stores with checkpoints (`saved`), and which of them a delta can continue."""

    def __init__(self) -> None:
        super().__init__()
        self.places = {name: MemoryStore(where=name) for name in "ab"}
        self.saved: dict[str, Contents] = {}
        self.now: Contents = {}
        self.tip: tuple[str, str] | None = None  # the store and save that this model's rows come from
        self.pending: tuple[str, Contents, checkpoint.SaveHandle] | None = None

    @initialize(engine=st.sampled_from(ENGINES))
    def begin(self, engine: str) -> None:
        self.model = collection(CONFIG, engine)
        self.table = table_of(self.model)

    # -- changes

    @rule(ids=some_ids, value=st.integers(-8, 8))
    def train(self, ids: list[int], value: int) -> None:
        self.table.apply_gradients(ints(*ids), torch.full((len(ids), 1), float(value)), step=0)
        for id in ids:
            self.now[id] = self.now.get(id, 0.0) - value

    @rule(ids=some_ids, value=st.integers(-8, 8))
    def assign(self, ids: list[int], value: int) -> None:
        self.table.assign(ints(*ids), torch.full((len(ids), 1), float(value)))
        self.now |= dict.fromkeys(ids, float(value))

    @rule(ids=some_ids)
    def remove(self, ids: list[int]) -> None:
        self.table.remove(ints(*ids))
        self.now = {id: row for id, row in self.now.items() if id not in ids}

    @rule()
    def clear(self) -> None:
        self.table.clear()
        self.now = {}

    @rule()
    def evict(self) -> None:
        for id in self.table.evict(10**9).tolist():
            del self.now[id]

    # -- saves

    def is_idle(self) -> bool:
        return self.pending is None

    def id_at(self, place: str) -> str:
        return checkpoint.read_manifest(self.places[place]).tip

    def continues(self, place: str) -> bool:
        """Whether a delta of this model can be added there."""
        return self.tip is not None and self.tip == (place, self.id_at(place) if place in self.saved else "")

    def is_now_at(self, place: str, state: Contents, tracked: bool) -> None:
        self.saved[place] = state
        if tracked:
            self.tip = (place, self.id_at(place))

    @precondition(is_idle)
    @rule(place=st.sampled_from("ab"), deltas=st.booleans())
    def save(self, place: str, deltas: bool) -> None:
        checkpoint.save(self.model, self.places[place], deltas=deltas)
        self.is_now_at(place, dict(self.now), deltas)

    @precondition(is_idle)
    @rule(place=st.sampled_from("ab"))
    def save_delta(self, place: str) -> None:
        if not self.continues(place):
            with pytest.raises((UsageError, CheckpointError)):
                checkpoint.save_delta(self.model, self.places[place])
            return
        checkpoint.save_delta(self.model, self.places[place])
        self.is_now_at(place, dict(self.now), True)

    @precondition(is_idle)
    @rule(place=st.sampled_from("ab"), delta=st.booleans(), at=st.integers(0, 6))
    def save_that_fails(self, place: str, delta: bool, at: int) -> None:
        if delta and not self.continues(place):
            return
        work = checkpoint.save_delta if delta else checkpoint.save
        before = dict(self.places[place].files)
        writes = iter([None] * at)

        def fail(name: str) -> None:
            if next(writes, name) is name:
                raise OSError("disk full")

        try:
            work(self.model, HookedStore(self.places[place], fail))
        except OSError:
            assert self.places[place].files == before, "nothing is left behind"
        else:
            self.is_now_at(place, dict(self.now), True)

    @precondition(is_idle)
    @rule(place=st.sampled_from("ab"), delta=st.booleans())
    def begin_async(self, place: str, delta: bool) -> None:
        if delta and not self.continues(place):
            return
        handle = checkpoint.async_save(self.model, self.places[place], delta=delta)
        self.pending = (place, dict(self.now), handle)

    @precondition(lambda self: not self.is_idle())
    @rule()
    def end_async(self) -> None:
        assert self.pending is not None
        place, state, handle = self.pending
        handle.wait(60)
        self.pending = None
        self.is_now_at(place, state, True)

    @precondition(is_idle)
    @rule(place=st.sampled_from("ab"))
    def compact(self, place: str) -> None:
        if place in self.saved:
            checkpoint.compact(self.places[place])
            assert not checkpoint.read_manifest(self.places[place]).deltas

    # -- loads

    @precondition(is_idle)
    @rule(place=st.sampled_from("ab"), deltas=st.booleans())
    def load(self, place: str, deltas: bool) -> None:
        if place not in self.saved:
            with pytest.raises(CheckpointError, match="no complete checkpoint"):
                checkpoint.load(self.model, self.places[place], deltas=deltas)
            return
        checkpoint.load(self.model, self.places[place], deltas=deltas)
        self.now = dict(self.saved[place])
        if deltas:
            self.tip = (place, self.id_at(place))

    @precondition(is_idle)
    @rule(place=st.sampled_from("ab"), value=st.integers(10, 20))
    def somebody_else_adds_a_delta(self, place: str, value: int) -> None:
        if place in self.saved:
            other = self.check(place, "cpu")
            table_of(other).assign(ints(1, 2), torch.full((2, 1), float(value)))
            checkpoint.save_delta(other, self.places[place])
            self.saved[place] = self.saved[place] | dict.fromkeys((1, 2), float(value))

    # -- invariants

    def check(self, place: str, engine: str) -> EmbeddingCollection:
        other = collection(CONFIG, engine, seed=3)
        report = checkpoint.load(other, self.places[place])
        assert contents(table_of(other)) == self.saved[place]
        assert report.tables["t"].kept == len(self.saved[place])
        assert report.tables["t"].refused == 0
        return other

    @invariant()
    def the_table_is_as_it_should_be(self) -> None:
        if hasattr(self, "table"):
            assert contents(self.table) == self.now

    def teardown(self) -> None:
        if self.pending is not None:
            self.end_async()
        for place in self.saved:
            for engine in ENGINES:
                self.check(place, engine)


class TestChains(Chains.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=40, stateful_step_count=25)


@pytest.mark.soak
class TestManyChains(Chains.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=300, stateful_step_count=50)
