"""Loading into a model that differs from the saved one: what is renamed, skipped or raises."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megalith import (
    LAMB,
    Adagrad,
    Adam,
    AMSGrad,
    EmbeddingCollection,
    Feature,
    LocalShards,
    Segment,
    TableConfig,
    checkpoint,
)
from megalith.checkpoint import manifest as manifest_module
from megalith.errors import CheckpointError, InputError, UsageError
from tests.checkpoint.memory import MemoryStore
from tests.table.support import assert_same_tables, ints, whole


class Net(nn.Module):
    """Tables by name, and dense layers by name."""

    def __init__(self, tables: list[TableConfig], **layers: nn.Module) -> None:
        super().__init__()
        self.emb = EmbeddingCollection(tables, [Feature(f"f{i}", t.name) for i, t in enumerate(tables)])
        for name, layer in layers.items():
            self.add_module(name, layer)

    def fill(self, seed: int = 1) -> Net:
        generator = torch.Generator().manual_seed(seed)
        for table in self.emb.shards.local.values():
            grads = torch.rand(3, table.dim, generator=generator)
            table.apply_gradients(ints(1, -1, 2**40), grads, step=0, time=9)
        return self


def table(name: str = "t", **options: Any) -> TableConfig:
    return TableConfig(name, **({"dim": 2, "optimizer": Adagrad(0.1)} | options))


def saved(*tables: TableConfig, **layers: nn.Module) -> tuple[MemoryStore, Net]:
    store, net = MemoryStore(), Net(list(tables), **layers).fill()
    checkpoint.save(net, store)
    return store, net


def rows(net: Net, name: str) -> Any:
    return whole(net.emb.shards.local[name])


def test_tables_that_one_side_lacks_are_reported() -> None:
    store, net = saved(table("a"), table("c"))
    manifest = checkpoint.read_manifest(store)
    store.files[manifest.tables()["emb.c"][0].pieces[0].file.path] = b"damage that does not matter"
    other = Net([table("a"), table("b")]).fill(2)
    before = rows(other, "b")
    with (
        pytest.warns(UserWarning, match=r"does not hold 'emb\.b'"),
        pytest.warns(UserWarning, match=r"the model does not have: 'emb\.c'"),
    ):
        report = checkpoint.load(other, store)
    assert (report.missing, report.extra, report.rows) == (["emb.b"], ["emb.c"], {"emb.a": 3})
    assert_same_tables(rows(other, "a"), rows(net, "a"))
    assert_same_tables(rows(other, "b"), before)


def test_names_may_be_mapped_and_exchanged() -> None:
    store, net = saved(table("old"), head=nn.Linear(2, 1))
    other = Net([table("new")], top=nn.Linear(2, 1))
    rename = {"emb.old": "emb.new", "head.weight": "top.weight", "head.bias": "top.bias"}
    report = checkpoint.load(other, store, rename=rename)
    assert (report.rows, report.missing, report.extra) == ({"emb.new": 3}, [], [])
    assert_same_tables(rows(other, "new"), rows(net, "old"))
    assert torch.equal(other.top.weight, net.head.weight)  # type: ignore[union-attr]

    store, net = saved(table("a"), table("b"))
    other = Net([table("a"), table("b")])
    checkpoint.load(other, store, rename={"emb.a": "emb.b", "emb.b": "emb.a"})
    assert_same_tables(rows(other, "a"), rows(net, "b"))
    assert_same_tables(rows(other, "b"), rows(net, "a"))


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        ({"emb.x": "emb.a"}, r"does not hold 'emb\.x'; it holds emb\.a, emb\.b, head\.bias, head\.weight"),
        ({"emb.a": "emb.b"}, "two tables of .* would have the same name"),
        ({"head.weight": "head.bias"}, "two dense weights of .* would have the same name"),
    ],
)
def test_an_invalid_rename_raises(rename: dict[str, str], words: str) -> None:
    store, _ = saved(table("a"), table("b"), head=nn.Linear(2, 1))
    other = Net([table("a"), table("b")], head=nn.Linear(2, 1)).fill(2)
    before = rows(other, "a")
    with pytest.raises(InputError, match=words):
        checkpoint.load(other, store, rename=rename)
    assert_same_tables(rows(other, "a"), before)


CHANGES = {
    "dim": ({"dim": 3}, "segment 0 has dim 2, but the model's has dim 3"),
    "optimizer": ({"optimizer": Adam(0.1)}, "trained with adagrad, but the model uses adam"),
    "segments": (
        {"dim": None, "optimizer": None, "segments": [Segment(1, optimizer=Adagrad(0.1))] * 2},
        "has 1 segments, but the model's has 2",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_table_raises_or_is_skipped_with_allow_missing(what: str) -> None:
    options, words = CHANGES[what]
    store, net = saved(table("a"), table("b"))
    other = Net([table("a", **options), table("b")]).fill(2)
    before = rows(other, "a")
    with pytest.raises(CheckpointError, match=rf"table 'emb\.a'.*{words}"):
        checkpoint.load(other, store)
    assert_same_tables(rows(other, "a"), before)

    with pytest.warns(UserWarning, match=r"does not hold 'emb\.a'"):
        report = checkpoint.load(other, store, allow_missing=True)
    assert report.missing == ["emb.a"]
    assert_same_tables(rows(other, "a"), before)
    assert_same_tables(rows(other, "b"), rows(net, "b"))


def assert_same_states(a: Any, b: Any) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_weights_can_be_loaded_without_optimizer_state() -> None:
    store, net = saved(table("a"), table("b"))
    other = Net([table("a", optimizer=Adam(0.5)), table("b")])
    checkpoint.load(other, store, drop_optimizer_state=["emb.a"])
    assert torch.equal(rows(other, "a").rows, rows(net, "a").rows)
    fresh = Net([table("a", optimizer=Adam(0.5))])
    fresh.emb.shards.local["a"].assign(ints(1, -1, 2**40), torch.zeros(3, 2))
    assert_same_states(rows(other, "a").state, rows(fresh, "a").state)
    assert_same_tables(rows(other, "b"), rows(net, "b"))

    checkpoint.load(other, store, drop_optimizer_state=True)
    assert rows(other, "b").state["0/sum"].count_nonzero() == 0
    with pytest.raises(InputError, match=r"no table 'emb\.x' is loaded"):
        checkpoint.load(other, store, drop_optimizer_state=["emb.a", "emb.x"])


@pytest.mark.parametrize("kind", [Adam, AMSGrad, LAMB])
def test_the_other_bias_correction_is_loaded_on_request(kind: type[Adam]) -> None:
    forms = {form: kind(0.1, bias_correction=form) for form in ("step", "row")}
    for old, new in (("step", "row"), ("row", "step")):
        store, net = MemoryStore(), Net([table("a", optimizer=forms[old])]).fill()
        net.emb.global_step = 7
        checkpoint.save(net, store)
        other = Net([table("a", optimizer=forms[new])]).fill(2)
        before = rows(other, "a")
        said = rf'{forms[old].name}\(bias_correction="{old}"\), but the model uses "{new}".*=True'
        with pytest.raises(CheckpointError, match=said):
            checkpoint.load(other, store)
        assert_same_tables(rows(other, "a"), before)

        checkpoint.load(other, store, convert_bias_correction=True)
        kept, loaded = rows(net, "a"), rows(other, "a")
        if new == "row":  # each row counts as updated in every step
            assert loaded.state.pop("0/count").tolist() == [[7.0]] * 3
        kept.state.pop("0/count", None)
        assert torch.equal(loaded.rows, kept.rows)
        assert_same_states(loaded.state, kept.state)


def test_dense_weights_that_do_not_match_are_skipped_with_allow_missing() -> None:
    store, net = saved(table("a"), head=nn.Linear(2, 1), gone=nn.Linear(1, 1))
    other = Net([table("a")], head=nn.Linear(2, 1, bias=False), new=nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"lacks \['new\.bias', 'new\.weight'\]"):
        checkpoint.load(other, store)
    with (
        pytest.warns(UserWarning, match="does not hold 'new.bias', 'new.weight'"),
        pytest.warns(UserWarning, match="the model does not have: 'gone.bias', 'gone.weight', 'head.bias'"),
    ):
        report = checkpoint.load(other, store, allow_missing=True)
    assert report.missing == ["new.bias", "new.weight"]
    assert report.extra == ["gone.bias", "gone.weight", "head.bias"]
    assert torch.equal(other.head.weight, net.head.weight)  # type: ignore[union-attr]


def test_rates_and_a_trainable_flag_may_change_without_a_warning() -> None:
    store, net = saved(table("a"))
    other = Net([table("a", optimizer=Adagrad(0.7, eps=1e-3), trainable=False, missing="zeros")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.load(other, store)
    assert_same_tables(rows(other, "a"), rows(net, "a"))


class Two(nn.Module):
    """Two collections: each with a table, or with one table together."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        shards = [LocalShards([table("t")]) for _ in range(2)]
        self.a = EmbeddingCollection(shards[0], [Feature("f", "t")])
        self.b = EmbeddingCollection(shards[0 if shared else 1], [Feature("g", "t")])


