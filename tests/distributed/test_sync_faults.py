"""What goes wrong on one rank, as all ranks see it: bad input, ranks that die, stall or differ.

An input error raises on every rank before anything is written, and the next call works. A rank that does not
come is named within the timeout, with the call, its tables and its number.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

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
from megalith.distributed.exchange import Exchange
from megalith.shards import Lookup
from tests.distributed.ranks import PATIENT, error_of, run_ranks, store, wait_for
from tests.table.support import assert_same_tables, ints, whole

TABLES = [
    TableConfig("a", dim=2, optimizer=SGD(1.0), initializer=Zeros()),
    TableConfig("b", dim=3, optimizer=Adagrad(0.1)),
]
SOON = 2.0
LONG = 600.0
"""More seconds than a test may take."""
NAN = float("nan")


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

    def lookup(self, ids: Any) -> str:
        return error_of(lambda: self.shards.lookup(self.pick(ids, {"a": IDS})).wait())

    def push(self, grads: Any = None, ids: Any = None, **numbers: Any) -> str:
        """Gradients of a lookup, or with ids without one."""
        lookup: Any = self.pick(ids, {"a": IDS, "b": IDS})
        if ids is None:
            lookup = self.shards.lookup({"a": IDS, "b": IDS})
        numbers = {"step": 0} | self.pick(numbers, {})
        given = self.pick(ONES if grads is None else grads, ONES)
        return error_of(self.shards.apply_gradients, lookup, given, **numbers)

    def changed_ids(self) -> str:
        ids = IDS.clone()
        lookup = self.shards.lookup({"a": ids})
        lookup.wait()
        if self.bad:
            ids[0] = 9
        return error_of(self.shards.apply_gradients, lookup, {"a": ONES["a"]}, step=0)

    def twice(self) -> str:
        """Uses a lookup again, with what rank 1 sends the other ranks at their good call."""
        first, second = (self.shards.lookup({"a": IDS}) for _ in range(2))
        grads = {"a": torch.zeros(3, 2)}
        self.shards.apply_gradients(first, grads, step=0, time=7)
        return error_of(self.shards.apply_gradients, self.pick(first, second), grads, step=0)

    def write(self, rows: Any, time: Any = None) -> str:
        given = self.pick(rows, {"a": (IDS, ONES["a"])})
        return error_of(self.shards.assign, given, time=self.pick(time, None))

    def forward(self, batch: Any) -> str:
        good = {"x": Ragged.from_lists([[1, 2], [3]]), "y": Ragged.from_lists([[], [4]])}
        given = self.pick(good | batch if isinstance(batch, dict) else batch, good)
        return error_of(self.models["backward"], given)

    def backward(self, model: str, forwards: int = 1, change: str = "gradient") -> str:
        collection, splits = self.models[model], torch.tensor([0, 1, 3])

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

    def good(self) -> str:
        """The call after a bad one; it must work, and leave rows as they were."""
        lookup = self.shards.lookup({"a": IDS, "b": IDS})
        lookup.wait()
        zeros = {name: torch.zeros_like(g) for name, g in ONES.items()}
        return error_of(self.shards.apply_gradients, lookup, zeros, step=0, time=7)


ROWS = torch.ones(3, 2)
BAD: dict[str, tuple[Callable[[Calls], str], str]] = {
    "ids of floats": (lambda c: c.lookup({"a": torch.ones(3)}), "InputError: table 'a': ids must be int64"),
    "ids of two dims": (lambda c: c.lookup({"b": IDS[None]}), "InputError: table 'b': ids must have shape"),
    "ids of no table": (lambda c: c.lookup({"z": IDS}), "UnknownNameError: unknown table 'z'"),
    "NaN": (lambda c: c.push({"a": ROWS * NAN}), "InputError: table 'a': grads hold NaN or Inf"),
    "shape": (lambda c: c.push({"b": ROWS}), "InputError: table 'b': grads must have shape [3, 3]"),
    "type": (lambda c: c.push({"a": ROWS.double()}), "InputError: table 'a': grads must be a float32"),
    "gradient of no table": (lambda c: c.push({"z": ROWS}), "UnknownNameError: unknown table 'z'"),
    "gradients in a list": (lambda c: c.push([ROWS]), "grads must map tables"),
    "step without gradients": (lambda c: c.push({}, step="x"), "step must be an integer"),
    "time below 0": (lambda c: c.push({}, time=-5.0), "time must be seconds"),
    "scale": (lambda c: c.push(scale=NAN), "scale must be finite"),
    "clip_norm": (lambda c: c.push(clip_norm=-1.0), "clip_norm must be positive"),
    "other step": (lambda c: c.push(step=3), "steps by rank: [0, 3]"),
    "ids changed": (lambda c: c.changed_ids(), "changed in place after the lookup"),
    "lookup used twice": (lambda c: c.twice(), "has already been used"),
    "ids to push": (lambda c: c.push(ids={"a": IDS.float()}), "InputError: table 'a': ids must be int64"),
    "NaN of ids": (lambda c: c.push(ONES | {"a": ROWS * NAN}, ids={"a": IDS, "b": IDS}), "NaN or Inf"),
    "rows to assign": (lambda c: c.write({"a": (IDS, ONES["b"])}), "rows must have shape [3, 2]"),
    "NaN to assign": (lambda c: c.write({"a": (IDS, ROWS * NAN)}), "InputError: table 'a': rows hold NaN"),
    "no table to assign": (lambda c: c.write({"z": (IDS, ROWS)}), "UnknownNameError: unknown table 'z'"),
    "time to assign": (lambda c: c.write({}, time=NAN), "time must be seconds"),
    "reinitialize": (
        lambda c: error_of(c.shards.reinitialize, {c.pick("z", "a"): IDS}),
        "UnknownNameError: unknown table 'z'",
    ),
    "remove": (
        lambda c: error_of(c.shards.remove, {"a": c.pick(IDS.double(), ints(99))}),
        "ids must be int64",
    ),
    "feature of other rows": (lambda c: c.forward({"y": Ragged.from_lists([[1]])}), "feature 'y' has 1 rows"),
    "no batch": (lambda c: c.forward(5), "a batch must be a mapping of columns"),
    "NaN in backward": (lambda c: c.backward("backward"), "NaN or Inf"),
    "NaN to clip": (lambda c: c.backward("clipped"), "NaN or Inf"),
    "NaN in a step of two": (lambda c: c.backward("step", 2), "NaN or Inf"),
    "splits changed": (lambda c: c.backward("backward", 1, "splits"), "row_splits were changed"),
    "splits changed, two": (lambda c: c.backward("step", 2, "splits"), "row_splits were changed"),
}


def bad_input(transport: str) -> dict[str, tuple[str, str]]:
    """By kind of bad input what was said, and what the next call said; rows must stay as they were."""
    calls = Calls(transport)
    calls.shards.apply_gradients({"a": IDS, "b": IDS}, ONES, step=0, time=7)
    found = {}
    for name, (work, _) in BAD.items():
        before = {table: whole(calls.shards.local[table]) for table in ("a", "b")}
        said = work(calls)
        for table, rows in before.items():
            assert_same_tables(whole(calls.shards.local[table]), rows)
        found[name] = said, calls.good()
    return found


@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_bad_input_on_one_rank_raises_on_all_and_the_next_call_works(transport: str) -> None:
    others, owns = run_ranks(bad_input, transport)
    for name, (_, text) in BAD.items():
        (other, other_next), (own, own_next) = others[name], owns[name]
        assert text in own, name
        if name == "other step":
            assert other == own  # no rank knows better
        else:
            assert other.startswith("RankFailedError: "), (name, other)
            assert "rank 1 failed, so nothing was done" in other, name
            assert text in other, name
        assert (other_next, own_next) == ("", ""), name


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

DIFFERENT = "InputError: SyncShards: tables, routers, seed and wire must be equal on all ranks"
ARGUMENTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "table": ({"configs": [TableConfig("c", dim=2, optimizer=SGD(1.0)), TABLES[1]]}, DIFFERENT, DIFFERENT),
    "optimizer": (
        {"configs": [TABLES[0], TableConfig("b", dim=3, optimizer=Adagrad(0.2))]},
        DIFFERENT,
        DIFFERENT,
    ),
    "one table": ({"configs": TABLES[:1]}, DIFFERENT, DIFFERENT),
    "router": ({"router": "hash_roundrobin"}, DIFFERENT, DIFFERENT),
    "one router": ({"router": {"a": Router("continuous", 2, block_size=9)}}, DIFFERENT, DIFFERENT),
    "seed": ({"seed": 1}, DIFFERENT, DIFFERENT),
    "wire": ({"wire": {"rows": "float16"}}, DIFFERENT, DIFFERENT),
    "transport": (
        {"transport": "gloo"},
        *["transport must be the same on all ranks, got auto, gloo"] * 2,
    ),
    "bad router": ({"router": "modulo"}, "rank 1: InputError", "'modulo'"),
    "bad wire": ({"wire": "float8"}, "rank 1: InputError", "'float8'"),
    "bad table": ({"configs": [TABLES[0], TABLES[0]]}, "rank 1: InputError", "two tables"),
    "bad push": ({"push": "no"}, "rank 1: InputError", "push must be True or False, got str"),
}
"""Other arguments of rank 1, and what rank 0 and rank 1 raise."""


def differing() -> dict[str, str]:
    found = {}
    for name, (other, *_) in ARGUMENTS.items():
        given = {"configs": TABLES, **(other if dist.get_rank() else {})}
        found[name] = error_of(SyncShards, **given, timeout=PATIENT)
    SyncShards(TABLES, timeout=PATIENT)
    return found


def test_ranks_made_with_other_arguments_raise_on_all() -> None:
    first, second = run_ranks(differing)
    for name, (_, *texts) in ARGUMENTS.items():
        for rank, (said, text) in enumerate(zip((first[name], second[name]), texts, strict=True)):
            assert text in said, name
            assert text != DIFFERENT or f"rank {1 - rank} has" in said


def other_calls(transport: str) -> list[str]:
    """Rank 1 makes another call than the others; then all make the same again; then one call too many."""
    rank = dist.get_rank()
    shards = SyncShards(TABLES, transport=transport, timeout=SOON)
    found = [error_of(lambda: shards.remove({"a": IDS}) if rank == 1 else shards.lookup({"a": IDS}).wait())]
    found.append(error_of(lambda: shards.lookup({"a": IDS}).wait()))
    if rank == 1:
        found.append(error_of(lambda: shards.lookup({"a": IDS}).wait()))
        store().set("gave up", "")
    else:
        wait_for("gave up")
    return found


@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_ranks_that_make_different_calls_are_named(transport: str) -> None:
    results = run_ranks(other_calls, transport, world_size=3)
    for rank, (said, again, *_) in enumerate(results):
        own, other, named = ("remove", "lookup", 0) if rank == 1 else ("lookup", "remove", 1)
        assert said.startswith("RankFailedError: ")
        assert f"rank {rank} calls {own} (call 1), but rank {named} calls {other} (call 1)" in said
        assert again == ""
    where = "SyncShards.lookup (call 3), exchange of sizes (tables a, b)"
    assert results[1][2].startswith(f"RankTimeoutError: {where}: rank 1 waited for ranks 0, 2")


def other_exchange() -> str | None:
    """Rank 1 looks up again where the others apply gradients."""
    shards = SyncShards(TABLES, transport="auto", timeout=SOON)
    if shards.exchange.transport == "gloo":  # which ends the process itself
        return None
    lookup = shards.lookup({"a": IDS})
    lookup.wait()
    if dist.get_rank() == 1:
        return error_of(lambda: shards.lookup({"a": IDS}).wait())
    return error_of(shards.apply_gradients, lookup, {"a": ONES["a"]}, step=4)


def test_ranks_at_different_exchanges_are_told_so() -> None:
    first, second = run_ranks(other_exchange)
    if first is None:
        pytest.skip("no shared memory here")
    assert "SyncShards.apply_gradients (call 1), exchange of gradients of step 4 (tables a, b)" in first
    assert "SyncShards.lookup (call 2), exchange of sizes (tables a, b)" in second
    for said in (first, second):
        assert said.startswith("RankFailedError: ")
        assert "all ranks must make the same calls in the same order" in said


# ---- ranks that die, stall, or are slow


def train(shards: SyncShards, step: int) -> Lookup:
    lookup = shards.lookup({"a": IDS + step, "b": IDS})
    lookup.wait()
    return lookup


ENDS = {
    "return": "its program ended",
    "free": "it freed its part of these tables, so it makes no more calls",
}
KILLED = "its process was killed, crashed or called os._exit"


def dying(transport: str, where: str) -> list[str]:
    """Rank 2 of 4 is killed in step 2, before its lookup or before its gradients."""
    shards = SyncShards(TABLES, transport=transport, timeout=LONG, push=where == "push")
    die = dist.get_rank() == 2

    def steps() -> None:
        for step in range(5):
            if step == 2 and die and where == "lookup":
                os.kill(os.getpid(), signal.SIGKILL)
            lookup = train(shards, step)
            if step == 2 and die:
                os.kill(os.getpid(), signal.SIGKILL)
            shards.apply_gradients(lookup, ONES, step=step)
            if step == 2 and where == "push":
                shards.flush()

    return [error_of(steps), error_of(train, shards, 9)]


@pytest.mark.parametrize(
    ("transport", "where"),
    [("gloo", "lookup"), ("gloo", "gradients"), ("auto", "gradients"), ("auto", "push")],
)
def test_a_killed_rank_is_named_by_all_others(transport: str, where: str) -> None:
    results = run_ranks(dying, transport, where, world_size=4, lost=[2])
    call = "SyncShards.apply_gradients (call 3), exchange of gradients of step 2 (tables a, b)"
    if where == "lookup":
        call = "SyncShards.lookup (call 3), exchange of sizes (tables a, b)"
    for rank in (0, 1, 3):
        said, again = results[rank]
        assert (
            said == f"RankFailedError: {call}: rank {rank} cannot continue, because rank 2 has left: {KILLED}"
        )
        assert again.startswith("UsageError: ")
        assert "an earlier exchange failed" in again


_HELD: list[SyncShards] = []


def leaving(transport: str, how: str) -> list[str]:
    """The last rank leaves before the first exchange of a batch."""
    shards = SyncShards(TABLES, transport=transport, timeout=LONG)
    if dist.get_rank() == dist.get_world_size() - 1:
        if how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "os._exit":
            os._exit(0)
        if how == "return":
            _HELD.append(shards)
        return []
    return [error_of(train, shards, 0), error_of(train, shards, 1)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("how", ["SIGKILL", "os._exit", "return", "free"])
@pytest.mark.parametrize("transport", ["gloo", "shared_memory", "auto"])
def test_a_rank_that_leaves_is_named_at_once_with_how(transport: str, how: str, size: int) -> None:
    lost = [] if how in ENDS else [size - 1]
    results = run_ranks(leaving, transport, how, world_size=size, lost=lost)
    left = ENDS.get(how, KILLED)
    for rank, (said, again) in enumerate(results[:-1]):
        where = "SyncShards.lookup (call 1), exchange of sizes (tables a, b)"
        reason = f"rank {rank} cannot continue, because rank {size - 1} has left: {left}"
        assert said == f"RankFailedError: {where}: {reason}"
        assert again.startswith("UsageError: ")
        assert reason in again


PROGRAM = """
import sys, torch.distributed as dist
from megalith import SGD, SyncShards, TableConfig
from tests.table.support import ints
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
shards = SyncShards([TableConfig("a", dim=2, optimizer=SGD(1.0))])
shards.lookup({"a": ints(1)}).wait()
if rank == 1:
    1 / 0
