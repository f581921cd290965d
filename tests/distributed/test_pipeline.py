"""Pipeline over ranks: exact, or stale by `depth` steps; the order of exchanges; errors; leaving early."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megalith import (
    SGD,
    Adagrad,
    EmbeddingCollection,
    Feature,
    Mean,
    Pipeline,
    Ragged,
    Sum,
    SyncShards,
    TableConfig,
    checkpoint,
)
from megalith.data import Batch
from megalith.nn import pipeline
from tests.distributed.ranks import error_of, run_ranks

BATCHES, BATCH = 6, 8
PIPELINES: dict[str, dict[str, Any]] = {
    "ids": {"mode": "ids"},
    "ids, push": {"mode": "ids", "push": True},
    "rows": {"mode": "rows"},
    "rows, push": {"mode": "rows", "push": True},
    "ids, depth 3": {"mode": "ids", "depth": 3},
    "ids, push, depth 3": {"mode": "ids", "push": True, "depth": 3},
    "rows, depth 3": {"mode": "rows", "depth": 3},
}
EXACT = [name for name in PIPELINES if "rows" not in name]


# ---- what is trained: two tables and a dense layer, ids that many batches share


class Model(nn.Module):
    def __init__(self, update: str = "backward", **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [TableConfig(name, dim=4, optimizer=Adagrad(0.3)) for name in ("t", "u")]
        self.embeddings = EmbeddingCollection(
            SyncShards(tables, timeout=20, **options),
            [Feature("a", "t", Mean()), Feature("b", "u", Sum())],
            update=update,
        )
        self.head = nn.Linear(8, 1)

    def forward(self, features: Any) -> Tensor:
        found = self.embeddings(features)
        logits: Tensor = self.head(torch.cat([found["a"], found["b"]], 1))[:, 0]
        return logits

    @property
    def shards(self) -> SyncShards:
        assert isinstance(self.embeddings.shards, SyncShards)
        return self.embeddings.shards


def batches(count: int = BATCHES) -> list[Batch]:
    """This rank's part of each batch; the ranks' parts differ in size."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    made = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(12, (BATCH, 3), generator=generator)
        labels = torch.randint(2, (BATCH,), generator=generator).float()
        cuts = {1: [], 2: [3 + number % 3], 4: [1, 3 + number % 3, 6]}[ranks]
        own = slice([0, *cuts][rank], [*cuts, BATCH][rank])
        column = Ragged.from_padded(ids[own], pad=-1)
        made.append(Batch({"a": column, "b": column}, labels[own]))
    return made


def train(model: Model, loader: Iterable[Any], save: str | None = None) -> None:
    """save: where to save the model after the third step."""
    dense: nn.Module = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.5)
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(dense(batch.features), batch.labels).backward()
        if model.embeddings.update == "step":
            model.embeddings.step()
        optimizer.step()
        if save is not None and number == 2:
            checkpoint.save(model, save)


def state(model: Model) -> dict[str, list[Any]]:
    """Every bit of rows and dense weights."""
    model.shards.flush()
    rows = model.shards.lookup({name: torch.arange(12) for name in ("t", "u")}).rows
    tensors = {**rows, **dict(model.head.named_parameters())}
    return {name: x.detach().contiguous().view(torch.int32).tolist() for name, x in tensors.items()}


# ---- exact


