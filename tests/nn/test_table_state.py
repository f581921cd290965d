"""state_dict of a collection: a round trip, what it refuses, and copies that are refused."""

from __future__ import annotations

import copy
import io
import pickle
import re
import resource
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from megalith import Adagrad, EmbeddingCollection, Feature, TableConfig
from megalith.errors import InputError, UsageError
from megalith.nn import collection_state as state
from tests.distributed.ranks import forked
from tests.nn.support import assign, collection, contents, ints, two_tables
from tests.table.support import assert_same_tables, whole


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

    second = two_tables("cpu" if engine == "reference" else "reference")  # states are those of any engine
    trained(second, 1, start=50)  # rows that the state does not know go away
    second.load_state_dict(state)

    same(second, first)
    again = two_tables(engine)
    again.load_state_dict(through_a_file(second.state_dict()))
    same(trained(again, start=3), trained(first, start=3))


def test_it_is_part_of_a_models_state_dict() -> None:
    model = nn.ModuleDict({"embeddings": trained(two_tables()), "head": nn.Linear(2, 1)})
    columns = two_tables().configs["user"].state_columns  # of Adam and Adagrad
    state = through_a_file(model.state_dict())
    assert sorted(state) == sorted(
        ["head.weight", "head.bias", "embeddings.rows_anchor", f"embeddings.{HEADER}"]
        + [f"embeddings.{key(f'{table}/{piece}')}" for table in ("user", "item") for piece in PIECES]
        + [f"embeddings.{key(f'user/state/{column.key}')}" for column in columns]
    )
    assert all(type(value) is Tensor for value in state.values())
    other = nn.ModuleDict({"embeddings": two_tables(), "head": nn.Linear(2, 1)})
    assert not any(other.load_state_dict(state))
    loaded, given = other["embeddings"], model["embeddings"]
    assert isinstance(loaded, EmbeddingCollection)
    assert isinstance(given, EmbeddingCollection)
    same(loaded, given)


def test_an_empty_collection_has_a_state_too(engine: str) -> None:
    state = through_a_file(two_tables(engine).state_dict())
    made = trained(two_tables(engine))
    made.load_state_dict(state)
    assert contents(made, "user") == contents(made, "item") == {}
    assert made.global_step == 0


def without_user(state: dict[str, Any]) -> None:
    for name in [name for name in state if "/user/" in name]:
        del state[name]


def change(piece: str, to: Callable[[Tensor], Any], source: str = "") -> Callable[[dict[str, Any]], None]:
    """Replaces a tensor of a state by a function of it, or of another one."""
    return lambda state: state.__setitem__(key(piece), to(state[key(source or piece)].clone()))


STATES: list[tuple[Callable[[Any], object], str]] = [
    (without_user, r"state_dict holds tables \['item'\], this collection has \['item', 'user'\]"),
    (change("item/rows", lambda x: x[:, :1]), r"'item': state_dict holds rows of .* \[6, 1\], .* \[6, 2\]"),
    (change("item/time", lambda x: x[1:]), "table 'item': time in the state_dict must be"),
    (change("item/time", lambda x: x - 2000), "table 'item': time in the state_dict must be"),
    (
        change("item/state/0/sum", lambda x: x, "item/rows"),
        r"table 'item': state_dict holds optimizer state \['state/0/sum'\], this table keeps \[\]",
    ),
    (
        change("user/state/1/sum", lambda x: x[:, 1:]),
        r"table 'user': state_dict holds state/1/sum of .* \[6, 2\], this table has float32 \[6, 3\]",
    ),
    (change("item/ids", lambda x: x.float()), "table 'item': ids must be int64 or int32"),
    (lambda state: state.pop(key("item/ids")), "table 'item': state_dict lacks ids"),
    (lambda state: state.pop(HEADER), r"holds no int64 \[3\] under 'rank 0 of 1 "),
    (lambda state: state.update({HEADER: torch.zeros(3)}), r"holds no int64 \[3\] under 'rank 0 of 1 "),
    (change("item/ids", lambda x: [1, 2]), "holds a list under 'rank 0 of 1/item/ids', not a tensor"),
]


