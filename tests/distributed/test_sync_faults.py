"""What goes wrong on one rank, as all ranks see it: bad input, ranks that die, stall or differ.

An input error raises on every rank before anything is written, and the next call works. A rank that does not
come is named within the timeout, with the call, its tables and its number.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith import (
    SGD,
    Adagrad,
    EmbeddingCollection,
    Feature,
    Ragged,
    Router,
    SyncShards,
    TableConfig,
    Zeros,
)
from megalith.errors import MegalithError
from megalith.shards import Lookup
from tests.distributed.ranks import run_ranks
from tests.table.support import assert_same_tables, ints, whole

TABLES = [
    TableConfig("a", dim=2, optimizer=SGD(1.0), initializer=Zeros()),
    TableConfig("b", dim=3, optimizer=Adagrad(0.1)),
]
SOON, PATIENT = 2.0, 60.0
NAN = float("nan")
Said = tuple[str, str] | None


def error_of(work: Callable[[], object]) -> Said:
    try:
        work()
    except (MegalithError, TypeError) as error:
        return type(error).__name__, str(error)
    return None


def store() -> Any:
    """Where ranks of a test tell each other how far they are, past the exchanges."""
    group = dist.group.WORLD
    assert group is not None
    return group.get_group_store()


# ---- bad input on rank 1

IDS = ints(1, 2, 3)
ONES = {"a": torch.ones(3, 2), "b": torch.ones(3, 3)}


class Calls:
    """The calls of which one is bad; every rank makes them with good input but rank 1."""

    def __init__(self, transport: str) -> None:
        self.bad = dist.get_rank() == 1
        self.shards = SyncShards(TABLES, transport=transport, timeout=PATIENT)
        features = [Feature("x", "a"), Feature("y", "b")]
        self.models = {
            "backward": EmbeddingCollection(self.shards, features),
            "clipped": EmbeddingCollection(self.shards, features, clip_value=1.0),
            "step": EmbeddingCollection(self.shards, features, update="step"),
        }

    def pick(self, bad: Any, good: Any) -> Any:
        return bad if self.bad else good

    def lookup(self, ids: Any) -> Said:
        return error_of(lambda: self.shards.lookup(self.pick(ids, {"a": IDS})).wait())

    def push(self, grads: Any = None, ids: Any = None, **numbers: Any) -> Said:
        """Gradients of a lookup, or with ids without one."""
        lookup: Any = self.pick(ids, {"a": IDS, "b": IDS})
        if ids is None:
            lookup = self.shards.lookup({"a": IDS, "b": IDS})
        good: dict[str, Any] = {"step": 0}
        numbers = self.pick(good | numbers, good)
        given = self.pick(ONES if grads is None else grads, ONES)
        return error_of(lambda: self.shards.apply_gradients(lookup, given, **numbers))

    def changed_ids(self) -> Said:
        ids = IDS.clone()
        lookup = self.shards.lookup({"a": ids})
        lookup.wait()
        if self.bad:
            ids[0] = 9
        return error_of(lambda: self.shards.apply_gradients(lookup, {"a": ONES["a"]}, step=0))

    def twice(self) -> Said:
        """Uses a lookup again, with what rank 1 sends the other ranks at their good call."""
        first, second = (self.shards.lookup({"a": IDS}) for _ in range(2))
        grads = {"a": torch.zeros(3, 2)}
        self.shards.apply_gradients(first, grads, step=0, time=7)
        used: Lookup = self.pick(first, second)
        return error_of(lambda: self.shards.apply_gradients(used, grads, step=0))

    def write(self, rows: Any, time: Any = None) -> Said:
        given = self.pick(rows, {"a": (IDS, ONES["a"])})
        return error_of(lambda: self.shards.assign(given, time=self.pick(time, None)))

    def forward(self, batch: Any) -> Said:
        good = {"x": Ragged.from_lists([[1, 2], [3]]), "y": Ragged.from_lists([[], [4]])}
        given = self.pick(good | batch if isinstance(batch, dict) else batch, good)
        return error_of(lambda: self.models["backward"](given))

    def backward(self, model: str, forwards: int = 1, change: str = "gradient") -> Said:
        collection = self.models[model]
        splits = torch.tensor([0, 1, 3])

        def train() -> None:
            for _ in range(forwards):
                out = collection({"x": Ragged(IDS, splits), "y": Ragged(IDS, splits)})
                if self.bad and change == "splits":
                    splits[1] = 2
                weight = NAN if self.bad and change == "gradient" else 1.0
                (out["x"].sum() * weight + out["y"].sum()).backward()
            if model == "step":
                collection.step()

        said = error_of(train)
        collection.zero_grad()
        return said

    def good(self) -> Said:
        """The call after a bad one; it must work, and leave rows as they were."""
        zeros = {name: torch.zeros_like(g) for name, g in ONES.items()}
        lookup = self.shards.lookup({"a": IDS, "b": IDS})
        lookup.wait()
        return error_of(lambda: self.shards.apply_gradients(lookup, zeros, step=0, time=7))


ROWS = torch.ones(3, 2)
BAD: dict[str, tuple[Callable[[Calls], Said], str, str]] = {
    "ids of floats": (lambda c: c.lookup({"a": torch.ones(3)}), "InputError", "table 'a': ids must be int64"),
    "ids of two dims": (lambda c: c.lookup({"b": IDS[None]}), "InputError", "table 'b': ids must have shape"),
    "ids of no table": (lambda c: c.lookup({"z": IDS}), "UnknownNameError", "unknown table 'z'"),
    "gradient NaN": (lambda c: c.push({"a": ROWS * NAN}), "InputError", "table 'a': grads hold NaN or Inf"),
    "gradient shape": (
        lambda c: c.push({"b": ROWS}),
        "InputError",
        "table 'b': grads must have shape [3, 3]",
    ),
    "gradient type": (
        lambda c: c.push({"a": ROWS.double()}),
        "InputError",
        "table 'a': grads must be a float32",
    ),
    "gradient of no table": (lambda c: c.push({"z": ROWS}), "UnknownNameError", "unknown table 'z'"),
    "gradients in a list": (lambda c: c.push([ROWS]), "InputError", "grads must map tables"),
    "step below 0": (lambda c: c.push(step=-1), "InputError", "step must be an integer"),
    "step without gradients": (lambda c: c.push({}, step="x"), "InputError", "step must be an integer"),
    "time below 0": (lambda c: c.push({}, time=-5.0), "InputError", "time must be seconds"),
    "scale": (lambda c: c.push(scale=NAN), "InputError", "scale must be finite"),
    "clip_norm": (lambda c: c.push(clip_norm=-1.0), "InputError", "clip_norm must be positive"),
    "other step": (lambda c: c.push(step=3), "UsageError", "steps by rank: [0, 3]"),
    "ids changed": (lambda c: c.changed_ids(), "UsageError", "changed in place after the lookup"),
    "lookup used twice": (lambda c: c.twice(), "UsageError", "has already been used"),
    "ids to push": (lambda c: c.push(ids={"a": IDS.float()}), "InputError", "table 'a': ids must be int64"),
    "NaN of ids": (
        lambda c: c.push({"a": ROWS * NAN, "b": ONES["b"]}, ids={"a": IDS, "b": IDS}),
        "InputError",
        "NaN or Inf",
    ),
    "rows to assign": (
        lambda c: c.write({"a": (IDS, ONES["b"])}),
        "InputError",
        "rows must have shape [3, 2]",
    ),
    "NaN to assign": (
        lambda c: c.write({"a": (IDS, torch.full((3, 2), NAN))}),
        "InputError",
        "table 'a': rows hold NaN or Inf",
    ),
    "no table to assign": (lambda c: c.write({"z": (IDS, ROWS)}), "UnknownNameError", "unknown table 'z'"),
    "time to assign": (lambda c: c.write({}, time=NAN), "InputError", "time must be seconds"),
    "reinitialize": (
        lambda c: error_of(lambda: c.shards.reinitialize({c.pick("z", "a"): IDS})),
        "UnknownNameError",
        "unknown table 'z'",
    ),
    "remove": (
        lambda c: error_of(lambda: c.shards.remove({"a": c.pick(IDS.double(), ints(99))})),
        "InputError",
        "ids must be int64",
    ),
    "feature of floats": (
        lambda c: c.forward({"x": torch.ones(2)}),
        "InputError",
        "feature 'x': ids must be",
    ),
    "feature of other rows": (
        lambda c: c.forward({"y": Ragged.from_lists([[1]])}),
        "InputError",
        "feature 'y' has 1 rows",
    ),
    "feature of text": (lambda c: c.forward({"y": "ids"}), "InputError", "feature 'y': expected a Ragged"),
    "no batch": (lambda c: c.forward(5), "InputError", "a batch must be a mapping of columns"),
    "NaN in backward": (lambda c: c.backward("backward"), "InputError", "NaN or Inf"),
    "NaN to clip": (lambda c: c.backward("clipped"), "InputError", "NaN or Inf"),
    "NaN in step": (lambda c: c.backward("step"), "InputError", "NaN or Inf"),
    "NaN in a step of two": (lambda c: c.backward("step", 2), "InputError", "NaN or Inf"),
    "splits changed": (
        lambda c: c.backward("backward", 1, "splits"),
        "UsageError",
        "row_splits were changed",
    ),
    "splits changed, two": (
        lambda c: c.backward("step", 2, "splits"),
        "UsageError",
        "row_splits were changed",
    ),
}


def bad_input(transport: str) -> dict[str, tuple[Said, Said]]:
    """By kind of bad input what was said, and what the next call said; rows must stay as they were."""
    calls = Calls(transport)
    calls.shards.apply_gradients({"a": IDS, "b": IDS}, ONES, step=0, time=7)
    found = {}
    for name, (work, *_) in BAD.items():
        before = {table: whole(calls.shards.local[table]) for table in ("a", "b")}
        said = work(calls)
        for table, rows in before.items():
            assert_same_tables(whole(calls.shards.local[table]), rows)
        found[name] = said, calls.good()
    return found


@pytest.fixture(scope="module", params=["gloo", "auto"])
def after_bad_input(request: pytest.FixtureRequest) -> list[dict[str, tuple[Said, Said]]]:
    return run_ranks(bad_input, request.param)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_on_one_rank_raises_on_all_and_the_next_call_works(
    after_bad_input: list[dict[str, tuple[Said, Said]]], name: str
) -> None:
    _, kind, text = BAD[name]
    (other, other_next), (own, own_next) = (rank[name] for rank in after_bad_input)
    assert own is not None
    assert own[0] == kind
    assert text in own[1]
    assert other is not None
    if name == "other step":
        assert other == own  # no rank knows better
    else:
        assert other[0] == "RankFailedError"
        assert "rank 1 failed, so nothing was done" in other[1]
        assert text in other[1]
    assert (other_next, own_next) == (None, None)


def lacking() -> tuple[list[str], list[float]]:
    """Rank 1 has no column of feature "y"; what is warned of, and the row that feature trains."""
    batch = {"x": Ragged.from_lists([[1, 2]]), "y": Ragged.from_lists([[4]])}
    if dist.get_rank() == 1:
        del batch["y"]
    tables = [TableConfig(name, dim=2, optimizer=SGD(1.0), initializer=Zeros()) for name in ("a", "b")]
    collection = EmbeddingCollection(tables, [Feature("x", "a"), Feature("y", "b")], reduction="sum")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = collection(batch)
    (out["x"].sum() + out["y"].sum()).backward()
    rows = collection.shards.lookup({"a": ints(1), "b": ints(4)}).rows
    return [str(warning.message) for warning in caught], [rows["a"][0, 0].item(), rows["b"][0, 0].item()]


def test_a_feature_that_a_rank_lacks_counts_as_empty_there_and_is_warned_of() -> None:
    (nothing, rows), (warned, same_rows) = run_ranks(lacking)
    assert nothing == []
    assert warned == ["feature 'y' is not in this rank's batch (it holds 'x')"]
    assert rows == same_rows == [-2.0, -1.0]


# ---- ranks that differ


def differing() -> dict[str, Said]:
    """Other arguments on rank 1."""
    rank = dist.get_rank()
    renamed = [TableConfig("c", dim=2, optimizer=SGD(1.0)), TABLES[1]]
    faster = [TABLES[0], TableConfig("b", dim=3, optimizer=Adagrad(0.2))]
    arguments: dict[str, dict[str, Any]] = {
        "table": {"configs": renamed},
        "optimizer": {"configs": faster},
        "one table": {"configs": TABLES[:1]},
        "router": {"router": "hash_roundrobin"},
        "one router": {"router": {"a": Router("continuous", 2, block_size=9)}},
        "seed": {"seed": 1},
        "wire": {"wire": {"rows": "float16"}},
        "transport": {"transport": "gloo"},
        "bad router": {"router": "modulo"},
        "bad wire": {"wire": "float8"},
        "bad table": {"configs": [TABLES[0], TABLES[0]]},
        "bad push": {"push": "no"},
        "nothing": {},
    }
    found = {}
    for name, other in arguments.items():
        given = {"configs": TABLES, **(other if rank else {})}
        found[name] = error_of(lambda given=given: SyncShards(**given, timeout=PATIENT))  # type: ignore[misc]
    return found


def test_ranks_made_with_other_arguments_raise_on_all() -> None:
    first, second = run_ranks(differing)
    for name in ("table", "optimizer", "one table", "router", "one router", "seed", "wire"):
        for rank, said in enumerate((first[name], second[name])):
            assert said is not None, name
            assert said[0] == "InputError"
            assert "tables, routers, seed and wire must be equal on all ranks" in said[1]
            assert f"rank {1 - rank} has" in said[1]
    for said in (first["transport"], second["transport"]):
        assert said == ("InputError", "transport must be the same on all ranks, got auto, gloo")
    for name, text in (
        ("bad router", "'modulo'"),
        ("bad wire", "'float8'"),
        ("bad table", "two tables"),
        ("bad push", "push must be True or False, got str"),
    ):
        own, other = second[name], first[name]
        assert own is not None
        assert own[0] == "InputError"
        assert text in own[1]
        assert other is not None
        assert other[0] == "RankFailedError"
        assert "rank 1: InputError" in other[1]
    assert first["nothing"] is second["nothing"] is None


def other_calls(transport: str) -> list[Said]:
    """Rank 1 makes another call than the others; then all make the same again; then one call too many."""
    rank = dist.get_rank()
    shards = SyncShards(TABLES, transport=transport, timeout=SOON)
    found = [error_of(lambda: shards.remove({"a": IDS}) if rank == 1 else shards.lookup({"a": IDS}).wait())]
    found.append(error_of(lambda: shards.lookup({"a": IDS}).wait()))
    if rank == 1:
        found.append(error_of(lambda: shards.lookup({"a": IDS}).wait()))
        store().set("gave up", "")
    else:
        store().wait(["gave up"], timedelta(seconds=PATIENT))
    return found


@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_ranks_that_make_different_calls_are_named(transport: str) -> None:
    results = run_ranks(other_calls, transport, world_size=3)
    for rank, found in enumerate(results):
        kind, said = found[0] or ("", "")
        assert kind == "RankFailedError"
        own, other, named = ("remove", "lookup", 0) if rank == 1 else ("lookup", "remove", 1)
        assert f"rank {rank} calls {own} (call 1), but rank {named} calls {other} (call 1)" in said
        assert found[1] is None
    kind, said = results[1][2]
    assert kind == "RankTimeoutError"
    assert "SyncShards.lookup (call 3), exchange of sizes (tables a, b): rank 1 waited for ranks 0, 2" in said


def other_exchange() -> Said:
    """Rank 1 looks up again where the others apply gradients."""
    shards = SyncShards(TABLES, transport="auto", timeout=SOON)
    if shards.exchange.transport == "gloo":
        return (
            None  # gloo itself ends the process: "is there a distributed collective mismatch in your code?"
        )
    lookup = shards.lookup({"a": IDS})
    lookup.wait()
    if dist.get_rank() == 1:
        return error_of(lambda: shards.lookup({"a": IDS}).wait())
    return error_of(lambda: shards.apply_gradients(lookup, {"a": ONES["a"]}, step=4))


def test_ranks_at_different_exchanges_are_told_so() -> None:
    first, second = run_ranks(other_exchange)
    if first is None:
        pytest.skip("no shared memory here")
    assert first[0] == second[0] == "RankFailedError"
    assert "SyncShards.apply_gradients (call 1), exchange of gradients of step 4 (tables a, b)" in first[1]
    assert "SyncShards.lookup (call 2), exchange of sizes (tables a, b)" in second[1]
    for _, said in (first, second):
        assert "all ranks must make the same calls in the same order" in said


# ---- ranks that die, stall, or are slow


def train(shards: SyncShards, step: int) -> Lookup:
    lookup = shards.lookup({"a": IDS + step, "b": IDS})
    lookup.wait()
    return lookup


def dying(transport: str, where: str) -> list[Said] | None:
    """Rank 2 of 4 is killed in step 2, before its lookup or before its gradients."""
    shards = SyncShards(TABLES, transport=transport, timeout=SOON, push=where == "push")
    grads: dict[str, Tensor] = ONES

    def steps() -> None:
        for step in range(5):
            if step == 2 and dist.get_rank() == 2 and where == "lookup":
                os.kill(os.getpid(), signal.SIGKILL)
            lookup = train(shards, step)
            if step == 2 and dist.get_rank() == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            shards.apply_gradients(lookup, grads, step=step)
            if step == 2 and where == "push":
                shards.flush()

    return [error_of(steps), error_of(lambda: train(shards, 9))]


@pytest.mark.parametrize(
    ("transport", "where"),
    [("gloo", "lookup"), ("gloo", "gradients"), ("auto", "gradients"), ("auto", "push")],
)
def test_a_killed_rank_is_named_by_all_others(transport: str, where: str) -> None:
    results = run_ranks(dying, transport, where, world_size=4, lost=[2])
    for rank in (0, 1, 3):
        (kind, said), (later, again) = results[rank]
        assert kind == "RankTimeoutError"
        if where == "lookup":
            assert said.startswith("SyncShards.lookup (call 3), exchange of sizes (tables a, b)")
        else:
            expected = "SyncShards.apply_gradients (call 3), exchange of gradients of step 2 (tables a, b)"
            assert said.startswith(expected)
        assert f"rank {rank} waited for rank 2, which did not arrive within 2 s" in said
        assert later == "UsageError"
        assert "an earlier exchange failed" in again


def stalling(transport: str) -> list[Said]:
    """Rank 1 comes to the second step when the others have given up."""
    shards = SyncShards(TABLES, transport=transport, timeout=SOON)
    shards.apply_gradients(train(shards, 0), ONES, step=0)
    rank = dist.get_rank()
    if rank == 1:
        store().wait(["gave up/0", "gave up/2"], timedelta(seconds=PATIENT))
    said = error_of(lambda: shards.apply_gradients(train(shards, 1), ONES, step=1))
    store().set(f"gave up/{rank}", "")
    if rank != 1:
        store().wait(["gave up/1"], timedelta(seconds=PATIENT))
    return [said, error_of(lambda: train(shards, 2))]


@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_a_stalled_rank_is_named_and_told_when_it_comes(transport: str) -> None:
    results = run_ranks(stalling, transport, world_size=3)
    for rank in (0, 2):
        (kind, said), _ = results[rank]
        assert kind == "RankTimeoutError"
        assert "SyncShards.lookup (call 2), exchange of sizes (tables a, b)" in said
        assert f"rank {rank} waited for rank 1, which did not arrive within 2 s" in said
    (kind, said), _ = results[1]
    assert kind == "RankTimeoutError"
    assert "SyncShards.lookup (call 2)" in said
    for _, (later, _) in results:
        assert later == "UsageError"


def slow(transport: str) -> list[float]:
    """Rank 1 comes to each exchange when the other is known to wait there."""
    rank = dist.get_rank()
    shards = SyncShards(TABLES, transport=transport, timeout=PATIENT, push=True)

    def late(key: str) -> None:
        if rank == 1:
            store().wait([key], timedelta(seconds=PATIENT))

    for step in range(3):
        late(f"asked {step}")
        lookup = shards.lookup({"a": IDS})
        store().set(f"asked {step}", "")
        late(f"pushed {step}")
        shards.apply_gradients(lookup, {"a": ONES["a"]}, step=step)
        store().set(f"pushed {step}", "")
    return shards.lookup({"a": IDS}).rows["a"].flatten().tolist()


@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_a_slow_rank_is_waited_for(transport: str) -> None:
    assert run_ranks(slow, transport) == [[-6.0] * 6, [-6.0] * 6]