def trained(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for transport, update in (("gloo", "backward"), ("auto", "backward"), ("auto", "step")):
        plain = Model(update, transport=transport)
        train(plain, batches())
        found[f"{transport} {update}"] = [state(plain)]
        for name in EXACT:
            model = Model(update, transport=transport)
            train(model, Pipeline(model, batches(), **PIPELINES[name]))
            found[f"{transport} {update}"].append(state(model))
    found["saved"] = saved(folder)
    return found


def saved(folder: str) -> list[Any]:
    """The state after the third step, by a checkpoint made in the loop."""
    found = []
    for name in ("plain", "ids, push"):
        model = Model()
        path = f"{folder}/{dist.get_world_size()} {name}"
        loader = batches() if name == "plain" else Pipeline(model, batches(), **PIPELINES[name])
        train(model, loader, save=path)
        other = Model()
        checkpoint.load(other, path)
        found.append(state(other))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ids_ahead_and_pushed_gradients_change_no_bit(ranks: int, tmp_path: Path) -> None:
    results = run_ranks(trained, str(tmp_path), world_size=ranks)
    for found in results:
        for case, (plain, *piped) in found.items():
            assert all(each == plain for each in piped), case
    assert all(found == results[0] for found in results)


# ---- stale by one step


def losses_and_rows(pipeline: str | None) -> tuple[list[float], Tensor]:
    """A model without dense weights: the prediction is the sum of an id's row."""
    shards = SyncShards([TableConfig("t", dim=2, optimizer=SGD(0.2))])
    collection = EmbeddingCollection(shards, [Feature("a", "t")], reduction="sum")
    loader: Iterable[Any] = squares()
    loader = loader if pipeline is None else Pipeline(collection, loader, **PIPELINES[pipeline])
    losses = []
    for features, wanted in loader:
        loss = (collection(features)["a"].sum(1) - wanted).square().sum()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses, shards.lookup({"t": torch.arange(4)}).rows["t"]


def squares() -> list[tuple[dict[str, Tensor], Tensor]]:
    """The rank's half of batches of four ids out of four, some of them twice."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
    return [({"a": ids[own]}, wanted[own]) for ids, wanted in joined_squares()]


def joined_squares() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randint(4, (4,), generator=generator), torch.randn(4, generator=generator)) for _ in range(7)
    ]


def simulated(late: int) -> tuple[list[float], Tensor]:
    """The same in plain torch, with rows as they were `late` updates before."""
    table = EmbeddingCollection([TableConfig("t", dim=2, optimizer=SGD(0.2))], [Feature("a", "t")]).shards
    rows = table.lookup({"t": torch.arange(4)}).rows["t"].clone()
    history = [rows.clone()]
    losses = []
    for number, (ids, wanted) in enumerate(joined_squares()):
        seen = history[max(0, number - late)]
        errors = seen[ids].sum(1) - wanted
        losses.append(errors.square().sum().item())
        rows.index_add_(0, ids, -0.2 * (2 * errors)[:, None].expand(-1, 2))
        history.append(rows.clone())
    return losses, rows


def stale() -> dict[str, tuple[list[float], Tensor]]:
    return {str(name): losses_and_rows(name) for name in (None, *PIPELINES)}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_ahead_miss_exactly_the_update_before(ranks: int) -> None:
    late = {steps: simulated(steps) for steps in (0, 1, 3)}
    for steps in (1, 3):
        assert not torch.allclose(late[0][1], late[steps][1], atol=1e-3)
    for found in run_ranks(stale, world_size=ranks):
        for name, (losses, rows) in found.items():
            expected = late[(3 if "depth 3" in name else 1) if "rows" in name else 0]
            torch.testing.assert_close(losses, expected[0], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(rows, expected[1], rtol=1e-5, atol=1e-6)


# ---- when exchanges happen


def order() -> dict[str, list[str]]:
    """What the exchange's thread does in a loop of three batches, or of five with a depth of three."""
    found = {}
    for name in ("plain", *PIPELINES):
        model, log = Model(), []
        count = 5 if "depth" in name else 3
        messages: Any = model.shards._messages
        numbers = dict.fromkeys(("request", "send_rows", "push"), 0)

        def logged(verb: str, work: Any, log: list[str] = log, numbers: dict[str, int] = numbers) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                log.append(f"{verb} {numbers[verb]}")
                numbers[verb] += 1
                return work(*args, **options)

            return call

        for verb in numbers:
            setattr(messages, verb, logged(verb, getattr(messages, verb)))
        calls = model.shards.exchange.calls
        loader = batches(count)
        train(model, loader if name == "plain" else Pipeline(model, loader, **PIPELINES[name]))
        assert model.shards.exchange.calls - calls == count * 4
        found[name] = [each.replace("send_rows", "rows").replace("request", "ids") for each in log]
    return found


def test_ids_or_rows_of_the_next_batch_travel_before_gradients() -> None:
    for found in run_ranks(order):
        plain = ["ids 0", "rows 0", "push 0", "ids 1", "rows 1", "push 1", "ids 2", "rows 2", "push 2"]
        ids = ["ids 0", "rows 0", "ids 1", "push 0", "rows 1", "ids 2", "push 1", "rows 2", "push 2"]
        rows = ["ids 0", "rows 0", "ids 1", "rows 1", "push 0", "ids 2", "rows 2", "push 1", "push 2"]
        expected = {"plain": plain, "ids": ids, "ids, push": ids, "rows": rows, "rows, push": rows}
        assert {name: found[name] for name in expected} == expected
        # With a depth of 3, rows of mode "ids" still come after the update of the batch before.
        first, last = ["ids 0", "rows 0"], ["push 2", "rows 3", "push 3", "rows 4", "push 4"]
        ids = [*first, "ids 1", "ids 2", "ids 3", "push 0", "rows 1", "ids 4", "push 1", "rows 2", *last]
        assert found["ids, depth 3"] == found["ids, push, depth 3"] == ids
        rows = [*first, "ids 1", "rows 1", "ids 2", "rows 2", "ids 3", "rows 3", "push 0", "ids 4", "rows 4"]
        assert found["rows, depth 3"] == [*rows, "push 1", "push 2", "push 3", "push 4"]


# ---- several collections, of their own tables and of shared ones


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = SyncShards([TableConfig("t", dim=2, optimizer=SGD(0.1))], timeout=20)
        own = SyncShards([TableConfig("u", dim=2, optimizer=SGD(0.1))], timeout=20)
        self.parts = nn.ModuleList(
            EmbeddingCollection(shards, [Feature(name, table)])
            for name, table, shards in (("a", "t", shared), ("b", "t", shared), ("a", "u", own))
        )

    def rows(self) -> list[Any]:
        return [
            part.shards.lookup({t: torch.arange(12) for t in part.shards.configs}).rows for part in self.parts
        ]


def with_three() -> dict[str, list[Any]]:
    found = {}
    for name, options in (("plain", None), *PIPELINES.items()):
        model = Three()
        loop = batches() if options is None else Pipeline(model, batches(), **options)
        for batch in loop:
            outputs = [out for part in model.parts for out in part(batch.features).values()]
            (torch.stack(outputs).sum(0) - 1).square().mean().backward()
        found[name] = [{table: x.tolist() for table, x in rows.items()} for rows in model.rows()]
    return found


def test_all_collections_of_a_model_go_ahead() -> None:
    for found in run_ranks(with_three):
        for name in EXACT:
            assert found[name] == found["plain"], name
        assert found["rows"] == found["rows, push"]
        assert found["rows, depth 3"] != found["rows"] != found["plain"]


# ---- trouble


class Broken(Iterable[Batch]):
    """Batches, then an error."""

    def __init__(self, good: int) -> None:
        self.good = good

    def __iter__(self) -> Iterator[Batch]:
        yield from batches(self.good)
        raise ZeroDivisionError("the disk is gone")


def with_bad_ids(number: int) -> list[Batch]:
    made = batches()
    made[number] = Batch({"a": torch.zeros(2), "b": torch.zeros(2)}, made[number].labels)  # type: ignore[dict-item]
    return made


def failing(number: int, when: str) -> Callable[[Model, Iterable[Any]], None]:
    """A loop that fails on rank 1 in batch `number`."""

    def loop(model: Model, loader: Iterable[Any]) -> None:
        for at, batch in enumerate(loader):
            bad = at == number and dist.get_rank() == 1
            if bad and when == "before forward":
                raise ZeroDivisionError(when)
            loss = model(batch.features).sum()
            if bad and when == "before backward":
                raise ZeroDivisionError(when)
            if bad and when == "NaN":
                loss = loss * float("nan")
            loss.backward()
            if bad and when == "after the update":
                raise ZeroDivisionError(when)

    return loop


def attaching(batch: Batch, start: Any) -> Batch:
    """Fails on rank 1, after the lookup was started, in the third batch."""
    started = start(batch.features)
    if dist.get_rank() == 1 and torch.equal(batch.labels, batches()[2].labels):
        raise ZeroDivisionError("in attach")
    return replace(batch, features=started)


def evaluating(model: Model, loader: Iterable[Any]) -> None:
    model.eval()
    with torch.no_grad():
        for at, batch in enumerate(loader):
            model(batch.features)
            if at == 1 and dist.get_rank() == 1:
                raise ZeroDivisionError("in evaluation")


def troubles(names: list[str]) -> dict[str, Any]:
    pipeline.GRACE = 60.0  # machines may be slow, and later calls must come after it
    found: dict[str, Any] = {}
    bad = dist.get_rank() == 1
    for name in names:
        options = PIPELINES[name]
        cases: dict[str, tuple[Any, Any]] = {
            "loader": (train, Broken(2) if bad else batches()),
            "first batch": (train, Broken(0) if bad else batches()),
            "ids": (train, with_bad_ids(2) if bad else batches()),
            "evaluation": (evaluating, batches()),
        }
        for when in ("before forward", "before backward", "NaN", "after the update"):
            cases[when] = (failing(2, when), batches())
        # The loaders end within the batches ahead, or with them.
        cases["after the update, near the end"] = (failing(4, "after the update"), batches())
        cases["before forward, near the end"] = (failing(4, "before forward"), batches())
        cases["attach"] = (train, batches())
        for case, (loop, loader) in cases.items():
            model = Model()
            attach = attaching if case == "attach" else None
            error = error_of(loop, model, Pipeline(model, loader, **options, attach=attach))
            error_of(model.shards.flush)
            found[f"{name}: {case}"] = (error, model.embeddings.global_step, usable(model))
    return found


def usable(model: Model) -> bool:
    """Whether ranks still understand each other."""
    return model.shards.lookup({"t": torch.arange(3)}).rows["t"].shape == (3, 4)


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ["ids", "rows, push", "ids, push, depth 3"]),
        (4, ["rows, depth 3"]),
        pytest.param(2, ["ids, push", "rows", "ids, depth 3", "rows, depth 3"], marks=pytest.mark.soak),
        pytest.param(4, ["ids, push, depth 3"], marks=pytest.mark.soak),
    ],
)
def test_an_error_on_one_rank_ends_the_loop_of_all_and_leaves_them_in_step(
    ranks: int, names: list[str]
) -> None:
    first, second, *rest = run_ranks(troubles, names, world_size=ranks)
    assert all(found.keys() == first.keys() for found in rest)
    for case, (error, steps, works) in second.items():
        kind = "InputError" if case.endswith((": ids", ": NaN")) else "ZeroDivisionError"
        assert error.startswith(f"{kind}: "), case
        assert works, case
        expected = {
            "first batch": 0,
            "evaluation": 0,
            "after the update": 3,
            "after the update, near the end": 5,
            "before forward, near the end": 4,
        }
        wanted = expected.get(case.partition(": ")[2], 2)
        assert steps == wanted, case
        for found in (first, *rest):
            other, other_steps, other_works = found[case]
            assert other.startswith("RankFailedError: "), (case, other)
            assert "rank 1 failed" in other, (case, other)
            assert other_works, case
            # A rank that was pushing learns of it one step later.
            assert other_steps in ((wanted, wanted + 1) if "push" in case else (wanted,)), case


# ---- leaving early, short loaders


def leaving() -> dict[str, Any]:
    pipeline.GRACE = 60.0
    found: dict[str, Any] = {}
    for name, options in PIPELINES.items():
        model, plain = Model(), Model()
        for each, loader in ((plain, batches(3)), (model, batches())):
            loop = loader if each is plain else Pipeline(each, loader, **options)
            for at, batch in enumerate(loop):
                each(batch.features).sum().backward()
                if at == 2:
                    break
        lengths = [len(list(Pipeline(model, batches(n), **options))) for n in (0, 1, 2)]
        train(model, Pipeline(model, batches(2), **options))
        train(plain, batches(2) if "rows" not in name else Pipeline(plain, batches(2), mode="rows"))
        found[name] = (lengths, state(model), state(plain))
    return found


def test_leaving_on_all_ranks_leaves_the_tables_as_the_loop_without_it() -> None:
    for found in run_ranks(leaving):
        for name, (lengths, piped, plain) in found.items():
            assert lengths == [0, 1, 2]
            if "rows" not in name:
                assert piped == plain, name
