"""The order of calls on one server: each write is applied once, in the order of its worker's numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest
import torch

from megalith import SGD, TableConfig, Zeros
from megalith.errors import RankTimeoutError, ServerRestartedError, UsageError
from megalith.ps.messages import ServerWrite, SpaceSpec
from megalith.ps.status import quantile
from megalith.ps.table_space import READER, CallCounts, Member, TableSpace
from tests.table.support import ints

TABLE = TableConfig("t", dim=1, optimizer=SGD(1.0), initializer=Zeros())


def space(
    *, sync: bool = False, staleness: int | None = None, workers: int = 1, timeout: float = 20.0
) -> TableSpace:
    """A space with one table, on the only server, and workers 0, 1, ..."""
    spec = SpaceSpec([TABLE], "cpu", 0, ("float32", "float32"), sync, staleness, workers, timeout, "")
    made = TableSpace(spec, 0, 1)
    for worker in range(workers):
        made.join(worker, "s")
    return made


def push(grad: float, step: int = 0, id: int = 7) -> ServerWrite:
    header = {"counts": [1], "step": step, "time": 1, "scale": 1.0, "clip_norm": 0.0, "rates": {"t": [1.0]}}
    return ServerWrite(
        "push", header, {"ids": np.array([id]), "grads": np.array([grad], dtype=np.float32).view(np.uint8)}
    )


def assign(value: float) -> ServerWrite:
    rows = np.array([value], dtype=np.float32)
    return ServerWrite("assign", {"counts": [1], "time": 1}, {"ids": np.array([7]), "rows": rows})


def value(made: TableSpace) -> float:
    return made.part.shards.local["t"].lookup(ints(7)).item()


def run(*calls: Awaitable[Any]) -> list[Any]:
    """Runs calls that begin in this order, all at the same time."""

    async def together() -> list[Any]:
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(together())


def test_writes_that_arrive_in_another_order_are_applied_in_the_order_of_their_numbers() -> None:
    made = space()
    assert (
        run(
            made.write(0, "s", 3, push(1.0)),
            made.write(0, "s", 2, assign(5.0)),
            made.write(0, "s", 1, push(1.0)),
        )
        == [None] * 3
    )
    assert value(made) == 4.0


def test_the_result_of_a_repeated_write_is_that_of_the_first() -> None:
    made = space()
    write = ServerWrite("reinitialize", {"counts": [1], "time": 1}, {"ids": np.array([7])})
    first, again = run(made.write(0, "s", 1, write), made.write(0, "s", 1, write))
    assert first.tolist() == again.tolist() == [0]


def test_an_error_is_raised_again_for_a_repeated_write_and_the_next_write_is_applied() -> None:
    made = space()
    bad = ServerWrite("untrack", {"consumer": "none"})
    results = run(made.write(0, "s", 1, bad), made.write(0, "s", 2, push(1.0)), made.write(0, "s", 1, bad))
    assert "no consumer 'none'" in str(results[0])
    assert results[1] is None
    assert str(results[2]) == str(results[0])
    assert value(made) == -1.0


def test_a_worker_that_repeats_a_synchronous_step_reads_the_rows_before_it() -> None:
    """Its push is there and the step is applied, but it ended before it knew: another server may wait."""
    made = space(sync=True, workers=2)
    ids = np.array([7, 8, 9])

    def rows(worker: int, session: str, after: int) -> list[float]:
        (found,) = run(made.read(worker, session, after, ids, [3], None))
        values: list[float] = found.view(np.float32).tolist()
        return values

    for number in (1, 2):
        first = push(1.0, step=number - 1)
        second = ServerWrite(
            "push",
            first.header | {"counts": [2]},
            {"ids": np.array([9, 7]), "grads": np.array([5.0, 2.0], dtype=np.float32).view(np.uint8)},
        )
        run(made.write(0, "s", number, first), made.write(1, "s", number, second))
    made.join(1, "replacement", unacknowledged=2)
    assert rows(1, "replacement", 1) == [-3.0, 0.0, -5.0]
    assert rows(1, "replacement", 2) == rows(0, "s", 2) == [-6.0, 0.0, -10.0]
    assert run(made.write(1, "replacement", 2, second)) == [None]  # not applied again
    assert rows(0, "s", 2) == [-6.0, 0.0, -10.0]
    made.join(0, "third", unacknowledged=2)
    assert rows(0, "third", 1) == [-3.0, 0.0, -5.0]
    run(made.write(1, "replacement", 3, assign(5.0)))
    assert rows(0, "third", 1) == [5.0, 0.0, -10.0]  # other writes end it


def test_a_read_of_a_process_that_is_no_worker_does_not_wait() -> None:
    made = space(sync=True, workers=2)
    (rows,) = run(made.read(READER, "s", 0, np.array([7]), [1], None))
    assert rows.view(np.float32).tolist() == [0.0]


def test_two_processes_under_one_number_are_noticed() -> None:
    made = space()
    run(made.write(0, "s", 1, push(1.0)))
    assert made.join(0, "other").accepted == 1
    late, read = run(made.write(0, "s", 2, push(1.0)), made.read(0, "s", 1, np.array([7]), [1], None))
    assert "another ServerShards has joined server 0 as worker 0" in str(late)
    assert isinstance(read, UsageError)
    assert run(made.write(0, "other", 2, push(1.0))) == [None]
    assert value(made) == -2.0


def test_a_worker_of_an_earlier_start_must_join_again() -> None:
    made, again = space(), space()
    known = made.join(0, "s")
    assert run(made.write(0, f"s@{known.incarnation}", 1, push(1.0))) == [None]
    (error,) = run(again.write(0, f"s@{known.incarnation}", 2, push(1.0)))
    assert isinstance(error, ServerRestartedError)


def test_a_worker_that_joins_again_continues_its_numbers() -> None:
    made = space()
    run(made.write(0, "s", 1, push(1.0)))
    assert made.join(0, "s").accepted == 1
    assert made.join(0, "s", 1).accepted == 1  # its answer to write 1 was lost: it is not sent again
    assert made.join(0, "s", 5).accepted == 1  # answered writes 2 to 4 are lost: 5 is the next
    run(made.write(0, "s", 5, push(1.0)))
    assert value(made) == -2.0


def test_a_worker_starts_at_the_highest_step_that_the_server_has_seen() -> None:
    made = space()
    assert made.join(1, "s").step == -1
    run(made.write(0, "s", 1, push(1.0, step=8)), made.write(0, "s", 2, push(1.0, step=3)))
    assert made.join(2, "s").step == 8


def test_a_process_that_replaces_a_worker_repeats_its_work_and_nothing_is_applied_twice() -> None:
    """The worker was killed after write 3; the run knows of write 1, so 2 and 3 are made again."""
    made = space()
    for number in (1, 2, 3):
        run(made.write(0, "s", number, push(1.0)))
    made.join(0, "new", 2)
    for number in (2, 3, 4):
        assert run(made.write(0, "new", number, push(10.0))) == [None]
    assert value(made) == -13.0


# ---- observers


def test_nobody_waits_for_an_observer() -> None:
    made = space(sync=True, workers=2)
    made.join(5, "o", observer=True)
    assert run(made.write(0, "s", 1, push(1.0)), made.write(1, "s", 1, push(2.0))) == [None, None]
    assert value(made) == -3.0
    run(made.write(5, "o", 1, assign(4.0)))  # what is no gradient does not wait for a step
    assert value(made) == 4.0
    bounded = space(staleness=0, workers=1)
    bounded.join(5, "o", observer=True)
    run(bounded.write(0, "s", 1, push(1.0)))
    (rows,) = run(bounded.read(0, "s", 1, np.array([7]), [1], None))
    assert rows.view(np.float32).tolist() == [-1.0]
    (rows,) = run(bounded.read(5, "o", 0, np.array([7]), [1], None))  # nor does it wait for a worker
    assert rows.view(np.float32).tolist() == [-1.0]


def test_an_observer_joins_during_a_step_and_is_known_after_a_restart() -> None:
    made = space(sync=True, workers=2)

    async def during() -> None:
        waiting = asyncio.ensure_future(made.write(0, "s", 1, push(1.0)))
        await asyncio.sleep(0)
        made.join(5, "o", observer=True)
        await made.write(1, "s", 1, push(1.0))
        await waiting

    asyncio.run(during())
    again = TableSpace(made.spec, 0, 1)
    again.set_state(made.state())
    assert [again.members[worker].trains for worker in (0, 1, 5)] == [True, True, False]


# ---- synchronous steps


def test_the_first_step_waits_until_all_workers_have_joined() -> None:
    made = TableSpace(space(sync=True, workers=2).spec, 0, 1)
    made.join(0, "s")

    async def join_later() -> None:
        assert value(made) == 0.0
        made.join(1, "s")

    run(made.write(0, "s", 1, push(1.0)), join_later(), _after(made, 1, push(4.0)))
    assert value(made) == -5.0


async def _after(made: TableSpace, worker: int, write: ServerWrite) -> None:
    await asyncio.sleep(0)
    await made.write(worker, "s", 1, write)


def test_workers_must_push_the_same_step() -> None:
    made = space(sync=True, workers=2)
    results = run(made.write(0, "s", 1, push(1.0, step=0)), made.write(1, "s", 1, push(1.0, step=1)))
    assert all(isinstance(each, UsageError) for each in results)
    assert value(made) == 0.0


def test_a_step_that_waits_too_long_names_the_workers_without_gradients() -> None:
    made = space(sync=True, workers=3, timeout=0.01)
    results = run(made.write(0, "s", 1, push(1.0)), made.write(1, "s", 1, push(1.0)))
    assert all(isinstance(each, RankTimeoutError) for each in results)
    assert "workers [2]" in str(results[0])
    assert value(made) == 0.0


def test_a_step_does_not_wait_for_a_worker_that_left() -> None:
    made = space(sync=True, workers=2)

    async def leave() -> None:
        made.remove(1)

    assert run(made.write(0, "s", 1, push(1.0)), leave()) == [None, None]
    assert value(made) == -1.0


def test_workers_join_between_steps_only() -> None:
    made = space(sync=True, workers=2)

    async def join() -> None:
        made.join(2, "s")

    results = run(made.write(0, "s", 1, push(1.0)), join(), made.write(1, "s", 1, push(1.0)))
    assert isinstance(results[1], UsageError)
    made.join(2, "s")
    results = run(*(made.write(worker, "s", 2 if worker < 2 else 1, push(1.0, 1)) for worker in range(3)))
    assert results == [None] * 3
    assert value(made) == -5.0


@pytest.mark.parametrize("sync", [False, True])
def test_a_write_of_a_replaced_process_that_waited_is_refused(sync: bool) -> None:
    made = space(sync=sync, workers=1)

    async def replaced() -> list[Any]:
        old = asyncio.create_task(made.write(0, "s", 2, push(100.0, 1)))  # its write 1 never arrives
        read = asyncio.create_task(made.read(0, "s", 2, np.array([7]), [1], None))
        await asyncio.sleep(0)
        assert made.join(0, "new").accepted == 0
        await made.write(0, "new", 1, push(1.0, 0))
        await made.write(0, "new", 2, push(1.0, 1))
        return await asyncio.gather(old, read, return_exceptions=True)

    assert all("another ServerShards has joined" in str(error) for error in asyncio.run(replaced()))
    assert value(made) == -2.0


def test_a_read_of_a_replaced_process_does_not_wait_for_the_slowest() -> None:
    made = space(staleness=0, workers=2)

    async def replaced() -> list[Any]:
        await made.write(0, "s", 1, push(1.0))
        read = asyncio.create_task(made.read(0, "s", 1, np.array([7]), [1], None))
        await asyncio.sleep(0)
        made.join(0, "new")
        return await asyncio.gather(read, return_exceptions=True)

    assert isinstance(asyncio.run(replaced())[0], UsageError)


def test_a_write_that_times_out_does_not_stop_those_after_it() -> None:
    made = space(timeout=0.01)
    (late,) = run(made.write(0, "s", 3, push(1.0)))
    assert isinstance(late, RankTimeoutError)
    assert run(made.write(0, "s", 4, push(1.0))) == [None]
    skipped = run(*(made.write(0, "s", number, push(1.0)) for number in (1, 2, 3)))
    assert all(isinstance(error, RankTimeoutError) for error in skipped)  # they are not silently lost
    assert value(made) == -1.0


def test_steps_that_time_out_do_not_stop_those_after_them() -> None:
    made = space(sync=True, workers=2, timeout=0.02)
    results = run(*(made.write(0, "s", number, push(1.0, number)) for number in (1, 2, 3)))
    assert all(isinstance(error, RankTimeoutError) for error in results)
    assert made.members[0].accepted == 3
    assert run(made.write(0, "s", 4, push(1.0, 4)), made.write(1, "s", 1, push(1.0, 4))) == [None, None]
    assert value(made) == -2.0


def test_a_worker_leaves_after_its_writes_and_then_writes_nothing() -> None:
    made = space(sync=True, workers=2)
    results = run(
        made.leave(1, "s", 1),
        made.write(1, "s", 1, push(1.0)),
        made.write(0, "s", 1, push(1.0)),
    )
    assert results == [None] * 3
    assert value(made) == -2.0
    (error,) = run(made.write(1, "s", 2, push(1.0)))
    assert "worker 1 has left" in str(error)
    (error,) = run(made.leave(0, "another process", 0))
    assert isinstance(error, UsageError)
    assert run(made.write(0, "s", 2, push(1.0))) == [None]
    assert value(made) == -3.0


# ---- bounded staleness


def test_a_worker_that_left_holds_up_nobody() -> None:
    made = space(staleness=0, workers=2, timeout=0.01)
    (waited,) = run(_both(made))
    assert isinstance(waited, RankTimeoutError)
    made.remove(1)
    (rows,) = run(made.read(0, "s", 1, np.array([7]), [1], None))
    assert torch.from_numpy(rows).view(torch.float32).tolist() == [-1.0]


async def _both(made: TableSpace) -> Any:
    await made.write(0, "s", 1, push(1.0))
    return await made.read(0, "s", 1, np.array([7]), [1], None)


@pytest.mark.parametrize("kind", ["push", "assign"])
def test_a_write_without_a_time_gets_the_clock_of_the_server(kind: str) -> None:
    made = space()
    write = push(1.0) if kind == "push" else assign(1.0)
    timed = made.with_time(ServerWrite(write.kind, write.header | {"time": None}, write.arrays))
    assert timed.header["time"] > 1_700_000_000
    assert made.with_time(write) is write


def test_errors_that_are_no_longer_kept_raise_all_the_same() -> None:
    member = Member()
    for number in range(1, 1003):
        member.keep(number, UsageError(f"error {number}"))
    with pytest.raises(UsageError, match="error 1002"):
        member.raise_error(1002)
    for number in (1, 2):
        with pytest.raises(UsageError, match="no longer known"):
            member.raise_error(number)
    member.raise_error(1003)
    skipped = Member(accepted=5)
    skipped.skip(2000, UsageError("late"))
    for number, message in {1000: "no longer known", 1500: "late"}.items():
        with pytest.raises(UsageError, match=message):
            skipped.raise_error(number)


def test_calls_per_second_and_quantiles() -> None:
    counts = CallCounts()
    begin = counts._began
    for number in range(40):
        counts.add(begin + number / 2)
    assert counts.numbers(begin + 20)["requests_per_second"] == pytest.approx(2.0, abs=0.2)
    assert counts.numbers(begin + 60)["requests_per_second"] == 0
    assert quantile(counts.numbers()["lookup_seconds"], 0.5) is None
    for seconds in (0.0001, 0.0001, 0.03, 9.0):
        counts.add_lookup(seconds)
    histogram = counts.numbers()["lookup_seconds"]
    assert [quantile(histogram, part) for part in (0.5, 0.75, 1.0)] == [0.0005, 0.05, float("inf")]
    assert histogram["sum"] == pytest.approx(9.0302)
