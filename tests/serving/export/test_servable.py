"""Servable: it answers what the trained module answers, and takes writes while it does."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith import SGD, EmbeddingCollection, Feature, FirstN, Layout, Mean, Ragged, Slice, TableConfig
from megalith.distributed.dense_parameters import dense_parameters
from megalith.errors import ExportError, InputError, RemoteError, UnknownNameError, UsageError
from megalith.models import Model
from megalith.serving.export.dense_program import DenseProgram
from megalith.serving.export.exporter import export_model
from megalith.serving.export.servable import Servable
from megalith.serving.export.signature import read_examples
from tests.models.support import make
from tests.serving.export.test_dense_program import Wide
from tests.serving.exported import MODELS, NUM_IDS, logits_of, request, rows_of, served, trained

UNKNOWN = 10**6


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepFM, exported alone."""
    out = tmp_path_factory.mktemp("servable")
    export_model(trained(), out, name="movies", version=1)
    return out / "1"


@pytest.fixture
def servable(version: Path) -> Iterator[Servable]:
    servable = Servable(version)
    yield servable
    servable.close()


def assert_close(given: Tensor, wanted: Tensor) -> None:
    """Equal up to 1e-6 of the largest."""
    assert given.shape == wanted.shape
    assert float((given - wanted).abs().max()) <= 1e-6 * max(1.0, float(wanted.abs().max()))


def quantised(name: str, num_dense: int, servable: Servable) -> Model:
    """The trained model with the rows that the export can store in the place of its own."""
    model = make(name, num_dense=num_dense)
    original = trained(name, num_dense)
    model.load_state_dict(
        {k: v for k, v in original.state_dict().items() if isinstance(v, Tensor)}, strict=False
    )
    for table in original.embeddings.shards.configs:
        ids = torch.tensor(list(rows_of(original, table)))
        model.embeddings.shards.assign({table: (ids, servable.lookup(table, ids))})
    return model


# ---- predictions


@pytest.mark.parametrize("num_dense", [0, 3])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_answers_as_it_was_trained(tmp_path: Path, name: str, num_dense: int) -> None:
    model = trained(name, num_dense)
    servable = served(model, tmp_path)
    for size in (0, 1, 2, 50):
        features, dense = request(size, num_dense, seed=size)
        answer = servable.predict(features, dense)
        assert answer.keys() == {"logits", "probabilities"}
        assert (answer["logits"].dtype, answer["logits"].shape) == (torch.float32, (size,))
        if size:
            assert_close(answer["logits"], logits_of(model, features, dense))
        assert torch.equal(answer["probabilities"], torch.sigmoid(answer["logits"]))
    assert servable.counters.ids_missing == 0