def test_each_collection_gets_its_own_step_and_tables_that_two_share_are_saved_once() -> None:
    model, store = Two(), MemoryStore()
    model.a.global_step, model.b.global_step = 7, 9
    model.b.shards.assign({"t": (ints(1, 2), torch.ones(2, 2))})
    checkpoint.save(model, store)
    other = Two()
    checkpoint.load(other, store)
    assert (other.a.global_step, other.b.global_step) == (7, 9)
    assert_same_tables(whole(other.b.shards.local["t"]), whole(model.b.shards.local["t"]))

    model, other, store = Two(shared=True), Two(shared=True), MemoryStore()
    model.a.shards.assign({"t": (ints(1, 2), torch.ones(2, 2))})
    checkpoint.save(model, store)
    model.b.global_step = 4
    model.b.shards.assign({"t": (ints(3), torch.ones(1, 2))})
    checkpoint.save_delta(model, store)
    report = checkpoint.load(other, store)
    assert (report.rows, report.missing, other.b.global_step) == ({"a.t": 3}, [], 4)
    assert_same_tables(whole(other.b.shards.local["t"]), whole(model.b.shards.local["t"]))


def nested(levels: int, container: Callable[[Any], Any]) -> Any:
    data: Any = container(0)
    for _ in range(levels - 1):
        data = container(data)
    return data


