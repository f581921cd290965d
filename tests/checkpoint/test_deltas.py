"""Deltas: which checkpoint they continue, when they raise, and saves during training."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith import SGD, EmbeddingCollection, Feature, TableConfig, Zeros, checkpoint
from megalith.checkpoint import parts as part_save
from megalith.checkpoint import saved_rows
from megalith.checkpoint.manifest import NAME
from megalith.errors import CheckpointError, UsageError
from megalith.storage.store import LocalStore, StoredFile
from tests.checkpoint.memory import HookedStore, MemoryStore
from tests.checkpoint.support import IDS, Model, assert_same, state_of, train
from tests.table.support import ints


def loaded(store: MemoryStore | Path, **options: Any) -> Model:
    model = Model(seed=8)
    checkpoint.load(model, store, **options)
    return model


def saved_at(seed: int) -> tuple[MemoryStore, Model]:
    """A checkpoint of a model that was trained for one step, and the model."""
    store, model = MemoryStore(), Model()
    train(model, seed)
    checkpoint.save(model, store)
    return store, model


def before_dense(call: Callable[[], object]) -> Callable[[str], object]:
    """Call a function when the rows are written and the manifest is not."""
    return lambda name: call() if name.endswith("dense.safetensors") else None


def test_a_delta_holds_changed_rows_and_removed_ids() -> None:
    store = MemoryStore()
    model = Model()
    model.table("user").assign(IDS, torch.zeros(IDS.numel(), 3), time=5)
    checkpoint.save(model, store)
    model.table("user").assign(ints(-1, 7), torch.ones(2, 3), time=6)
    model.table("user").remove(ints(100, 101, 8888))
    model.table("user").assign(ints(101), torch.ones(1, 3), time=7)

    manifest = checkpoint.save_delta(model, store, progress={"step": 2})

    _, delta = manifest.tables()["embeddings.user"]
    assert delta.rows == 3  # -1, 7 and 101
    assert sum(piece.rows for piece in delta.removed) == 1  # 100
    assert delta.live == IDS.numel()
    report = checkpoint.load(Model(), store)
    assert report.tables["embeddings.user"].read == IDS.numel() + 3
    assert report.tables["embeddings.user"].kept == IDS.numel()
    assert report.progress == {"step": 2}
    assert_same(state_of(loaded(store)), state_of(model))
    manifest = checkpoint.save_delta(model, store)  # without changes
    assert [entry.rows for entry in manifest.tables()["embeddings.user"]][1:] == [3, 0]
    assert_same(state_of(loaded(store)), state_of(model))


# ---- deltas that raise


def test_which_checkpoint_a_delta_continues() -> None:
    a, b = MemoryStore(where="a"), MemoryStore(where="b")
    model = Model()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoint.save_delta(model, a)
    checkpoint.save(Model(), a)
    with pytest.raises(UsageError, match="last saved or loaded, which is none"):
        checkpoint.save_delta(model, a)
    checkpoint.save(model, a)
    checkpoint.save(model, b)
    with pytest.raises(UsageError, match="which is b, not a"):
        checkpoint.save_delta(model, a)
    checkpoint.load(model, a)
    with pytest.raises(UsageError, match="which is a, not b"):
        checkpoint.save_delta(model, b)
    checkpoint.save_delta(model, a)
    for tables in (True, ["embeddings.user"]):
        checkpoint.load(model, a, drop_optimizer_state=tables)
        with pytest.raises(UsageError, match="which is none"):
            checkpoint.save_delta(model, a)
        checkpoint.save(model, a)


def test_after_a_load_of_some_tables_a_delta_has_no_base() -> None:
    """The rows are neither those of the last save nor those of the checkpoint."""
    a, b = MemoryStore(where="a"), MemoryStore(where="b")
    configs = [TableConfig(name, dim=1, optimizer=SGD(1.0)) for name in ("t", "new")]
    features = [Feature("f", "t"), Feature("g", "new")]
    checkpoint.save(EmbeddingCollection(configs[:1], features[:1]), b)
    model = EmbeddingCollection(configs, features)
    checkpoint.save(model, a)
    with pytest.warns(UserWarning, match="does not hold 'new'"):
        checkpoint.load(model, b)
    for store in (a, b):
        with pytest.raises(UsageError, match="which is none"):
            checkpoint.save_delta(model, store)


@pytest.mark.parametrize(
    ("work", "theirs", "words"),
    [
        (checkpoint.save_delta, checkpoint.save_delta, "was changed"),
        (checkpoint.save, checkpoint.save, "another save ended in the meantime"),
    ],
    ids=["delta", "save"],
)
def test_a_save_that_another_model_overtakes_raises_and_changes_nothing(
    work: Callable[..., object], theirs: Callable[..., object], words: str
) -> None:
    store, model = saved_at(0)
    other = loaded(store)
    train(model, 1)
    train(other, 2)
    with pytest.raises(CheckpointError, match=words):
        work(model, HookedStore(store, before_dense(lambda: theirs(other, store))))
    assert_same(state_of(loaded(store)), state_of(other))


def test_a_delta_can_follow_a_compaction_and_be_added_after_one_that_overtakes_it() -> None:
    store, model = saved_at(0)
    for seed in (1, 2):
        train(model, seed)
        checkpoint.save_delta(model, store)
    checkpoint.compact(store)
    train(model, 3)
    checkpoint.save_delta(model, store)
    assert_same(state_of(loaded(store)), state_of(model))
    train(model, 4)

    overtaken = HookedStore(store, before_dense(lambda: checkpoint.compact(store)))
    manifest = checkpoint.save_delta(model, overtaken)

    assert len(manifest.saves) == 2
    assert_same(state_of(loaded(store)), state_of(model))


def test_a_checkpoint_saved_during_a_compaction_is_not_changed_by_it() -> None:
    store, model = saved_at(1)
    checkpoint.save_delta(model, store)

    def add(rows: int) -> None:
        if len(checkpoint.read_manifest(store).deltas) == 1:
            train(model, 2)
            checkpoint.save_delta(model, store)

    with pytest.raises(CheckpointError, match="compact it again"):
        checkpoint.compact(store, on_rows=add)
    assert len(store.folders()) == 3
    assert_same(state_of(loaded(store)), state_of(model))


def test_deltas_false_leaves_the_chain_unchanged() -> None:
    (chain, model), aside = saved_at(1), MemoryStore(where="aside")
    train(model, 2)
    checkpoint.save(model, aside, deltas=False)
    train(model, 3)
    checkpoint.save_delta(model, chain)
    assert_same(state_of(loaded(chain)), state_of(model))

    checkpoint.load(model, aside, deltas=False)
    checkpoint.save_delta(model, chain)
    assert_same(state_of(loaded(chain)), state_of(model))
    assert_same(state_of(loaded(chain)), state_of(loaded(aside)))


# ---- saves that fail


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("word", ["tables/", "removed", "dense", NAME])
def test_rows_of_a_save_that_failed_count_as_changed_again(word: str, background: bool) -> None:
    store, model = saved_at(1)
    train(model, 3)  # changes and removes
    before = dict(store.files)

    def fail(name: str) -> None:
        if word in name:
            raise OSError("disk full")

    failing = HookedStore(store, fail)
    start = checkpoint.async_save(model, failing, delta=True).wait if background else None
    with pytest.raises(OSError, match="disk full"):
        start(60) if start else checkpoint.save_delta(model, failing)

    assert store.files == before
    train(model, 4)
    checkpoint.save_delta(model, store)
    assert_same(state_of(loaded(store)), state_of(model))


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_an_error_after_the_manifest_does_not_undo_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    model = Model()
    checkpoint.save(model, tmp_path)
    train(model, 2)

    def failing(self: LocalStore, name: str) -> None:
        raise kind("no")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "remove", failing)
        warning = pytest.warns(UserWarning, match="old files could not be deleted")
        with warning if kind is OSError else pytest.raises(KeyboardInterrupt):
            checkpoint.save(model, tmp_path)

    assert_same(state_of(loaded(tmp_path)), state_of(model))
    checkpoint.save(model, tmp_path)
    assert len(list(tmp_path.glob("data-*"))) == 1


def test_a_manifest_that_is_written_although_the_call_fails_is_the_checkpoint() -> None:
    """An object store may complete a request and lose the response."""
    store, model = saved_at(1)
    train(model, 2)

    class Lossy(MemoryStore):
        def write(self, name: str, parts: Any, *, flush: bool = True) -> StoredFile:
            entry = super().write(name, parts, flush=flush)
            if name == NAME:
                raise OSError("no answer")
            return entry

    with pytest.raises(OSError, match="no answer"):
        checkpoint.save(model, Lossy(store.files))
    assert_same(state_of(loaded(store)), state_of(model))


# ---- saves at the same time as other operations


@pytest.mark.parametrize("how", ["save", "compact"])
@pytest.mark.parametrize("while_it", ["verifies", "loads rows"])
def test_a_checkpoint_replaced_during_a_load_is_loaded_again(how: str, while_it: str) -> None:
    store, trainer = saved_at(1)
    checkpoint.save_delta(trainer, store)
    model, replaced = Model(seed=8), []

    def replace(now: str) -> None:
        if now == while_it and not replaced:
            replaced.append(True)
            train(trainer, 2)
            checkpoint.save(trainer, store) if how == "save" else checkpoint.compact(store)

    class Watched(MemoryStore):
        def size(self, name: str) -> int:
            replace("verifies")
            return super().size(name)

    checkpoint.load(model, Watched(store.files), on_rows=lambda rows: replace("loads rows"))

    assert replaced
    assert_same(state_of(model), state_of(loaded(store)))


def test_a_checkpoint_that_is_replaced_again_and_again_raises() -> None:
    store, trainer = saved_at(1)
    one_at_a_time = threading.Lock()  # files are read in several threads

    class Restless(MemoryStore):
        def size(self, name: str) -> int:
            with one_at_a_time:
                checkpoint.save(trainer, store)
            return super().size(name)

    model = Model()
    before = state_of(model)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(model, Restless(store.files))
    assert_same(state_of(model), before)


def test_one_save_at_a_time_and_no_load_during_it() -> None:
    (good, model), store, go = saved_at(1), MemoryStore(where="slow"), threading.Event()
    saved = state_of(model)
    slow = HookedStore(store, lambda name: go.wait(60))
    handle = checkpoint.async_save(model, slow)
    calls: list[Callable[..., object]] = [checkpoint.save, checkpoint.save_delta]
    for call in (*calls, checkpoint.async_save, checkpoint.load):
        with pytest.raises(UsageError, match=r"in progress: call wait\(\) on its handle"):
            call(model, good)
    assert not handle.done()
    with pytest.raises(TimeoutError, match=f"save {handle.id} to slow has not ended within 0.01 s"):
        handle.wait(0.01)
    train(model, 2)
    go.set()
    handle.wait(60)
    assert_same(state_of(loaded(store)), saved)
    checkpoint.save_delta(model, slow)
    assert_same(state_of(loaded(store)), state_of(model))


def test_progress_is_saved_as_it_was_when_the_save_began() -> None:
    store, go = MemoryStore(), threading.Event()
    progress: dict[str, Any] = {"position": {"row": 7}}
    handle = checkpoint.async_save(Model(), HookedStore(store, lambda _: go.wait(60)), progress=progress)
    progress["position"]["row"] = 8
    go.set()
    assert handle.wait(60).progress == {"position": {"row": 7}} == checkpoint.read_manifest(store).progress


def counting(rows: int) -> EmbeddingCollection:
    config = TableConfig("t", dim=16, optimizer=SGD(1.0), initializer=Zeros())
    model = EmbeddingCollection([config], [Feature("f", "t")])
    model.shards.assign({"t": (torch.arange(rows), torch.zeros(rows, 16))})
    return model


def test_a_save_during_training_holds_the_table_as_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread keeps adding one to all rows: a save must find the same number in each row."""
    rows = 20_000  # more than the buffer holds: training has to wait for the writer at times
    monkeypatch.setattr(part_save, "BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(saved_rows, "PIECE_BYTES", 1 << 16)
    model = counting(rows)
    table = model.shards.local["t"]
    ids, minus_one = torch.arange(rows), torch.full((rows, 16), -1.0)
    stop = threading.Event()

    def count() -> None:
        step = 0
        while not stop.wait(0.001):
            table.apply_gradients(ids, minus_one, step=step)
            table.assign(ints(10**9 + step), torch.zeros(1, 16))  # new rows are added and removed
            table.remove(ints(10**9 + step - 1))
            step += 1

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    store, other = MemoryStore(), counting(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for delta in (False, True, True):
                first = float(table.lookup(ids[:1])[0, 0])
                handle = checkpoint.async_save(model, store, delta=delta)
                last = float(table.lookup(ids[:1])[0, 0])
                handle.wait(60)
                other = counting(1)
                report = checkpoint.load(other, store)
                assert report.tables["t"].refused == 0
                found = other.shards.local["t"].lookup(ids)
                assert bool((found == found[0, 0]).all()), "rows of different moments"
                assert first <= float(found[0, 0]) <= last
    finally:
        stop.set()
        thread.join(60)
    checkpoint.save_delta(model, store)
    other = counting(1)
    checkpoint.load(other, store)
    assert torch.equal(other.shards.local["t"].lookup(ids), table.lookup(ids))
    assert len(other.shards.local["t"]) == len(table)