@pytest.mark.parametrize("precision", ["float16", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_smaller_precisions_change_rows_and_nothing_else(tmp_path: Path, name: str, precision: str) -> None:
    """Rows are within the precision's error; the dense part computes in float32 from there."""
    model = trained(name, 3)
    servable = served(model, tmp_path, precision=precision)
    for table, spec in servable.signature.tables.items():
        rows = rows_of(model, table)
        ids, wanted = torch.tensor(list(rows)), torch.stack(list(rows.values()))
        steps = spec.format(precision).column_steps
        bound = steps * (0.5 + 1e-4) if precision == "int8" else wanted.abs() * 2**-11 + 2**-25
        assert bool(((servable.lookup(table, ids) - wanted).abs() <= bound).all())
    features, dense = request(50, 3)
    assert_close(
        servable.predict(features, dense)["logits"], logits_of(quantised(name, 3, servable), features, dense)
    )


def test_an_id_that_training_never_saw_is_zeros_here_and_its_initial_row_in_training(
    servable: Servable,
) -> None:
    assert not servable.lookup("user", torch.tensor([UNKNOWN])).any()
    (initial,) = trained().embeddings.shards.lookup({"user": torch.tensor([UNKNOWN])}).rows["user"]
    assert initial.any()


@pytest.mark.parametrize("form", ["1-d", "int32", "strided", "padded"])
def test_requests_of_tensors(servable: Servable, form: str) -> None:
    ids = {name: torch.randint(NUM_IDS, (6,)) for name in ("user", "item", "tags", "context")}
    wanted = logits_of(trained(), ids)
    if form == "int32":
        given = {name: each.int() for name, each in ids.items()}
    elif form == "strided":
        given = {name: torch.stack([each, each], 1)[:, 0] for name, each in ids.items()}
        assert not given["user"].is_contiguous()
    elif form == "padded":
        given = {name: torch.stack([each, torch.full((6,), -1)], 1) for name, each in ids.items()}
    else:
        given = ids
    assert_close(servable.predict(given)["logits"], wanted)


def test_requests_of_one_id_a_row_read_their_own_ids(servable: Servable) -> None:
    """What is kept for a batch size does not depend on the ids."""
    for seed in range(3):
        ids = {name: torch.arange(5) + seed for name in ("user", "item", "tags", "context")}
        assert_close(servable.predict(ids)["logits"], logits_of(trained(), ids))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"user": None}, UnknownNameError, "'user' is missing from the request"),
        ({"user": torch.rand(3)}, InputError, "int64 or int32"),
        ({"user": "text"}, InputError, "'user'"),
        ({"user": torch.arange(4)}, InputError, "has 4"),
        ({"user": torch.zeros(3, 1, 1).long()}, InputError, "'user'"),
    ],
)
def test_wrong_features(servable: Servable, change: dict[str, Any], error: type, message: str) -> None:
    features = {name: torch.arange(3) for name in ("user", "item", "tags", "context")} | change
    with pytest.raises(error, match=message):
        servable.predict({name: value for name, value in features.items() if value is not None})


def test_wrong_dense_values(servable: Servable, tmp_path: Path) -> None:
    features, dense = request(4, 3)
    with pytest.raises(InputError, match="takes no dense values"):
        servable.predict(features, dense)
    other = served(trained("dlrm", 3), tmp_path)
    for wrong in (None, torch.zeros(4, 2), torch.zeros(3, 3), torch.zeros(4, 3).long(), torch.zeros(12)):
        with pytest.raises(InputError, match="dense must be"):
            other.predict(features, wrong)
    assert_close(
        other.predict(features, torch.zeros(4, 3).double())["logits"],
        logits_of(trained("dlrm", 3), features, torch.zeros(4, 3)),
    )


class Odd(Model):
    """Layouts of every kind, a shared feature, a shared history with a mask, tables with odd names."""

    def __init__(self) -> None:
        super().__init__(num_dense=1)
        tables = ["a/b", "a:b", "dense", "Ä" * 300]
        configs = [TableConfig(name, dim=2, optimizer=SGD(0.1)) for name in tables]
        features = [
            Feature("one", "a/b", Mean()),
            Feature("all", "a:b", shared=True),
            Feature("past", "dense", FirstN(3), shared=True),
            Feature("dense", tables[3]),
        ]
        layouts = [
            Layout("rest", [Slice("dense", 0, 2)]),
            Layout("list", [Slice("one", 0, 1), Slice("all", 0, 2)], "none"),
            Layout("sum", [Slice("one", 0, 2), Slice("all", 0, 2)], "add"),
            Layout("past's", [Slice("past", 0, 2)], "stack"),
        ]
        self.embeddings = EmbeddingCollection(configs, features, layouts=layouts)
        self.masks = {"mask": "past"}
        self.weight = nn.ParameterDict({"a-b": nn.Parameter(torch.randn(2))})

    def score(self, rows: dict[str, Any], dense: Tensor | None) -> Tensor:
        assert dense is not None
        first, second = rows["list"]
        past = (rows["past's"][:, 0] * rows["mask"][:, :, None]).sum(1)
        logits: Tensor = (rows["sum"] + past + rows["rest"]) @ self.weight["a-b"] + dense[:, 0]
        logits = logits + first[:, 0] - second.sum(1)
        return logits


