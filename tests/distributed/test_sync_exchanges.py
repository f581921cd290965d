"""How often ranks talk in a step, in what precision, and what happens when gradients are pushed."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megalith import (
    SGD,
    Adagrad,
    EmbeddingCollection,
    Feature,
    LocalShards,
    Ragged,
    SyncShards,
    TableConfig,
    Uniform,
    Zeros,
)
from megalith.errors import MegalithError
from tests.distributed.ranks import run_ranks
from tests.table.support import ints

# ---- numbers of exchanges

COLLECTIVES = [
    *("all_to_all_single", "all_to_all", "all_gather", "all_gather_object", "all_gather_into_tensor"),
    *("all_reduce", "broadcast", "broadcast_object_list", "barrier", "reduce", "reduce_scatter", "scatter"),
    *("gather", "gather_object", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """What is called of torch.distributed meanwhile."""
    calls: Counter[str] = Counter()
    before = {name: getattr(distributed_c10d, name) for name in COLLECTIVES}

    def counting(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return before[name](*args, **options)

        return call

    for name in COLLECTIVES:
        for module in (dist, distributed_c10d):
            setattr(module, name, counting(name))
    try:
        yield calls
    finally:
        for name, function in before.items():
            for module in (dist, distributed_c10d):
                setattr(module, name, function)


def batch(tables: int) -> dict[str, Ragged]:
    return {f"f{k}": Ragged.from_lists([[k, 1], [dist.get_rank()]]) for k in range(tables)}


def exchanges_of(tables: int, transport: str) -> tuple[str, dict[str, tuple[int, dict[str, int]]]]:
    """The transport, and by kind of step the exchanges and calls of torch.distributed it takes."""
    configs = [TableConfig(f"t{k}", dim=1 + k % 5, optimizer=SGD(1.0)) for k in range(tables)]
    shards = SyncShards(configs, transport=transport, timeout=60.0)
    features = [Feature(f"f{k}", f"t{k}") for k in range(tables)]
    trained = EmbeddingCollection(shards, features)
    stepped = EmbeddingCollection(shards, features, update="step")
    ids = {config.name: ints(1, 2, 2) for config in configs}
    grads = {config.name: torch.ones(3, config.dim) for config in configs}

    def forward(model: EmbeddingCollection) -> Tensor:
        return torch.stack([out.sum() for out in model(batch(tables)).values()]).sum()

    def twice() -> None:
        for _ in range(2):
            forward(stepped).backward()
        stepped.step()

    kinds: dict[str, Callable[[], Any]] = {
        "training": lambda: forward(trained).backward(),
        "evaluation": lambda: forward(trained.eval()),
        "two forwards in a step": twice,
        "gradients of ids": lambda: shards.apply_gradients(ids, grads, step=0),
        "assign": lambda: shards.assign({name: (x, grads[name]) for name, x in ids.items()}),
        "reinitialize": lambda: shards.reinitialize(ids),
    }
    found = {}
    for kind, work in kinds.items():
        before = shards.exchange.calls
        with counted() as calls:
            work()
        found[kind] = shards.exchange.calls - before, dict(calls)
    return shards.exchange.transport, found


def exchanges(transport: str) -> list[tuple[str, dict[str, tuple[int, dict[str, int]]]]]:
    return [exchanges_of(tables, transport) for tables in (1, 7, 40)]


EXPECTED = {
    "training": 4,  # sizes, ids, rows, gradients
    "evaluation": 3,
    "two forwards in a step": 9,  # of both lookups; then sizes, ids and gradients of the sum
    "gradients of ids": 3,
    "assign": 3,
    "reinitialize": 3,
}


@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_a_step_takes_four_exchanges_whatever_the_number_of_tables(transport: str) -> None:
    for rank in run_ranks(exchanges, transport):
        for used, found in rank:
            assert used == "gloo" or transport == "auto"
            assert {kind: number for kind, (number, _) in found.items()} == EXPECTED
            for number, calls in found.values():
                assert calls == ({"all_to_all_single": number} if used == "gloo" else {})


def dropped() -> tuple[int, int]:
    """Exchange threads that run while two SyncShards exist, and when one of them is gone."""
    kept = SyncShards([TableConfig("t", dim=1, optimizer=SGD(1.0))], timeout=60.0)
    other = SyncShards([TableConfig("t", dim=1, optimizer=SGD(1.0))], timeout=60.0)
    other.lookup({"t": ints(1)}).wait()
    threads = [thread for thread in threading.enumerate() if thread.name == "megalith exchange"]
    del other
    gc.collect()
    threads[1].join(60)
    kept.lookup({"t": ints(1)}).wait()
    return len(threads), sum(thread.is_alive() for thread in threads)


def test_the_thread_of_shards_that_are_gone_ends() -> None:
    assert run_ranks(dropped) == [(2, 1), (2, 1)]


def running_out() -> list[list[int]]:
    """Rank r has data for r lookups; return the ranks without data that each lookup reports."""
    shards = SyncShards([TableConfig("t", dim=1, optimizer=SGD(1.0))], timeout=60.0)
    found = []
    for number in range(3):
        done = number >= dist.get_rank()
        lookup = shards.lookup({"t": ints() if done else ints(number)}, out_of_data=done)
        lookup.wait()
        found.append(lookup.out_of_data)
    return found


def test_every_rank_knows_who_has_run_out_of_data() -> None:
    assert run_ranks(running_out, world_size=3) == [[[0], [0, 1], [0, 1, 2]]] * 3


# ---- wires

WIRES: list[str | dict[str, str]] = ["float32", "float16", "bfloat16", "int8"]
WIRES += [{"rows": "int8", "grads": "bfloat16"}, {"grads": "float16"}]
DIMS = {"a": 3, "b": 8}


def table(name: str, dim: int, **options: Any) -> TableConfig:
    return TableConfig(name, dim=dim, **({"optimizer": SGD(1.0)} | options))


def over_wires() -> list[dict[str, Any]]:
    found = []
    ids = torch.arange(50)
    for wire in WIRES:
        shards = SyncShards([table(n, d, initializer=Uniform(-1, 1)) for n, d in DIMS.items()], wire=wire)
        rows = shards.lookup(dict.fromkeys(DIMS, ids)).rows
        read = {name: rows[name].clone() for name in DIMS}
        trained = SyncShards([table(n, d, initializer=Zeros()) for n, d in DIMS.items()], wire=wire)
        generator = torch.Generator().manual_seed(dist.get_rank())
        grads = {name: torch.randn(50, dim, generator=generator) for name, dim in DIMS.items()}
        trained.apply_gradients(dict.fromkeys(DIMS, ids), grads, step=0)
        held = {name: [(c.ids, c.rows) for c in trained.scan(name)] for name in DIMS}
        huge = SyncShards([table("h", 2, initializer=Zeros())], wire=wire)
        huge.apply_gradients({"h": ints(0, 1)}, {"h": torch.tensor([[1e6, -1e6], [1.0, 1e-9]])}, step=0)
        owned = torch.cat([c.rows for c in huge.scan("h")])
        found.append({"read": read, "grads": grads, "held": held, "huge": owned, "wire": trained.wire})
    return found


ROUNDING = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8, "int8": 1 / 254}


@pytest.fixture(scope="module")
def wired() -> list[list[dict[str, Any]]]:
    return run_ranks(over_wires)


def test_each_wire_is_within_its_precision(wired: list[list[dict[str, Any]]]) -> None:
    exact = LocalShards([table(n, d, initializer=Uniform(-1, 1)) for n, d in DIMS.items()])
    rows = exact.lookup(dict.fromkeys(DIMS, torch.arange(50))).rows
    for number in range(len(WIRES)):
        found = [rank[number] for rank in wired]
        on_rows, on_grads = found[0]["wire"]
        for name in DIMS:
            assert torch.equal(
                found[0]["read"][name], found[1]["read"][name]
            )  # the same for owner and others
            most = rows[name].abs().amax(1, keepdim=True) if on_rows == "int8" else rows[name].abs()
            off = (found[0]["read"][name] - rows[name]).abs()
            assert bool((off <= most * ROUNDING[on_rows] * 1.001).all()), found[0]["wire"]
            assert (float(off.max()) == 0) == (on_rows == "float32")
            sent = [rank["grads"][name] for rank in found]
            bound = sum(g.abs() for g in sent) * ROUNDING[on_grads] * 1.001 + 1e-6
            held = [part for rank in found for part in rank["held"][name]]
            order = torch.argsort(torch.cat([ids for ids, _ in held]))
            trained = torch.cat([r for _, r in held])[order]
            assert bool(((trained + sum(sent)).abs() <= bound).all()), found[0]["wire"]


def test_gradients_too_large_for_float16_become_its_largest_number(
    wired: list[list[dict[str, Any]]],
) -> None:
    first, second = wired
    halves = [number for number, wire in enumerate(WIRES) if wire in ("float16", {"grads": "float16"})]
    assert len(halves) == 2
    for number in halves:
        # Of both ranks 65504 each, and 1e-9 is below what float16 can tell from 0.
        assert first[number]["huge"].tolist() == [[-2 * 65504.0, 2 * 65504.0]]
        assert second[number]["huge"].tolist() == [[-2.0, 0.0]]
    assert first[0]["huge"].tolist() == [[-2e6, 2e6]]


# ---- pushed gradients

PUSHED = [TableConfig("t", dim=2, optimizer=Adagrad(0.1))]


def rows_of(shards: SyncShards) -> Tensor:
    return shards.lookup({"t": torch.arange(12)}).rows["t"]


def pushed_steps() -> list[Tensor]:
    """The same steps waited for and pushed: rows read after every step, and at the end."""
    found = []
    for push in (False, True):
        shards = SyncShards(PUSHED, push=push, timeout=60.0)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for step in range(6):
            ids = torch.randint(0, 12, (9,), generator=generator)
            lookup = shards.lookup({"t": ids})
            grads = lookup.rows["t"] + torch.rand(9, 2, generator=generator)
            shards.apply_gradients(lookup, {"t": grads}, step=step)
        seen = rows_of(shards)  # requested after the pushed gradients
        shards.flush()
        found += [seen, torch.cat([c.rows for c in shards.scan("t")])]
    return found


def error_of(work: Any) -> tuple[str, str] | None:
    try:
        work()
    except MegalithError as error:
        return type(error).__name__, str(error)
    return None


def push_errors() -> dict[str, Any]:
    """Bad gradients on rank 1 only, and steps that differ, between good ones."""
    rank = dist.get_rank()
    shards = SyncShards([table("t", 1, initializer=Zeros())], push=True, timeout=60.0)
    one, bad = torch.ones(1, 1), torch.full((1, 1), float("nan"))

    def push(grads: Tensor = one, step: int = 0) -> Any:
        return error_of(lambda: shards.apply_gradients({"t": ints(4)}, {"t": grads}, step=step))

    found: dict[str, Any] = {"good": push()}
    found["bad"] = push(bad if rank else one)
    found["flush"] = error_of(shards.flush)
    found["flush again"] = error_of(shards.flush)
    found["bad again"] = push(bad if rank else one)
    found["next"] = push()  # tells what became of the one before, and is on its way itself
    found["after next"] = error_of(shards.flush)
    found["other steps"] = push(step=rank)
    found["other steps, flushed"] = error_of(shards.flush)
    found["row"] = shards.lookup({"t": ints(4)}).rows["t"].item()
    rate = 1.0
    own = table("r", 1, initializer=Zeros(), optimizer=SGD(lambda: rate))
    shards = SyncShards([own], push=True, timeout=60.0)
    shards.apply_gradients({"r": ints(4)}, {"r": one}, step=torch.tensor(0), time=torch.tensor(9))  # type: ignore[arg-type]
    rate = 100.0
    shards.flush()
    shards.assign_add({"r": (ints(5), one)}, time=torch.tensor(9.5))  # type: ignore[arg-type]
    found["rate"] = shards.lookup({"r": ints(4)}).rows["r"].item()
    found["times"] = [int(t) for chunk in shards.scan("r") for t in chunk.time]
    return found


def pushed() -> tuple[list[Tensor], dict[str, Any]]:
    return pushed_steps(), push_errors()


@pytest.fixture(scope="module")
def both() -> list[tuple[list[Tensor], dict[str, Any]]]:
    return run_ranks(pushed)


def test_pushed_gradients_give_the_same_bits(both: list[Any]) -> None:
    for (waited, waited_held, seen, held), _ in both:
        assert torch.equal(waited, seen)
        assert torch.equal(waited_held, held)
        assert len(held) > 0


def test_flush_raises_what_went_wrong_with_a_push_and_nothing_else_is_lost(both: list[Any]) -> None:
    (_, first), (_, second) = both
    own = ("InputError", "table 't': grads hold NaN or Inf")
    theirs = (
        "RankFailedError",
        "apply_gradients: rank 1 failed, so nothing was done: InputError: table 't': grads hold NaN or Inf",
    )
    assert [first[k] for k in ("good", "bad", "flush", "flush again")] == [None, None, theirs, None]
    assert [second[k] for k in ("good", "bad", "flush", "flush again")] == [None, own, None, None]
    assert [first[k] for k in ("bad again", "next", "after next")] == [None, theirs, None]
    assert [second[k] for k in ("bad again", "next", "after next")] == [own, None, None]
    for rank in (first, second):
        assert rank["other steps"] is None
        kind, said = rank["other steps, flushed"]
        assert kind == "UsageError"
        assert "steps by rank: [0, 1]" in said
        assert rank["row"] == -4  # two good steps of two ranks
        assert rank["rate"] == -2  # the learning rate at the time of the call, not of the exchange
        assert rank["times"] == [9]


# ---- learning rates


class Counted:
    """A schedule that counts its calls."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, step: int) -> float:
        self.steps.append(step)
        return 0.5

    def __repr__(self) -> str:
        return "Counted()"