def test_progress_that_a_manifest_cannot_hold_raises_at_the_save() -> None:
    store, model = MemoryStore(), Net([table()])

    def deep(levels: int) -> dict[str, Any]:
        return nested(levels, lambda inner: {"x": inner})  # type: ignore[no-any-return]

    wrong: list[Any] = [{1: "a", "1": "b"}, {"x": {1, 2}}, {"x": float("inf")}, deep(98), deep(101)]
    wrong.append({"x": nested(120, lambda inner: [inner])})
    for save in (checkpoint.save, checkpoint.save_delta):
        for progress in wrong:
            with pytest.raises(InputError, match="progress must be JSON data of at most 97 levels"):
                save(model, store, progress=progress)
        checkpoint.save(model, store, progress=deep(97))
    checkpoint.save_delta(model, store, progress=deep(97))  # as deep as a base can hold them, and a delta
    assert checkpoint.load(Net([table()]), store).progress == deep(97)

    class DeepState(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return deep(50)

    optimizer = DeepState([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(InputError, match="packed state must be JSON data of at most 97 levels"):
        checkpoint.save(model, MemoryStore(), optimizer=optimizer)


def test_a_manifest_too_large_to_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    store, model = MemoryStore(), Net([table()])
    first = checkpoint.save(model, store)
    monkeypatch.setattr(manifest_module, "MAX_MANIFEST", 10_000)

    with pytest.raises(CheckpointError, match=r"the manifest would have .* bytes, more than 10000"):
        checkpoint.save(model, store, progress={"x": "y" * 10_000})

    assert checkpoint.read_manifest(store) == first


def test_two_tables_with_the_same_name_raise() -> None:
    net = Net([table("x.t")])
    net.emb.add_module("x", Net([table("t")]).emb)
    with pytest.raises(UsageError, match=r"the same name: emb\.x\.t, emb\.x\.t"):
        checkpoint.save(net, MemoryStore())


def test_generators_are_restored_and_invalid_states_raise() -> None:
    torch.manual_seed(3)
    random.seed(3)
    state = checkpoint.rng_state()
    drawn = torch.rand(2).tolist(), random.random()
    checkpoint.set_rng_state(state)
    assert (torch.rand(2).tolist(), random.random()) == drawn
    for wrong in (
        {},
        {"torch": "!", "python": []},
        {"torch": state["torch"], "python": [3, [10**30] * 625, None]},
        {"torch": "AAAA", "python": state["python"]},
        {"torch": 7, "python": state["python"]},
    ):
        with pytest.raises(CheckpointError, match="random number generators"):
            checkpoint.set_rng_state(wrong)


def test_a_duplicate_row_is_kept_once_with_a_warning() -> None:
    store, _ = saved(table("a"))
    manifest = json.loads(store.files["manifest.json"])
    entry = manifest["collections"]["emb"]["tables"]["a"]
    again = copy.deepcopy(entry["pieces"][0])
    again["file"]["path"] = "data-again/x.safetensors"
    store.files["data-again/x.safetensors"] = store.files[entry["pieces"][0]["file"]["path"]]
    entry["pieces"].append(again)
    entry["live"] = 6
    store.files["manifest.json"] = json.dumps(manifest).encode()

    with pytest.warns(UserWarning, match=r"holds duplicate rows, .* of table 'emb\.a'"):
        report = checkpoint.load(Net([table("a")]), store)

    assert report.tables["emb.a"] == checkpoint.TableReport(read=6, kept=3, refused=3)