def test_layouts_of_every_kind_shared_features_and_odd_names(tmp_path: Path) -> None:
    model = Odd()
    for number, table in enumerate(model.embeddings.shards.configs):
        model.embeddings.shards.assign({table: (torch.arange(9), torch.randn(9, 2) + number)})
    servable = served(model, tmp_path)
    assert not servable.signature.batchable
    assert servable.signature.dense_name == "dense_values"
    servable.warm_up()
    for size in (1, 4):
        features = {
            "one": Ragged.from_lists([[1, 2], [3], [], [4]][:size]),
            "all": Ragged.from_lists([[5, 6]]),
            "past": Ragged.from_lists([[7, 8]]),
            "dense": torch.arange(size),
        }
        dense = torch.randn(size, 1)
        assert_close(servable.predict(features, dense)["logits"], logits_of(model, features, dense))


def test_weighted_ids(servable: Servable) -> None:
    features, _ = request(5)
    tags = features["tags"]
    features["tags"] = Ragged(tags.values, tags.row_splits, torch.rand(tags.values.numel()) + 0.5)
    assert_close(servable.predict(features)["logits"], logits_of(trained(), features))


# ---- lookups and counters


def test_lookup_gives_rows_and_counts(servable: Servable) -> None:
    rows = rows_of(trained(), "user")
    found = servable.lookup("user", torch.tensor([3, UNKNOWN, 5, 3]))
    assert torch.equal(found, torch.stack([rows[3], torch.zeros_like(rows[3]), rows[5], rows[3]]))
    assert (servable.counters.ids_looked_up, servable.counters.ids_missing) == (4, 1)
    assert servable.lookup("user", torch.empty(0, dtype=torch.int64)).shape[0] == 0
    assert torch.equal(servable.lookup("user", torch.tensor([3, 5]).int()), found[[0, 2]])
    assert torch.equal(servable.lookup("user", torch.tensor([[3, 5], [5, 5]])[:, 0]), found[[0, 2]])


def test_ids_without_a_row_are_counted_by_feature(servable: Servable) -> None:
    features, _ = request(2)
    features |= {
        "user": Ragged.from_lists([[1], [NUM_IDS]]),
        "tags": Ragged.from_lists([[1, 2, -5, -6], [NUM_IDS + 1]]),
    }
    assert servable.count_missing(features) == {"user": 1, "tags": 3}
    width = servable.signature.dims["tags"]
    written = {"tags": (torch.tensor([-5, 2]), torch.ones(2, width))}
    servable.apply(written, removed={"user": torch.tensor([1])})
    assert servable.count_missing(features) == {"user": 2, "tags": 2}
    servable.reset()


def test_wrong_lookups(servable: Servable) -> None:
    with pytest.raises(UnknownNameError, match=r"'nobody' \(known: 'user'"):
        servable.lookup("nobody", torch.arange(2))
    for wrong in (torch.rand(2), torch.zeros(2, 2).long()):
        with pytest.raises(InputError, match=r"int64 \[n\]"):
            servable.lookup("user", wrong)


def test_a_closed_servable_raises(version: Path) -> None:
    servable = Servable(version)
    servable.close()
    with pytest.raises(UsageError, match="is closed"):
        servable.lookup("user", torch.arange(2))
    with pytest.raises(UsageError, match="is closed"):
        servable.predict(request(2)[0])


# ---- writes


def rows_for(servable: Servable, ids: list[int], value: float) -> tuple[Tensor, Tensor]:
    return torch.tensor(ids), torch.full((len(ids), servable.signature.tables["user"].dim), value)


def look(servable: Servable, *ids: int) -> list[float]:
    """The first column of each id's row."""
    return servable.lookup("user", torch.tensor(ids))[:, 0].tolist()


def all_rows(table: str) -> tuple[Tensor, Tensor]:
    rows = rows_of(trained(), table)
    return torch.tensor(list(rows)), torch.stack(list(rows.values()))