def evaluated() -> tuple[list[list[int]], list[list[float]]]:
    """Rank 0 has gradients for ids of rank 1 alone; table `c` is never looked up."""
    rates = [Counted() for _ in range(3)]
    options = [{"optimizer": SGD(rate), "initializer": Zeros()} for rate in rates]
    shards = SyncShards([table(name, 1, **own) for name, own in zip("abc", options, strict=True)])
    for rate in rates:
        rate.steps.clear()  # construction may try them
    own = {"a": ints(1), "b": ints(0, 1)} if shards.rank == 0 else {"a": ints(), "b": ints()}
    lookup = shards.lookup(own)
    shards.apply_gradients(
        lookup, {name: torch.ones_like(rows) for name, rows in lookup.rows.items()}, step=4
    )
    shards.apply_gradients(own, {name: torch.ones(len(x), 1) for name, x in own.items()}, step=5)
    found = shards.lookup({"a": ints(1), "b": ints(0, 1)}).rows
    return [rate.steps for rate in rates], [found["a"].flatten().tolist(), found["b"].flatten().tolist()]


def test_an_owner_evaluates_the_rates_of_tables_that_ranks_asked_it_for() -> None:
    (first, rows), (second, other_rows) = run_ranks(evaluated)
    assert first == [[], [4, 5], []]
    assert second == [[4, 5], [4, 5], []]
    assert rows == other_rows == [[-1.0], [-1.0, -1.0]]