@pytest.mark.parametrize(("spoil", "said"), STATES)
def test_a_state_that_does_not_fit_changes_nothing(spoil: Callable[[Any], None], said: str) -> None:
    made = trained(two_tables())
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


@pytest.mark.parametrize("labels", [("rank 0 of 2",), ("rank 1 of 2",), ("rank 0 of 3", "rank 1 of 3")])
def test_the_rows_of_other_ranks_are_refused(labels: tuple[str, ...]) -> None:
    made = two_tables()
    said = (
        f"holds the rows of {', '.join(labels)}, this is rank 0 of 1: use checkpoint.save and checkpoint.load"
    )
    with pytest.raises(UsageError, match=said):
        made.load_state_dict(renamed(trained(two_tables()).state_dict(), *labels))
    assert contents(made, "user") == {}


def test_another_world_size_is_refused() -> None:
    made = trained(two_tables())
    for header, there in (([3, 2, 0], "rank 0 of 2"), ([3, 1, 2], "rank 2 of 1")):
        state = made.state_dict() | {HEADER: torch.tensor(header)}
        with pytest.raises(UsageError, match=f"{there}, this is rank 0 of 1: use checkpoint.save and"):
            made.load_state_dict(state)


def test_own_rows_are_found_among_those_of_other_ranks() -> None:
    given, made = trained(two_tables()), two_tables()
    made.load_state_dict(renamed(given.state_dict(), "rank 0 of 1", "rank 1 of 2"))
    same(made, given)


def test_the_rows_of_all_ranks_of_another_world_size_are_taken() -> None:
    given, made = trained(two_tables()), two_tables()
    state, parts = given.state_dict(), {}
    for rank in range(2):
        label = f"rank {rank} of 2"
        parts[HEADER.replace("rank 0 of 1", label)] = torch.tensor([3, 2, rank])
        for name in ("user", "item"):
            own = state[key(f"{name}/ids")] % 2 == rank
            for piece, values in state.items():
                if f"/{name}/" in piece:
                    parts[piece.replace("rank 0 of 1", label)] = values[own]
    made.load_state_dict(parts)
    same(made, given)


def process_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def saved_with_little_memory(path: Path) -> int:
    """Save a table in a process that may allocate three quarters of the table's size from then on."""
    made = collection(dim=64)
    for start in range(0, 400_000, 20_000):
        made.tables["t"].assign(torch.arange(start, start + 20_000), torch.full((20_000, 64), float(start)))
    state.LARGE = 1 << 20
    size = 400_000 * 64 * 4
    room = size * 3 // 4  # a scan has two chunks of 17 MB, and the allocator may keep as much
    resource.setrlimit(resource.RLIMIT_DATA, (process_bytes("VmData") + room, resource.RLIM_INFINITY))
    with pytest.raises(RuntimeError, match="memory"):
        torch.empty(size, dtype=torch.uint8)
    torch.save(made.state_dict(), path)
    return len(made.tables["t"])


def test_the_state_of_a_large_table_is_saved_without_memory_for_a_copy(tmp_path: Path) -> None:
    found = forked(saved_with_little_memory, {"limited": (tmp_path / "state",)})
    made = collection(dim=64)
    made.load_state_dict(torch.load(tmp_path / "state", mmap=True, weights_only=True))
    assert len(made.tables["t"]) == found["limited"] == 400_000
    assert made.tables["t"].lookup(torch.tensor([0, 399_999]))[:, 63].tolist() == [0.0, 380_000.0]


def test_a_large_column_is_in_memory_where_files_cannot_be_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.setattr(state, "LARGE", 1)
    monkeypatch.delattr("os.posix_fallocate")
    column, drop = state.new_column(3, torch.empty(0, 2))
    drop()
    assert column.shape == (3, 2)


