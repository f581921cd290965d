"""state_dict of a collection: a round trip, what it refuses, and copies that are refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megalith import SGD, Adagrad, Adam, EmbeddingCollection, Feature, Normal, Segment, TableConfig
from megalith.errors import InputError, UsageError
from tests.nn.support import assign, collection, contents, ints
from tests.table.support import assert_same_tables, whole


def two_tables(engine: str, seed: int = 0, item: TableConfig | None = None) -> EmbeddingCollection:
    tables = [
        TableConfig(
            "user",
            segments=[Segment(1, optimizer=Adam(0.1)), Segment(3, optimizer=Adagrad(0.1))],
        ),
        item or TableConfig("item", dim=2, optimizer=SGD(0.5), initializer=Normal()),
    ]
    features = [Feature("user", "user"), Feature("item", "item")]
    return EmbeddingCollection(tables, features, engine=engine, seed=seed)


def trained(made: EmbeddingCollection, steps: int = 3, start: int = 0) -> EmbeddingCollection:
    for step in range(start, start + steps):
        ids = torch.arange(4) + step
        out = made({"user": ids, "item": -ids}, time=1000 + step)
        (out["user"].sum(1) * out["item"].sum(1) + out["user"].sum(1)).sum().backward()
    return made


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def inside(state: Any) -> Any:
    """What a collection saved: under its rank's name, in a tuple."""
    (key,) = state["_extra_state"]
    assert key.startswith("rank 0 of 1 (")
    (saved,) = state["_extra_state"][key]
    return saved


def same(actual: EmbeddingCollection, expected: EmbeddingCollection) -> None:
    assert actual.global_step == expected.global_step
    for name, table in expected.shards.local.items():
        assert_same_tables(whole(actual.shards.local[name]), whole(table))


def test_a_round_trip_through_a_file_continues_exactly(engine: str) -> None:
    first = trained(two_tables(engine))
    state = through_a_file(first.state_dict())

    second = two_tables(engine)
    trained(second, 1, start=50)  # rows that the state does not know go away
    second.load_state_dict(state)

    same(second, first)
    same(trained(second, start=3), trained(first, start=3))


def test_engines_exchange_state() -> None:
    first = trained(two_tables("cpu"))
    second = two_tables("reference")
    second.load_state_dict(first.state_dict())
    same(second, first)


def test_it_is_part_of_a_models_state_dict() -> None:
    model = nn.ModuleDict({"embeddings": trained(two_tables("cpu")), "head": nn.Linear(2, 1)})
    state = through_a_file(model.state_dict())
    assert sorted(state) == ["embeddings._extra_state", "head.bias", "head.weight"]
    other = nn.ModuleDict({"embeddings": two_tables("cpu"), "head": nn.Linear(2, 1)})
    assert not any(other.load_state_dict(state))
    loaded, given = other["embeddings"], model["embeddings"]
    assert isinstance(loaded, EmbeddingCollection)
    assert isinstance(given, EmbeddingCollection)
    same(loaded, given)


def test_a_state_is_a_copy() -> None:
    made = trained(two_tables("cpu"))
    state = inside(made.state_dict())
    rows = state["tables"]["user"]["rows"].clone()
    trained(made)
    assert torch.equal(state["tables"]["user"]["rows"], rows)


def test_an_empty_collection_has_a_state_too(engine: str) -> None:
    state = through_a_file(two_tables(engine).state_dict())
    made = trained(two_tables(engine))
    made.load_state_dict(state)
    assert contents(made, "user") == contents(made, "item") == {}
    assert made.global_step == 0


@pytest.mark.parametrize(("key", "there"), [("world_size", "rank 0 of 2"), ("rank", "rank 2 of 1")])
def test_another_world_size_is_refused(key: str, there: str) -> None:
    made = trained(two_tables("cpu"))
    state = made.state_dict()
    inside(state)[key] = 2
    with pytest.raises(UsageError, match=f"{there}, this is rank 0 of 1: use checkpoint.save and"):
        made.load_state_dict(state)