shards.lookup({"a": ints(1)}).wait()
"""


def test_a_program_that_ends_with_an_error_is_named_with_the_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], env=environ, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=LONG)[1] for process in started]
    assert "ZeroDivisionError: division by zero" in errors[1]
    reason = "rank 0 cannot continue, because rank 1 has left: its program ended with ZeroDivisionError"
    assert f"exchange of sizes (tables a): {reason}: division by zero" in errors[0]


def large(transport: str) -> str:
    """Rank 1 is killed by a timer while messages of 16 MiB travel."""
    exchange = Exchange(transport=transport, timeout=LONG)
    size = 8 << 20
    data = torch.zeros(2 * size, dtype=torch.uint8)
    if dist.get_rank() == 1:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    while True:  # until the other rank is killed in one of them
        if said := error_of(exchange.all_to_all, data, [size, size], [size, size], "a large message"):
            return said


@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_a_rank_killed_in_the_middle_of_a_message_is_named(transport: str) -> None:
    said, _ = run_ranks(large, transport, lost=[1])
    assert (
        said == f"RankFailedError: a large message: rank 0 cannot continue, because rank 1 has left: {KILLED}"
    )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("how", ["SIGKILL", "return"])
def test_a_rank_that_leaves_before_its_tables_exist_is_named(how: str, size: int) -> None:
    lost = [] if how == "return" else [size - 1]
    for said in run_ranks(starting, how, world_size=size, lost=lost)[:-1]:
        expected = "RankTimeoutError: the first exchange: rank . lost a connection after .* s; "
        assert re.match(f"{expected}rank {size - 1} did not arrive: ", said)


def starting(how: str) -> str:
    if dist.get_rank() < dist.get_world_size() - 1:
        wait_for("leaves")
        return error_of(SyncShards, TABLES, timeout=LONG)
    store().set("leaves", "")
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    return ""


def stalling(transport: str) -> list[str]:
    """Rank 1 comes to the second step when the others have given up."""
    shards = SyncShards(TABLES, transport=transport, timeout=SOON)
    shards.apply_gradients(train(shards, 0), ONES, step=0)
    rank = dist.get_rank()
    if rank == 1:
        wait_for("gave up/0", "gave up/2")
    said = error_of(lambda: shards.apply_gradients(train(shards, 1), ONES, step=1))
    store().set(f"gave up/{rank}", "")
    if rank != 1:
        wait_for("gave up/1")
    return [said, error_of(train, shards, 2)]


@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_a_stalled_rank_is_named_and_told_when_it_comes(transport: str) -> None:
    for rank, (said, later) in enumerate(run_ranks(stalling, transport, world_size=3)):
        assert said.startswith("RankTimeoutError: SyncShards.lookup (call 2)")
        if rank != 1:
            assert f"rank {rank} waited for rank 1, which did not arrive within 2 s" in said
        assert later.startswith("UsageError: ")


def slow(transport: str) -> list[float]:
    """Rank 1 comes to each exchange when the other is known to wait there."""
    shards = SyncShards(TABLES, transport=transport, timeout=PATIENT, push=True)

    def late(key: str) -> None:
        if dist.get_rank() == 1:
            wait_for(key)

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


class EndsWithSlice:
    """A collective that completes when a wait for it has just timed out."""

    def __init__(self, work: Any) -> None:
        self.work, self.waits = work, 0

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self, limit: timedelta) -> None:
        self.work.wait(timedelta(seconds=PATIENT))
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")


def gather_as_slices_end() -> list[int]:
    exchange, start = Exchange(transport="gloo", timeout=PATIENT), dist.all_to_all_single
    dist.all_to_all_single = lambda *given, **named: EndsWithSlice(start(*given, **named))
    try:
        return exchange.gather(dist.get_rank())
    finally:
        dist.all_to_all_single = start


def test_a_collective_that_completes_as_a_wait_for_it_ends_is_complete() -> None:
    assert run_ranks(gather_as_slices_end) == [[0, 1], [0, 1]]
