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
    EmbeddingCollection,
    Feature,
    Ragged,
    SyncShards,
    TableConfig,
    Zeros,
)
from tests.distributed.ranks import PATIENT, error_of, run_ranks
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


def exchanges_of(tables: int, transport: str) -> tuple[str, dict[str, tuple[int, dict[str, int]]]]:
    """The transport, and by kind of step the exchanges and calls of torch.distributed it takes."""
    configs = [table(f"t{k}", 1 + k % 5) for k in range(tables)]
    shards = SyncShards(configs, transport=transport, timeout=PATIENT)
    features = [Feature(f"f{k}", f"t{k}") for k in range(tables)]
    trained = EmbeddingCollection(shards, features)
    stepped = EmbeddingCollection(shards, features, update="step")
    ids = {config.name: ints(1, 2, 2) for config in configs}
    grads = {config.name: torch.ones(3, config.dim) for config in configs}
    batch = {f"f{k}": Ragged.from_lists([[k, 1], [dist.get_rank()]]) for k in range(tables)}

    def forward(model: EmbeddingCollection) -> Tensor:
        return torch.stack([out.sum() for out in model(batch).values()]).sum()

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


def running_out() -> tuple[list[list[int]], tuple[int, int]]:
    """Rank r has data for r lookups; returns the ranks without data that each lookup reports.

    Then the exchange threads that run while there are two SyncShards, and when one of them is gone.
    """
    shards, other = (SyncShards([table("t", 1)], timeout=PATIENT) for _ in range(2))
    found = []
    for number in range(3):
        done = number >= dist.get_rank()
        lookup = shards.lookup({"t": ints() if done else ints(number)}, out_of_data=done)
        lookup.wait()
        found.append(lookup.out_of_data)
    other.lookup({"t": ints(1)}).wait()
    threads = [thread for thread in threading.enumerate() if thread.name == "megalith exchange"]
    del other
    gc.collect()
    threads[1].join(60)
    shards.lookup({"t": ints(1)}).wait()
    return found, (len(threads), sum(thread.is_alive() for thread in threads))


def test_every_rank_knows_who_has_run_out_of_data_and_threads_end_with_their_shards() -> None:
    assert run_ranks(running_out, world_size=3) == [([[0], [0, 1], [0, 1, 2]], (2, 1))] * 3


# ---- wires


def table(name: str, dim: int, **options: Any) -> TableConfig:
    return TableConfig(name, dim=dim, **({"optimizer": SGD(1.0), "initializer": Zeros()} | options))


def over_a_wire() -> list[Any]:
    """Rows of int8 and gradients of float16: what is read of thirds, and what huge gradients become."""
    shards = SyncShards([table("t", 2)], wire={"rows": "int8", "grads": "float16"})
    ids = ints(0, 1)
    shards.apply_gradients({"t": ids}, {"t": torch.tensor([[1e6, -1e6], [1.0, 1e-9]])}, step=0)
    held = [c.rows.tolist() for c in shards.scan("t")]
    shards.assign({"t": (ids, torch.tensor([[1.0, 1 / 3], [2.0, 0.5]]))})
    return [held, shards.lookup({"t": ids}).rows["t"].tolist()]


def test_rows_and_gradients_travel_in_their_precision() -> None:
    (first, rows), (second, other) = run_ranks(over_a_wire)
    # Of both ranks 65504 each, and 1e-9 is below what float16 can tell from 0.
    assert (first, second) == ([[[-2 * 65504.0, 2 * 65504.0]]], [[[-2.0, 0.0]]])
    assert rows == other  # the same for owner and others
    assert rows == [pytest.approx([1.0, 42 / 127]), pytest.approx([2.0, 2 * 32 / 127])]


# ---- pushed gradients


def push_errors() -> dict[str, Any]:
    """Bad gradients on rank 1 only, and steps that differ, between good ones."""
    rank = dist.get_rank()
    shards = SyncShards([table("t", 1)], push=True, timeout=PATIENT)
    one, bad = torch.ones(1, 1), torch.full((1, 1), float("nan"))

    def push(grads: Tensor = one, step: int = 0) -> str:
        return error_of(shards.apply_gradients, {"t": ints(4)}, {"t": grads}, step=step)

    found: dict[str, Any] = {"good": push()}
    found["bad"] = push(bad if rank else one)
    found["flush"] = error_of(shards.flush)
    found["flush again"] = error_of(shards.flush)
    found["bad again"] = push(bad if rank else one)
    found["next"] = push()  # tells what became of the one before, and is on its way itself
    found["after next"] = error_of(shards.flush)
    assert push(step=rank) == ""
    assert "steps by rank: [0, 1]" in error_of(shards.flush)
    assert shards.lookup({"t": ints(4)}).rows["t"].item() == -4  # two good steps of two ranks
    rate = 1.0
    shards = SyncShards([table("r", 1, optimizer=SGD(lambda: rate))], push=True, timeout=PATIENT)
    shards.apply_gradients({"r": ints(4)}, {"r": one}, step=torch.tensor(0), time=torch.tensor(9))  # type: ignore[arg-type]
    rate = 100.0
    shards.flush()
    shards.assign_add({"r": (ints(5), one)}, time=torch.tensor(9.5))  # type: ignore[arg-type]
    # The learning rate at the time of the call, not of the exchange.
    assert shards.lookup({"r": ints(4)}).rows["r"].item() == -2
    assert [int(t) for chunk in shards.scan("r") for t in chunk.time] == [9]
    return found


def test_flush_raises_what_went_wrong_with_a_push_and_nothing_else_is_lost() -> None:
    first, second = run_ranks(push_errors)
    own = "InputError: table 't': grads hold NaN or Inf"
    theirs = f"RankFailedError: apply_gradients: rank 1 failed, so nothing was done: {own}"
    expected = [("good", "", ""), ("bad", "", own), ("flush", theirs, ""), ("flush again", "", "")]
    expected += [("bad again", "", own), ("next", theirs, ""), ("after next", "", "")]
    assert [(name, first[name], second[name]) for name in first] == expected


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


def evaluated() -> list[list[int]]:
    """Rank 0 has gradients for ids of rank 1 alone; table `c` is never looked up."""
    rates = [Counted() for _ in range(3)]
    shards = SyncShards(
        [table(name, 1, optimizer=SGD(rate)) for name, rate in zip("abc", rates, strict=True)]
    )
    for rate in rates:
        rate.steps.clear()  # construction may try them
    own = {"a": ints(1), "b": ints(0, 1)} if shards.rank == 0 else {"a": ints(), "b": ints()}
    ones = {name: torch.ones(len(x), 1) for name, x in own.items()}
    shards.apply_gradients(shards.lookup(own), ones, step=4)
    shards.apply_gradients(own, ones, step=5)
    found = shards.lookup({"a": ints(1), "b": ints(0, 1)}).rows
    assert (found["a"].tolist(), found["b"].tolist()) == ([[-1.0]], [[-1.0], [-1.0]])
    return [rate.steps for rate in rates]


def test_an_owner_evaluates_the_rates_of_tables_that_ranks_asked_it_for() -> None:
    assert run_ranks(evaluated) == [[[], [4, 5], []], [[4, 5], [4, 5], []]]