def without_user(state: dict[str, Any]) -> None:
    del state["tables"]["user"]


def short_rows(state: dict[str, Any]) -> None:
    state["tables"]["item"]["rows"] = state["tables"]["item"]["rows"][:, :1]


def fewer_times(state: dict[str, Any]) -> None:
    state["tables"]["item"]["time"] = state["tables"]["item"]["time"][1:]


def early_times(state: dict[str, Any]) -> None:
    state["tables"]["item"]["time"][0] = -1


def other_optimizer(state: dict[str, Any]) -> None:
    state["tables"]["item"]["state"]["0/sum"] = state["tables"]["item"]["rows"]


def short_state(state: dict[str, Any]) -> None:
    state["tables"]["user"]["state"]["1/sum"] = state["tables"]["user"]["state"]["1/sum"][:, 1:]


def float_ids(state: dict[str, Any]) -> None:
    state["tables"]["item"]["ids"] = state["tables"]["item"]["ids"].float()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without_user, r"state_dict holds tables \['item'\], this collection has \['item', 'user'\]"),
        (short_rows, r"table 'item': state_dict holds rows of torch.float32 \[6, 1\], .* \[6, 2\]"),
        (fewer_times, "table 'item': time in the state_dict must be"),
        (early_times, "table 'item': time in the state_dict must be"),
        (
            other_optimizer,
            r"table 'item': state_dict holds optimizer state \['0/sum'\], this table keeps \[\]",
        ),
        (
            short_state,
            r"table 'user': state_dict holds 1/sum of .* \[6, 2\], this table has float32 \[6, 3\]",
        ),
        (float_ids, "table 'item': ids must be int64 or int32"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(spoil: Callable[[Any], None], said: str) -> None:
    made = trained(two_tables("cpu"))
    state = made.state_dict()
    spoil(inside(state))
    trained(made)
    expected = {name: whole(table) for name, table in made.shards.local.items()}

    with pytest.raises(InputError, match=said):
        made.load_state_dict(state)

    for name, table in made.shards.local.items():
        assert_same_tables(whole(table), expected[name])
    assert made.global_step == 6


@pytest.mark.parametrize("saved", [None, {}, {"rank 0 of 1": {}}, [1]])
def test_something_else_is_refused(saved: Any) -> None:
    with pytest.raises((InputError, UsageError), match="this state_dict holds"):
        two_tables("cpu").load_state_dict({"_extra_state": saved})


def test_the_states_of_several_ranks_in_one_are_refused() -> None:
    made = two_tables("cpu")
    state = made.state_dict()
    (saved,) = state["_extra_state"].values()
    with pytest.raises(UsageError, match=r"holds \['rank 0 of 2', 'rank 1 of 2'\], not .*checkpoint.load"):
        made.load_state_dict({"_extra_state": {"rank 0 of 2": saved, "rank 1 of 2": saved}})


def test_a_strict_load_misses_the_rows() -> None:
    made = two_tables("cpu")
    with pytest.raises(RuntimeError, match="_extra_state"):
        made.load_state_dict(OrderedDict())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside"])
def test_copies_are_refused_with_advice(copied: Callable[[Any], Any], inside: bool) -> None:
    made: nn.Module = two_tables("cpu")
    if inside and copied is not copy.copy:
        made = nn.Sequential(made)
    with pytest.raises(
        UsageError, match=r"cannot be (copied|pickled): use checkpoint.save and checkpoint.load"
    ):
        copied(made)


def test_gradients_under_way_survive_a_load() -> None:
    made = collection(update="step")
    assign(made, {1: [5], 2: [6]})
    state = made.state_dict()
    made({"a": ints(1)})["a"].sum().backward()
    made.load_state_dict(state)
    made.step()
    assert contents(made) == {1: [4], 2: [6]}
