"""Workers of ServerShards in all modes, and servers that are killed, on two real Ray servers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith import (
    Adagrad,
    Capacity,
    EmbeddingCollection,
    Feature,
    LocalShards,
    Servers,
    ServerShards,
    TableConfig,
    checkpoint,
)
from megalith.errors import (
    InputError,
    RankTimeoutError,
    ServerLostError,
    TableFullError,
    UsageError,
)
from megalith.ps import link as ps_link
from megalith.ps.launch import ray_module
from megalith.ps.link import ServerLink
from megalith.ps.lookup import ServerLookup
from megalith.shards.gradients import Gradients, total
from tests.ps.support import (
    NAMES,
    Make,
    nap,
    push,
    read,
    rows_of,
    table,
    where,
    work,
)
from tests.table.support import ints

gradients = st.lists(st.tuples(st.integers(0, 5), st.floats(-1, 1, width=32)), max_size=6)


@settings(max_examples=6)
@given(steps=st.lists(st.tuples(*[gradients] * 4), min_size=1, max_size=3))
def test_synchronous_workers_have_the_bits_of_one_process(servers: Servers, steps: Any) -> None:
    """Four micro-batches a step, on 1, 2 and 4 workers, which sum those of their own by the tree."""
    config = TableConfig("t", dim=2, optimizer=Adagrad(0.1))

    def summed(parts: Sequence[Sequence[tuple[int, float]]]) -> Gradients:
        sums = []
        for part in parts:
            ids, values = ints(*(id for id, _ in part)), torch.tensor([[x, x / 3] for _, x in part])
            own = ids.unique()
            grads = torch.zeros(own.numel(), 2)
            for id, value in zip(ids, values.view(-1, 2), strict=True):
                grads[own == id] += value
            sums.append(Gradients(own, grads))
        return total(sums)

    expected = LocalShards([config])
    for step, batches in enumerate(steps):
        one = summed(batches)
        expected.apply_gradients({"t": one.ids}, {"t": one.values}, step=step, time=7.0)
    for count in (1, 2, 4):
        options: Any = {"servers": servers, "name": next(NAMES), "mode": "sync", "num_workers": count}
        workers = [ServerShards([config], worker=w, timeout=60.0, **options) for w in range(count)]
        for step, batches in enumerate(steps):
            for w in reversed(range(count)):  # the order of arrival does not matter
                own = summed(batches[w * 4 // count : (w + 1) * 4 // count])
                workers[w].apply_gradients({"t": own.ids}, {"t": own.values}, step=step, time=7.0)
        for each in workers:
            each.flush()
        assert rows_of(workers[0]) == rows_of(expected)
        ray_module().get([actor.close.remote(options["name"]) for actor in servers.actors], timeout=60)


def test_a_lookup_of_a_synchronous_worker_sees_the_gradients_of_all(make: Make) -> None:
    options: dict[str, Any] = {"mode": "sync", "num_workers": 2, "name": next(NAMES)}
    first, second = (make(table(), worker=worker, **options) for worker in (0, 1))
    assert first.sources == 2
    for step in range(3):
        push(first, [1, 2], [[1.0], [1.0]], step)
        push(second, [1], [[2.0]], step)
        assert read(first, "t", 1, 2) == read(second, "t", 1, 2) == [[-3.0 * (step + 1)], [-1.0 * (step + 1)]]


def test_a_bad_gradient_of_one_worker_raises_on_all(make: Make) -> None:
    options: dict[str, Any] = {"mode": "sync", "num_workers": 2, "name": next(NAMES)}
    first, second = (make(table(), worker=worker, **options) for worker in (0, 1))
    push(first, [1, 2], [[1.0], [1.0]])
    with pytest.raises(InputError, match="NaN or Inf"):
        push(second, [1], [[float("nan")]])
    with pytest.raises(Exception, match="worker 1 failed"):
        first.flush()
    push(first, [1], [[1.0]])
    push(second, [1], [[1.0]])
    assert read(first, "t", 1, 2) == [[-2.0], [0.0]]


def test_a_write_that_cannot_be_sent_does_not_use_up_a_number(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = make(table())

    def refuse(*args: Any) -> None:
        raise OSError("not sent")

    with monkeypatch.context() as patch:
        patch.setattr(shards.links[1]._channel, "push", refuse)
        with pytest.raises(OSError, match="not sent"):
            push(shards, [2, 3], [[1.0], [1.0]])  # an id of each server
    push(shards, [2, 3], [[1.0], [1.0]])
    assert read(shards, "t", 2, 3) == [[-2], [-1]]


def test_functions_in_the_background_have_no_limit_while_their_server_answers(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ps_link, "GRACE", 0.0)
    shards = make(table(), timeout=1.0)
    assert shards.each_part(nap, 1.4, background=True) == [1.4, 1.4]


def test_a_server_that_is_stopped_during_a_function_in_the_background_is_named(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ps_link, "GRACE", 0.0)
    shards = make(table(), timeout=1.0)
    stopped = shards.describe_servers()[1]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        with pytest.raises(RankTimeoutError, match="server 1 did not answer nap of worker 0 within 1 s: its"):
            shards.each_part(nap, 0.0, background=True)
    finally:
        os.kill(stopped, signal.SIGCONT)


def test_close_raises_the_error_of_the_last_push_and_leaves(make: Make) -> None:
    name = next(NAMES)
    first, second = (make(table(eviction=[Capacity(2)]), worker=w, name=name) for w in (0, 1))
    push(first, [0, 2, 4, 6], [[1.0]] * 4)
    with pytest.raises(TableFullError):
        first.close()
    assert [server["workers"] for server in second.describe_servers()] == [[1], [1]]
    with pytest.raises(KeyError), second:
        raise KeyError  # and not an error of leaving
    assert [server["workers"] for server in second.describe_servers()] == [[], []]


def test_a_worker_that_cannot_join_one_server_is_a_member_of_none(
    make: Make, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(NAMES)
    first, join = make(table(), name=name), ServerLink.join

    def refuse(link: ServerLink, written: Any) -> Any:
        joined = join(link)
        if link is not links[0]:
            raise UsageError("refused")
        return joined

    links: list[ServerLink] = []
    open_link = ServerLink.open
    monkeypatch.setattr(ServerLink, "open", lambda link: (links.append(link), open_link(link))[1])
    monkeypatch.setattr(ServerLink, "join", refuse)
    with pytest.raises(UsageError, match="refused"):
        ServerShards([table()], servers=servers, name=name, worker=1, timeout=60.0)
    first.flush()
    assert [server["workers"] for server in first.describe_servers()] == [[0], [0]]


def test_a_worker_waits_for_the_slowest(make: Make) -> None:
    options: dict[str, Any] = {"staleness": 1, "num_workers": 2, "name": next(NAMES), "timeout": 0.2}
    fast, slow = (make(table(), worker=worker, **options) for worker in (0, 1))
    push(fast, [1], [[1.0]])
    push(fast, [1], [[1.0]])
    with pytest.raises(RankTimeoutError, match="worker 0 has made 2 steps"):
        read(fast, "t", 1)
    push(slow, [2], [[1.0]])
    slow.flush()
    assert read(fast, "t", 1) == [[-2]]
    assert {server["staleness"] for server in fast.describe_servers()} == {1}


def test_a_lookup_that_waits_when_its_channel_is_lost_is_made_again_in_other_memory(make: Make) -> None:
    options: dict[str, Any] = {"staleness": 0, "num_workers": 2, "name": next(NAMES)}
    fast, slow = (make(table(), worker=worker, **options) for worker in (0, 1))
    ids = list(range(10_000))
    push(fast, ids, [[1.0]] * len(ids))
    lookup = fast.lookup({"t": torch.tensor(ids)})
    lookup.fetch()
    deadline = time.monotonic() + 60
    while not all(server["waiting"] for server in fast.describe_servers()):  # for worker 1
        assert time.monotonic() < deadline
    assert isinstance(lookup, ServerLookup)
    first = lookup._received
    assert first is not None
    fast.links[0].disconnect()
    push(slow, ids, [[2.0]] * len(ids))
    slow.flush()
    assert lookup.rows["t"].unique().tolist() == [-3]
    assert lookup.source.data_ptr() != first.data_ptr()
    assert fast.links.pool.find(first.numpy()) is None  # it is not used again


def test_workers_in_other_processes(make: Make, servers: Servers) -> None:
    options: dict[str, Any] = {"mode": "sync", "num_workers": 2, "name": next(NAMES)}
    first = make(table(), worker=0, **options)
    options["timeout"] = 60.0
    other = ray_module().remote(work).options(num_cpus=0).remote(servers, options)
    for step in range(2):
        push(first, [1], [[1.0]], step)
    first.flush()
    assert ray_module().get(other, timeout=60.0) == [[[-3.0]], [[-6.0]]]


# ---- servers that end; last, because these servers lose the tables of other tests


def kill(shards: ServerShards, *numbers: int) -> None:
    for number in numbers:
        os.kill(shards.describe_servers()[number]["pid"], signal.SIGKILL)


def train_with_kills(
    servers: Servers, folder: Path, kills: dict[int, Sequence[int]], *, steps: int, save: int
) -> tuple[EmbeddingCollection, EmbeddingCollection]:
    """Trains on servers that are killed after some steps, and in one process; returns both."""
    config = TableConfig("a", dim=3, optimizer=Adagrad(0.1))
    recovery = checkpoint.recovery(folder / "log")
    shards = ServerShards([config], servers=servers, name=folder.name, recovery=recovery, timeout=120.0)
    pair = [EmbeddingCollection(x, [Feature("clicks", "a")]) for x in (shards, [config])]
    generator = torch.Generator().manual_seed(5)
    for step in range(steps):
        ids = torch.randint(0, 40, (8,), generator=generator)
        for collection in pair:
            collection({"clicks": ids}, time=float(step))["clicks"].square().sum().backward()
        if step == save:
            checkpoint.save(pair[0], folder / "checkpoint")
        kill(shards, *kills.get(step, ()))
    shards.flush()
    assert shards.lost_writes == 0
    return pair[0], pair[1]


def test_killed_servers_lose_nothing_with_the_synchronous_log(servers: Servers, tmp_path: Path) -> None:
    without = ServerShards([table()], servers=servers, name="without")
    found, expected = train_with_kills(servers, tmp_path, {2: (0,), 8: (1,)}, steps=14, save=5)
    assert rows_of(found.shards, "a") == rows_of(expected.shards, "a")
    assert len(found.shards.each_part(where)) == 2
    with pytest.raises(ServerLostError, match="its rows are lost"):
        read(without, "t", 1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_fifty_kills(servers: Servers, tmp_path: Path) -> None:
    kills = {step: (step // 3 % 2,) for step in range(1, 150, 3)}
    found, expected = train_with_kills(servers, tmp_path, kills, steps=155, save=70)
    assert rows_of(found.shards, "a") == rows_of(expected.shards, "a")