def test_rows_are_written_over_removed_and_reset(servable: Servable) -> None:
    before = look(servable, 1, 2, 3)
    servable.apply({"user": rows_for(servable, [1, UNKNOWN], 9.0)}, {"user": torch.tensor([2])})
    assert look(servable, 1, 2, 3, UNKNOWN) == [9.0, 0.0, before[2], 9.0]
    assert len(servable.overlay) == 3
    missing = servable.counters.ids_missing
    look(servable, 1, 2, 3, UNKNOWN + 1)
    assert servable.counters.ids_missing == missing + 2
    servable.reset()
    assert look(servable, 1, 2, 3) == before
    assert len(servable.overlay) == 0


def test_written_rows_are_predicted_from(servable: Servable) -> None:
    """A model trained further, its rows and weights pushed, answers as it would itself."""
    further = make("deepfm")
    rows = {
        table: (torch.arange(NUM_IDS), torch.randn(NUM_IDS, config.dim))
        for table, config in further.embeddings.shards.configs.items()
    }
    further.embeddings.shards.assign(rows)
    servable.apply(rows, {}, dict(dense_parameters(further)))
    features, _ = request(20)
    assert_close(servable.predict(features)["logits"], logits_of(further, features))
    servable.reset()
    assert_close(servable.predict(features)["logits"], logits_of(trained(), features))


def test_a_stage_hides_the_base_and_is_adopted_whole(servable: Servable) -> None:
    stage = servable.stage()
    assert stage.hides_base
    stage.apply({"user": rows_for(servable, [1, 2], 9.0)}, {"user": torch.tensor([2])})
    before = look(servable, 1, 2, 3)
    assert 9.0 not in before
    servable.adopt(stage)
    assert look(servable, 1, 2, 3) == [9.0, 0.0, 0.0]
    servable.apply({"user": rows_for(servable, [3], 7.0)}, {"user": torch.tensor([1])})
    assert look(servable, 1, 2, 3) == [0.0, 0.0, 7.0]
    servable.reset()
    assert look(servable, 1, 2, 3) == before


@pytest.mark.parametrize("hides_base", [False, True])
def test_what_a_new_version_says_itself_is_not_inherited(
    version: Path, tmp_path: Path, hides_base: bool
) -> None:
    """It reads what the old version read, whether the overlay covered or replaced the export."""
    old = Servable(version)
    if hides_base:
        old.adopt(old.stage())
        old.apply({table: all_rows(table) for table in old.signature.tables})
    old.apply({"user": rows_for(old, [1, 2, UNKNOWN], 9.0)}, {"user": torch.tensor([3, 4, UNKNOWN + 1])})
    model = make("deepfm")
    model.load_state_dict(trained().state_dict())
    model.embeddings.shards.assign({table: all_rows(table) for table in old.signature.tables})
    model.embeddings.shards.assign({"user": rows_for(old, [1], 9.0)})  # pushed before it was exported
    model.embeddings.shards.local["user"].remove(torch.tensor([3]))
    new = served(model, tmp_path, version=2)
    new.inherit(old.overlay)
    every = [*range(NUM_IDS), UNKNOWN, UNKNOWN + 1]
    assert look(new, *every) == look(old, *every)
    assert sorted(id for ids, *_ in new.overlay.scan("user") for id in ids.tolist()) == [2, 4, UNKNOWN]
    assert len(new.overlay) == 3
    new.apply({"user": rows_for(new, [5], 7.0)})
    assert look(old, 5) != [7.0]