@pytest.mark.parametrize("state", [{}, {"_extra_state": {}}, {"weight": torch.ones(1)}])
def test_a_strict_load_misses_the_rows(state: dict[str, Any]) -> None:
    made = trained(two_tables())
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
        return nn.ModuleDict({"embeddings": two_tables(), "head": nn.Linear(2, 1)})

    given, made = new(), new()
    trained(given["embeddings"])  # type: ignore[arg-type]
    save_model(given, str(tmp_path / "model.safetensors"))
    missing, unexpected = load_model(made, tmp_path / "model.safetensors")
    assert not missing
    assert not unexpected
    same(made["embeddings"], given["embeddings"])  # type: ignore[arg-type]


def test_tensors_of_a_state_are_copies_and_plain_for_everything_else() -> None:
    given = trained(two_tables())
    state = given.state_dict()
    rows = state[key("user/rows")]
    before = rows.clone()
    trained(given)
    assert torch.equal(rows, before)
    assert {type(x) for x in (rows + 1, rows[:2], rows.clone(), rows.cpu()[0])} == {Tensor}
    assert rows.size() == rows.shape == (6, 4)
    assert rows.size() != (99, 4)
    assert {rows.size(): "exact"}.get(torch.Size((99, 4))) is None
    assert rows.size(0) == rows.shape[0] == 6
    assert type(pickle.loads(pickle.dumps(rows))) is Tensor
    made = two_tables()
    made.load_state_dict(copy.deepcopy(state))
    assert len(made.tables["user"]) == 6


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside"])
def test_copies_are_refused_with_advice(copied: Callable[[Any], Any], inside: bool) -> None:
    made: nn.Module = two_tables()
    if inside and copied is not copy.copy:
        made = nn.Sequential(made)
    with pytest.raises(
        UsageError, match=r"cannot be (copied|pickled): use checkpoint.save and checkpoint.load"
    ):
        copied(made)


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.head = two_tables(), nn.Linear(6, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat(list(self.embeddings({"user": ids, "item": -ids}).values()), 1))
        return out


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """The lines of code in the error of copy.deepcopy."""
    with pytest.raises(UsageError) as raised:
        copy.deepcopy(Scored())
    return [line.strip() for line in str(raised.value).splitlines() if line.startswith("    ")]


def test_the_lines_of_the_error_make_a_copy_that_shares_the_tables(lines: list[str]) -> None:
    model, ids = Scored(), torch.arange(4)
    scope: dict[str, Any] = {"copy": copy, "EmbeddingCollection": EmbeddingCollection, "model": model}
    exec("\n".join(lines[:2]), scope)
    averaged = scope["averaged"].eval()
    trained(model.embeddings)
    with torch.no_grad():
        model.head.weight.add_(1)
    assert model.embeddings.training
    assert not torch.equal(averaged.head.weight, model.head.weight)
    with torch.no_grad():
        assert torch.equal(
            averaged.embeddings({"user": ids, "item": ids})["user"],
            model.embeddings.tables["user"].lookup(ids),
        )


def test_the_lines_of_the_error_return_to_the_best_rows(lines: list[str]) -> None:
    model, expected = Scored(), Scored()
    trained(model.embeddings)
    trained(expected.embeddings)
    expected.head.load_state_dict(model.head.state_dict())
    scope: dict[str, Any] = {"model": model}
    exec(lines[2], scope)
    trained(model.embeddings, start=3)
    with torch.no_grad():
        model.head.weight.add_(1)
    exec(lines[3], scope)
    same(model.embeddings, expected.embeddings)


def test_gradients_under_way_survive_a_load() -> None:
    made = collection(update="step")
    assign(made, {1: [5], 2: [6]})
    state = made.state_dict()
    made({"a": ints(1)})["a"].sum().backward()
    made.load_state_dict(state)
    made.step()
    assert contents(made) == {1: [4], 2: [6]}


# ---- torch.distributed.checkpoint of a model with a collection


class Model(nn.Module):
    def __init__(self, engine: str = "cpu") -> None:
        super().__init__()
        self.embeddings = two_tables(engine)
        self.head = nn.Linear(6, 1)


def trained_model(engine: str = "cpu") -> Model:
    model = Model(engine)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    for step in range(3):
        ids = torch.arange(5) * (step + 1)
        out = model.embeddings({"user": ids, "item": -ids}, time=1000 + step)
        model.head(torch.cat([out["user"], out["item"]], 1)).sum().backward()
        optimizer.step()
    return model


