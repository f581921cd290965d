"""state_dict of a collection: a round trip, what it refuses, and copies that are refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

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


HEADER = "rank 0 of 1 (at another world size: checkpoint.save and checkpoint.load)"
PIECES = ("ids", "rows", "time")


def key(piece: str) -> str:
    return f"rank 0 of 1/{piece}"


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
    columns = two_tables("cpu").configs["user"].state_columns  # of Adam and Adagrad
    state = through_a_file(model.state_dict())
    assert sorted(state) == sorted(
        ["head.weight", "head.bias", "embeddings.rows_anchor", f"embeddings.{HEADER}"]
        + [f"embeddings.{key(f'{table}/{piece}')}" for table in ("user", "item") for piece in PIECES]
        + [f"embeddings.{key(f'user/state/{column.key}')}" for column in columns]
    )
    assert all(type(value) is Tensor for value in state.values())
    other = nn.ModuleDict({"embeddings": two_tables("cpu"), "head": nn.Linear(2, 1)})
    assert not any(other.load_state_dict(state))
    loaded, given = other["embeddings"], model["embeddings"]
    assert isinstance(loaded, EmbeddingCollection)
    assert isinstance(given, EmbeddingCollection)
    same(loaded, given)


def test_a_state_is_a_copy() -> None:
    made = trained(two_tables("cpu"))
    rows = made.state_dict()[key("user/rows")]
    before = rows.clone()
    trained(made)
    assert torch.equal(rows, before)


def test_an_empty_collection_has_a_state_too(engine: str) -> None:
    state = through_a_file(two_tables(engine).state_dict())
    made = trained(two_tables(engine))
    made.load_state_dict(state)
    assert contents(made, "user") == contents(made, "item") == {}
    assert made.global_step == 0


@pytest.mark.parametrize(("header", "there"), [([3, 2, 0], "rank 0 of 2"), ([3, 1, 2], "rank 2 of 1")])
def test_another_world_size_is_refused(header: list[int], there: str) -> None:
    made = trained(two_tables("cpu"))
    state = made.state_dict()
    state[HEADER] = torch.tensor(header)
    with pytest.raises(UsageError, match=f"{there}, this is rank 0 of 1: use checkpoint.save and"):
        made.load_state_dict(state)


def without_user(state: dict[str, Any]) -> None:
    for name in [name for name in state if "/user/" in name]:
        del state[name]


def short_rows(state: dict[str, Any]) -> None:
    state[key("item/rows")] = state[key("item/rows")][:, :1]


def fewer_times(state: dict[str, Any]) -> None:
    state[key("item/time")] = state[key("item/time")][1:]


def early_times(state: dict[str, Any]) -> None:
    state[key("item/time")][0] = -1


def other_optimizer(state: dict[str, Any]) -> None:
    state[key("item/state/0/sum")] = state[key("item/rows")]


def short_state(state: dict[str, Any]) -> None:
    state[key("user/state/1/sum")] = state[key("user/state/1/sum")][:, 1:]


def float_ids(state: dict[str, Any]) -> None:
    state[key("item/ids")] = state[key("item/ids")].float()


def no_ids(state: dict[str, Any]) -> None:
    del state[key("item/ids")]


def no_header(state: dict[str, Any]) -> None:
    del state[HEADER]


def wrong_header(state: dict[str, Any]) -> None:
    state[HEADER] = torch.zeros(3)


def not_a_tensor(state: dict[str, Any]) -> None:
    state[key("item/ids")] = [1, 2]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without_user, r"state_dict holds tables \['item'\], this collection has \['item', 'user'\]"),
        (short_rows, r"table 'item': state_dict holds rows of torch.float32 \[6, 1\], .* \[6, 2\]"),
        (fewer_times, "table 'item': time in the state_dict must be"),
        (early_times, "table 'item': time in the state_dict must be"),
        (
            other_optimizer,
            r"table 'item': state_dict holds optimizer state \['state/0/sum'\], this table keeps \[\]",
        ),
        (
            short_state,
            r"table 'user': state_dict holds state/1/sum of .* \[6, 2\], this table has float32 \[6, 3\]",
        ),
        (float_ids, "table 'item': ids must be int64 or int32"),
        (no_ids, "table 'item': state_dict lacks ids"),
        (no_header, r"holds no int64 \[3\] under 'rank 0 of 1 "),
        (wrong_header, r"holds no int64 \[3\] under 'rank 0 of 1 "),
        (not_a_tensor, "holds a list under 'rank 0 of 1/item/ids', not a tensor"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(spoil: Callable[[Any], None], said: str) -> None:
    made = trained(two_tables("cpu"))
    state = made.state_dict()
    spoil(state)
    trained(made)
    expected = {name: whole(table) for name, table in made.shards.local.items()}

    with pytest.raises(InputError, match=said):
        made.load_state_dict(state)

    for name, table in made.shards.local.items():
        assert_same_tables(whole(table), expected[name])
    assert made.global_step == 6


def renamed(state: dict[str, Any], *labels: str) -> dict[str, Any]:
    return {name.replace("rank 0 of 1", label): x for name, x in state.items() for label in labels}


@pytest.mark.parametrize("labels", [("rank 0 of 2",), ("rank 1 of 2",), ("rank 0 of 2", "rank 1 of 2")])
def test_the_rows_of_other_ranks_are_refused(labels: tuple[str, ...]) -> None:
    made = two_tables("cpu")
    said = (
        f"holds the rows of {', '.join(labels)}, this is rank 0 of 1: use checkpoint.save and checkpoint.load"
    )
    with pytest.raises(UsageError, match=said):
        made.load_state_dict(renamed(trained(two_tables("cpu")).state_dict(), *labels))
    assert contents(made, "user") == {}


def test_own_rows_are_found_among_those_of_other_ranks() -> None:
    given, made = trained(two_tables("cpu")), two_tables("cpu")
    made.load_state_dict(renamed(given.state_dict(), "rank 0 of 1", "rank 1 of 2"))
    same(made, given)


@pytest.mark.parametrize("state", [{}, {"_extra_state": {}}, {"weight": torch.ones(1)}])
def test_a_strict_load_misses_the_rows(state: dict[str, Any]) -> None:
    made = trained(two_tables("cpu"))
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"rank 0 of 1 "):
        made.load_state_dict(OrderedDict(state))
    missing, unexpected = made.load_state_dict(OrderedDict(state), strict=False)
    assert missing == [HEADER]
    assert unexpected == list(state)
    assert len(made.tables["user"]) == 6


def test_names_with_dots_and_slashes() -> None:
    def new() -> nn.Module:
        names = ["a.b", "a/b", "a/ids", "state/0/sum"]
        tables = [TableConfig(name, dim=2, optimizer=Adagrad(0.1)) for name in names]
        return nn.ModuleDict({"e": EmbeddingCollection(tables, [Feature(name, name) for name in names])})

    def part(model: nn.Module) -> EmbeddingCollection:
        found = model.get_submodule("e")
        assert isinstance(found, EmbeddingCollection)
        return found

    given, made = new(), new()
    for number, table in enumerate(part(given).tables.values()):
        table.assign(torch.arange(number + 1), torch.full((number + 1, 2), float(number)))
    made.load_state_dict(get_model_state_dict(given))
    same(part(made), part(given))


def test_safetensors_saves_and_loads_a_model(tmp_path: Path) -> None:
    def new() -> nn.ModuleDict:
        return nn.ModuleDict({"embeddings": two_tables("cpu"), "head": nn.Linear(2, 1)})

    given, made = new(), new()
    trained(given["embeddings"])  # type: ignore[arg-type]
    save_model(given, str(tmp_path / "model.safetensors"))
    missing, unexpected = load_model(made, tmp_path / "model.safetensors")
    assert not missing
    assert not unexpected
    same(made["embeddings"], given["embeddings"])  # type: ignore[arg-type]


def test_tensors_of_a_state_are_plain_for_everything_else() -> None:
    state = trained(two_tables("cpu")).state_dict()
    rows = state[key("user/rows")]
    assert {type(x) for x in (rows + 1, rows[:2], rows.clone(), rows.cpu()[0])} == {Tensor}
    assert rows.size() == rows.shape == (6, 4)
    assert rows.size() != (99, 4)
    assert {rows.size(): "exact"}.get(torch.Size((99, 4))) is None
    assert rows.size(0) == rows.shape[0] == 6
    assert type(pickle.loads(pickle.dumps(rows))) is Tensor
    made = two_tables("cpu")
    made.load_state_dict(copy.deepcopy(state))
    assert len(made.tables["user"]) == 6


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