def test_rows_and_dense_weights_are_swapped_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows and weights of v the logit is 2 v v + v; a request in the middle of a swap sees one v."""
    model = Wide()
    servable = served(model, tmp_path)

    def answer() -> float:
        return float(servable.predict({"f": torch.tensor([1])})["logits"])

    def swap(value: float) -> None:
        stage = servable.stage()
        stage.apply({"t": (torch.tensor([1]), torch.full((1, 2), value))})
        dense = {"deep.weight": torch.full((1, 2), value), "deep.bias": torch.full((1,), value)}
        servable.adopt(stage, dense)

    exported = answer()
    swap(2.0)
    seen: list[float] = []
    original = DenseProgram.set

    def watched(program: DenseProgram, weights: Any) -> Any:
        seen.append(answer())
        copy = original(program, weights)
        seen.append(answer())
        return copy

    monkeypatch.setattr(DenseProgram, "set", watched)
    swap(3.0)
    assert (seen, answer()) == ([10.0, 10.0], 21.0)
    seen.clear()
    servable.reset()
    assert (seen, answer()) == ([21.0, 21.0], exported)


def test_wrong_writes_change_nothing(servable: Servable, tmp_path: Path) -> None:
    good = rows_for(servable, [1], 9.0)
    before = look(servable, 1)
    wrong: list[tuple[type, dict[str, Any]]] = [
        (UnknownNameError, {"rows": {"user": good, "nobody": good}}),
        (UnknownNameError, {"rows": {"user": good}, "removed": {"nobody": torch.tensor([1])}}),
        (InputError, {"rows": {"user": (good[0].int(), good[1])}}),
        (InputError, {"rows": {"user": (good[0], good[1].double())}}),
        (InputError, {"rows": {"user": (good[0], good[1][:, 1:])}}),
        (InputError, {"rows": {"user": (torch.tensor([1, 2]), good[1])}}),
        (InputError, {"rows": {"user": (good[0], good[1] * float("nan"))}}),
        (InputError, {"rows": {"user": good}, "removed": {"user": torch.tensor([[1]])}}),
        (InputError, {"rows": {"user": good}, "dense": {"nothing": torch.ones(1)}}),
    ]
    for error, writes in wrong:
        with pytest.raises(error):
            servable.apply(**writes)
        assert (look(servable, 1), len(servable.overlay)) == (before, 0)
    with pytest.raises(InputError, match="has other tables"):
        servable.adopt(served(trained("din"), tmp_path).stage())


def test_predictions_during_writes_use_one_version_of_the_weights(tmp_path: Path) -> None:
    """With all weights v the logit of a row of ones is 3v; a mixture would give another number."""
    model = Wide()
    model.embeddings.shards.assign({"t": (torch.arange(3), torch.ones(3, 2))})
    servable = served(model, tmp_path)

    def push(value: float) -> None:
        dense = {"deep.weight": torch.full((1, 2), value), "deep.bias": torch.full((1,), value)}
        servable.apply({"t": (torch.tensor([7]), torch.full((1, 2), value))}, {}, dense)

    push(1.0)
    done = threading.Event()
    seen: list[float] = []
    rows: list[Tensor] = []

    def ask() -> None:
        while not done.is_set():
            seen.append(float(servable.predict({"f": torch.tensor([1])})["logits"]))
            rows.append(servable.lookup("t", torch.tensor([7])))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for value in range(1, 151):
        push(float(value))
    done.set()
    for thread in threads:
        thread.join(60)
    assert {each % 3 for each in seen} == {0.0}
    assert all(float(row[0, 0]) == float(row[0, 1]) for row in rows)
    assert servable.counters.ids_looked_up == 2 * len(seen)


def test_counters_of_many_threads_add_up(servable: Servable) -> None:
    def ask() -> None:
        for _ in range(50):
            servable.lookup("user", torch.tensor([1, UNKNOWN]))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (servable.counters.ids_looked_up, servable.counters.ids_missing) == (400, 200)


# ---- warm-up


def test_warm_up_asks_the_examples(servable: Servable) -> None:
    servable.warm_up()
    assert servable.counters.ids_looked_up > 0
    assert servable.counters.ids_missing == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"examples": 3}',
        '{"examples": [{"features": {"user": [[1e400]]}, "dense": null}]}',
        '{"examples": [{"features": {"user": [[1000000000000000000000]]}, "dense": null}]}',
        '{"examples": [{"features": {"user": 3}, "dense": null}]}',
        '{"examples": [{"features": {}, "dense": "x"}]}',
    ],
)
def test_wrong_examples_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "examples.json").write_text(text)
    with pytest.raises(ExportError, match="holds no valid examples"):
        read_examples(tmp_path / "examples.json")


# ---- entry


def test_an_entry_warms_up_without_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program runs for every example, on rows of zeros."""

    def unreachable(ids: dict[str, Tensor]) -> dict[str, Tensor]:
        raise RemoteError("no part is there yet")

    export_model(trained("deepfm", 3), tmp_path, name="movies", version=1, num_shards=2)
    entry = Servable(tmp_path / "entry" / "1", fetch=unreachable)
    sizes: list[int] = []
    original = DenseProgram.__call__

    def watched(program: DenseProgram, rows: dict[str, Any], dense: Tensor | None) -> Tensor:
        assert dense is not None
        sizes.append(dense.shape[0])
        return original(program, rows, dense)

    monkeypatch.setattr(DenseProgram, "__call__", watched)
    entry.warm_up()
    assert sizes == [1, 8]