def assert_same(actual: Model, expected: Model) -> None:
    assert actual.embeddings.global_step == expected.embeddings.global_step == 3
    for name, table in expected.embeddings.shards.local.items():
        assert_same_tables(whole(actual.embeddings.shards.local[name]), whole(table))
    assert torch.equal(actual.head.weight, expected.head.weight)


@pytest.fixture(autouse=True)
def without_process_group() -> Iterator[None]:
    """DCP warns that it assumes a single process, which is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def test_save_and_load_into_a_fresh_model_and_a_collection_alone(tmp_path: Path, engine: str) -> None:
    model, fresh, alone = trained_model(engine), Model(engine), Model(engine)
    assert isinstance(model.embeddings, Stateful)
    dcp.save({"model": model, "embeddings": model.embeddings}, checkpoint_id=tmp_path)
    dcp.load({"model": fresh}, checkpoint_id=tmp_path)
    assert_same(fresh, model)
    alone.head = model.head
    dcp.load({"embeddings": alone.embeddings}, checkpoint_id=tmp_path)
    assert_same(alone, model)


def test_tables_without_rows_empty_the_tables_that_load_them(tmp_path: Path) -> None:
    dcp.save({"model": Model()}, checkpoint_id=tmp_path)
    model = trained_model()
    dcp.load({"model": model}, checkpoint_id=tmp_path)
    assert [len(table) for table in model.embeddings.tables.values()] == [0, 0]
    assert model.embeddings.global_step == 0


def test_tables_with_another_dim_are_refused(tmp_path: Path) -> None:
    def with_dim(dim: int) -> EmbeddingCollection:
        return EmbeddingCollection([TableConfig("t", dim=dim, optimizer=Adagrad(0.1))], [Feature("a", "t")])

    saved, other = with_dim(4), with_dim(3)
    saved({"a": torch.arange(5)})["a"].sum().backward()
    dcp.save({"model": saved}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match="Size mismatch between saved"):
        dcp.load({"model": other}, checkpoint_id=tmp_path)
    assert len(other.tables["t"]) == 0


def test_a_dcp_checkpoint_is_readable_without_megalith(tmp_path: Path) -> None:
    """The metadata and the tensors are torch's own types; dcp_to_torch_save makes a plain file of them."""
    model, fresh = trained_model(), Model()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp")
    assert b"megalith" not in (tmp_path / "dcp" / ".metadata").read_bytes()
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "file")
    loaded = torch.load(tmp_path / "file", weights_only=True)
    assert all(type(value) is Tensor for value in loaded.values())
    fresh.load_state_dict(loaded)
    assert_same(fresh, model)


def test_async_save_keeps_what_was_there_when_it_began(tmp_path: Path) -> None:
    model, expected, fresh = trained_model(), trained_model(), Model()
    expected.load_state_dict(model.state_dict())
    staged = dcp.async_save({"model": model}, checkpoint_id=tmp_path, no_dist=True)
    out = model.embeddings({"user": torch.arange(3), "item": torch.arange(3)})
    out["user"].sum().backward()
    getattr(staged, "upload_completion", staged).result(timeout=60)
    dcp.load({"model": fresh}, checkpoint_id=tmp_path)
    assert_same(fresh, expected)


def test_torchs_model_state_dict_helpers(tmp_path: Path) -> None:
    model, fresh = trained_model(), Model()
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path)
    loaded = get_model_state_dict(fresh)
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_model_state_dict(fresh, loaded)
    assert_same(fresh, model)


def test_a_checkpoint_of_more_ranks_names_checkpoint_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(state, "world_size", lambda: 2)
        dcp.save({"model": trained_model()}, checkpoint_id=tmp_path)
    fresh = Model()
    before = fresh.head.weight.clone()
    with pytest.raises(
        CheckpointException, match=r"rank 0 of 1 \(at another world size: .*checkpoint\.load\)"
    ):
        dcp.load({"model": fresh}, checkpoint_id=tmp_path)
    assert torch.equal(fresh.head.weight, before)
    assert len(fresh.embeddings.shards.local["user"]) == 0
