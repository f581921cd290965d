"""Pipeline and started batches in one process: the same results, whatever the batches look like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith import EmbeddingCollection, Feature, Pipeline, Ragged
from megalith.data import Batch
from megalith.errors import InputError, UsageError
from megalith.nn.collection import StartedBatch
from tests.nn.support import Keyed, collection, column, contents, floats, zeros

COLUMNS = [{"a": column([1, 2], [2])}, {"a": column([2], [3, 3])}, {"a": column([1], [])}]
MODES = ["ids", "rows"]


def keyed(columns: dict[str, Ragged]) -> Keyed:
    return Keyed(["a"], columns["a"].values, columns["a"].lengths())


@dataclass
class Own:
    """A user's batch, with a name of its own for the columns."""

    inputs: Any
    wanted: Tensor


def train(model: EmbeddingCollection, loader: Any, features: Any = lambda batch: batch) -> dict[int, Any]:
    """Gradients depend on what was read, so a row that is late shows."""
    for batch in loader:
        (model(features(batch))["a"] - 1).square().sum().backward()
    return contents(model)


def expected() -> dict[int, Any]:
    return train(collection(), COLUMNS)


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("update", ["backward", "step"])
def test_local_tables_are_read_in_forward_and_never_stale(mode: str, push: bool, update: str) -> None:
    plain, piped = collection(update=update), collection(update=update)
    deep = collection(update=update)
    loaders = (
        (plain, COLUMNS),
        (piped, Pipeline(piped, COLUMNS, mode=mode, push=push)),
        (deep, Pipeline(deep, COLUMNS, mode=mode, push=push, depth=3)),
    )
    for model, loader in loaders:
        for batch in loader:
            (model(batch)["a"] - 1).square().sum().backward()
            if update == "step":
                model.step()
    assert contents(deep) == contents(piped) == contents(plain)
    assert deep.global_step == piped.global_step == 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("pack", "features"),
    [
        (keyed, lambda batch: batch),
        (lambda c: (c, floats(1)), lambda batch: batch[0]),
        (lambda c: [c, floats(1)], lambda batch: batch[0]),
        (lambda c: Batch(c, torch.ones(2)), lambda batch: batch.features),
        (lambda c: Batch(c, torch.ones(2)), lambda batch: {**batch.features}),
        (lambda c: collection().prepare(c), lambda batch: batch),
    ],
    ids=["keyed", "tuple", "list", "dataclass", "copied", "prepared"],
)
def test_batches_of_many_shapes(mode: str, pack: Any, features: Any) -> None:
    model = collection()
    loader = Pipeline(model, [pack(columns) for columns in COLUMNS], mode=mode)
    assert train(model, loader, features) == expected()


def test_attach_puts_the_started_features_where_a_batch_of_ones_own_has_them() -> None:
    model = collection()

    def attach(batch: Own, start: Any) -> Own:
        return Own(start(batch.inputs), batch.wanted)

    loader = [Own(columns, floats(1)) for columns in COLUMNS]
    found = train(model, Pipeline(model, loader, attach=attach), lambda batch: batch.inputs)
    assert found == expected()


@pytest.mark.parametrize(
    ("attach", "message"),
    [
        (lambda batch, start: batch, "did not call"),
        (lambda batch, start: (start(batch), start(batch)), "twice"),
    ],
)
def test_attach_calls_start_once(attach: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(Pipeline(collection(), COLUMNS, attach=attach))


def test_a_started_batch_reads_like_its_columns() -> None:
    label = floats(1, 2)
    for columns in ({**COLUMNS[0], "label": label}, keyed(COLUMNS[0]), collection().prepare(COLUMNS[0])):
        started = collection().start(columns)
        assert started["a"].values.tolist() == [1, 2, 2]
        assert len(started) == len(list(started))
    with_label = collection().start({**COLUMNS[0], "label": label})
    assert with_label["label"] is label


def test_a_batch_may_go_through_forward_twice() -> None:
    model, plain = collection(), collection()
    for batch in Pipeline(model, COLUMNS):
        for _ in range(2):
            (model(batch)["a"] - 1).square().sum().backward()
    for columns in COLUMNS:
        for _ in range(2):
            (plain(columns)["a"] - 1).square().sum().backward()
    assert contents(model) == contents(plain)


def test_all_collections_of_a_model_are_started() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = collection(), collection(Feature("b", "t"), Feature("a", "t"))

    model = Two()
    rows = {"a": column([1, 2]), "b": column([3])}
    for batch in Pipeline(model, [rows, rows]):
        assert isinstance(batch, StartedBatch)
        (model.first(batch)["a"] + model.second(batch)["b"] + model.second(batch)["a"]).sum().backward()
    assert contents(model.first) == {1: [-2.0], 2: [-2.0]}
    assert contents(model.second) == {1: [-2.0], 2: [-2.0], 3: [-2.0]}


@pytest.mark.parametrize(("depth", "newest"), [(1, [1, 2, 2]), (2, [2, 2, 2]), (5, [2, 2, 2])])
def test_the_loader_is_read_depth_batches_ahead_and_every_loop_is_an_epoch(
    depth: int, newest: list[int]
) -> None:
    read: list[int] = []

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            for number, columns in enumerate(COLUMNS):
                read.append(number)
                yield columns

        def __len__(self) -> int:
            return len(COLUMNS)

    pipeline = Pipeline(collection(), Loader(), depth=depth)
    assert len(pipeline) == 3
    for _ in range(2):
        seen = [max(read) for _ in pipeline]
        assert seen == newest
        assert read == [0, 1, 2]
        read.clear()


def test_an_error_of_the_loader_or_in_a_batch_comes_when_the_batch_is_due() -> None:
    def broken() -> Iterator[Any]:
        yield from COLUMNS[:2]
        raise ZeroDivisionError

    for loader, error in ((broken(), ZeroDivisionError), ([*COLUMNS[:2], {"a": floats(1)}], InputError)):
        model = collection()
        with pytest.raises(error):
            train(model, Pipeline(model, loader))
        assert model.global_step == 2


def test_leaving_early_and_empty_loaders() -> None:
    model, plain = collection(), collection()
    assert list(Pipeline(model, [])) == []
    for number, batch in enumerate(Pipeline(model, COLUMNS, push=True)):
        (model(batch)["a"] - 1).square().sum().backward()
        if number == 1:
            break
    assert contents(model) == train(plain, COLUMNS[:2])


def test_bad_arguments() -> None:
    with pytest.raises(InputError, match="mode must be one of ids, rows, got 'all'"):
        Pipeline(collection(), [], mode="all")
    for depth in (0, -1, 1.5, True, "3", None):
        with pytest.raises(InputError, match="depth must be an integer of at least 1, got"):
            Pipeline(collection(), [], depth=depth)  # type: ignore[arg-type]
    for push in ("no", None, 1):
        with pytest.raises(InputError, match="Pipeline: push must be True or False, got"):
            Pipeline(collection(), [], push=push)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="Linear contains no EmbeddingCollection"):
        Pipeline(nn.Linear(1, 1), [])


def test_a_compiled_model_takes_started_batches() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = EmbeddingCollection([zeros()], [Feature("a", "t")])

        def forward(self, features: Any) -> Tensor:
            return (self.embeddings(features)["a"] - 1).square().sum()

    model = Model()
    compiled = torch.compile(model, backend="eager")
    for batch in Pipeline(model, COLUMNS):
        compiled(batch).backward()
    assert contents(model.embeddings) == expected()