def test_an_entry_needs_a_fetch_and_others_take_none(version: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only an entry takes"):
        Servable(version, fetch=lambda ids: {})
    export_model(trained(), tmp_path, name="movies", version=1, num_shards=1)
    with pytest.raises(UsageError, match="needs `fetch`"):
        Servable(tmp_path / "entry" / "1")
    part = Servable(tmp_path / "ps_0" / "1")
    with pytest.raises(UsageError, match="request scores from the entry"):
        part.predict(request(1)[0])
    assert part.dense_names == {}
    entry = Servable(tmp_path / "entry" / "1", fetch=lambda ids: {})
    with pytest.raises(UsageError, match="look them up in the ps parts"):
        entry.lookup("user", torch.arange(1))
    with pytest.raises(InputError, match="push them to the ps parts"):
        entry.apply({"user": (torch.arange(1), torch.zeros(1, entry.signature.dims["user"]))})
    with pytest.raises(InputError, match="no dense weights"):
        part.apply({}, {}, {"x": torch.ones(1)})


@pytest.mark.parametrize("rows", [{}, {"user": torch.zeros(1, 5)}, {"user": torch.zeros(2, 1)}])
def test_a_fetch_that_gives_something_else_is_an_error(tmp_path: Path, rows: dict[str, Tensor]) -> None:
    export_model(trained(), tmp_path, name="movies", version=1, num_shards=1)
    entry = Servable(tmp_path / "entry" / "1", fetch=lambda ids: rows)
    with pytest.raises(RemoteError, match="fetch must return float32"):
        entry.predict(request(2)[0])


# ---- damage


def test_every_file_missing_truncated_or_flipped_is_noticed(version: Path, tmp_path: Path) -> None:
    names = sorted(file.name for file in version.iterdir())
    assert {"signature.json", "dense.pt2", "examples.json", "user.safetensors"} <= set(names)
    for number, name in enumerate(names):
        root = shutil.copytree(version, tmp_path / str(number))
        data = (root / name).read_bytes()
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 0x80]) + data[middle + 1 :]
        for content in (data[:-1], data[:middle], b"", data + b"x", flipped):
            (root / name).write_bytes(content)
            with pytest.raises(ExportError):
                Servable(root)
        (root / name).unlink()
        with pytest.raises(ExportError):
            Servable(root)


def test_without_checksums_sizes_are_still_compared(version: Path, tmp_path: Path) -> None:
    root = shutil.copytree(version, tmp_path / "v")
    Servable(root, verify_files=False).close()
    with open(root / "user.safetensors", "ab") as file:
        file.write(b"x")
    with pytest.raises(ExportError, match="bytes"):
        Servable(root, verify_files=False)


def test_a_signature_that_fits_other_files_is_refused(version: Path, tmp_path: Path) -> None:
    """Right checksums, wrong contents: rows of another number, width or table."""
    root = shutil.copytree(version, tmp_path / "v")
    data = json.loads((root / "signature.json").read_text())
    for change in (
        {"rows": NUM_IDS + 1},
        {"segments": [1]},
        {"file": data["examples"]},
        {"file": data["program"]},
    ):
        wrong = json.loads((version / "signature.json").read_text())
        wrong["tables"]["user"] |= change
        if "segments" in change:
            wrong["tables"]["user"]["steps"] = [1.0]
        (root / "signature.json").write_text(json.dumps(wrong))
        with pytest.raises(ExportError):
            Servable(root)
