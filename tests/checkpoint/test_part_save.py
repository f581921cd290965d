"""A save on one server: its tables are written while their calls go on, and it ends with its worker."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalith import (
    Adagrad,
    EmbeddingCollection,
    Feature,
    LocalShards,
    Router,
    TableConfig,
    Zeros,
    checkpoint,
)
from megalith.checkpoint.parts import (
    SavedTable,
    TableLoad,
    close_on_server,
    freeze_on_server,
    load_on_server,
    write_on_server,
)
from megalith.errors import CheckpointError, RankTimeoutError, UsageError
from megalith.ps.messages import ServerWrite, SpaceSpec
from megalith.ps.table_space import TableSpace
from megalith.shards.preparer import make_routers
from megalith.storage.store import Store, open_store
from tests.table.support import ints

DIM, ROWS = 64, 8000
TABLE = TableConfig("t", dim=DIM, optimizer=Adagrad(1.0), initializer=Zeros())


def space(rows: int = 4) -> TableSpace:
    """A table with rows of zeros on the only server, and workers 0 and 1."""
    spec = SpaceSpec([TABLE], "cpu", 0, ("float32", "float32"), False, None, 2, 20.0, "")
    made = TableSpace(spec, 0, 1)
    made.join(0, "a")
    made.join(1, "b")
    ids = torch.arange(rows)
    made.part.shards.assign({"t": (ids, torch.zeros(rows, DIM))})
    return made


def push(rows: int) -> ServerWrite:
    header = {"counts": [rows], "step": 0, "time": 1, "scale": 1.0, "clip_norm": 0.0, "rates": {"t": [1.0]}}
    grads = np.ones(rows * DIM, dtype=np.float32).view(np.uint8)
    return ServerWrite("push", header, {"ids": np.arange(rows), "grads": grads})


def run(
    made: TableSpace, function: Callable[..., Any], *args: Any, background: bool = False
) -> Awaitable[Any]:
    return made.run(0, "a", 0, function, *args, background=background)


def freeze(made: TableSpace, store: Store, id: str = "x") -> Awaitable[Any]:
    return run(made, freeze_on_server, id, [SavedTable("", "t", "d/t")], False, False, None, store, "float32")


class Broken(Exception):
    """The error of a store."""


def broken(monkeypatch: pytest.MonkeyPatch, store: Store) -> Store:
    def write(*args: Any, **options: Any) -> None:
        raise Broken

    monkeypatch.setattr(type(store), "write", write)
    return store


def finish(call: Callable[[], Any]) -> Any:
    """Returns the result of a call that blocks this process if it is wrong."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "the call does not return"
    return found[0]


def test_a_push_between_freezing_and_writing_is_applied(tmp_path: Path) -> None:
    made, store = space(ROWS), open_store(tmp_path)  # the push changes more bytes than the buffer holds

    async def calls() -> Any:
        await freeze(made, store)
        await made.write(1, "b", 1, push(ROWS))
        report = await run(made, write_on_server, "x", 60.0, background=True)
        await run(made, close_on_server, "x", False)
        return report

    assert finish(lambda: asyncio.run(calls()))["t"].live == ROWS
    assert made.part.kept == {}
    assert made.part.shards.local["t"].lookup(ints(7))[0, 0].item() < 0


def test_a_save_that_cannot_write_does_not_hold_up_pushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, store = space(ROWS), broken(monkeypatch, open_store(tmp_path))

    async def calls() -> None:
        await freeze(made, store)
        await made.write(1, "b", 1, push(ROWS))
        with pytest.raises(Broken):
            await run(made, write_on_server, "x", 60.0, background=True)
        await run(made, close_on_server, "x", True)
        await freeze(made, store)  # the snapshots have ended

    finish(lambda: [asyncio.run(calls())])


def test_a_server_whose_store_hangs_names_what_it_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, store, go = space(), open_store(tmp_path), threading.Event()
    monkeypatch.setattr(type(store), "write", lambda *_, **options: go.wait(60))

    async def calls() -> None:
        await freeze(made, store)
        with pytest.raises(CheckpointError, match=r"server 0 has written \d+ rows to .*, and none in 0.01 s"):
            await run(made, write_on_server, "x", 0.01, background=True)
        await run(made, close_on_server, "x", True)

    finish(lambda: [asyncio.run(calls()), go.set()])


@pytest.mark.parametrize("how", ["leave", "join"])
def test_a_save_ends_with_its_worker(tmp_path: Path, how: str) -> None:
    made, store = space(), open_store(tmp_path)

    async def calls() -> None:
        await freeze(made, store)
        made.remove(1)
        assert made.part.kept
        if how == "leave":
            made.remove(0)
        made.join(0, "a" if how == "leave" else "another process")
        assert not made.part.kept
        with pytest.raises(UsageError):
            await run(made, write_on_server, "x", 60.0, background=True)
        made.part.shards.local["t"].snapshot().close()

    asyncio.run(calls())


def test_a_table_is_loaded_once_at_a_time(tmp_path: Path) -> None:
    made = space()
    load = TableLoad("t", [], None, True, False, None, alone=True)
    made.part.loads["t"] = "the load of another process"
    with pytest.raises(UsageError, match="is being loaded on server 0"):
        load_on_server(made.part, open_store(tmp_path), load)
    assert made.part.loads


class Remote(LocalShards):
    """Tables whose rows are reached through `each_part` only, as on a server that does not answer `close`."""

    closed = 0

    @property
    def holds_rows(self) -> bool:
        return False

    def router(self, table: str) -> Router:
        return make_routers(self.configs, "roundrobin", 1)[table]

    def each_part(self, function: Callable[..., Any], *args: Any, background: bool = False) -> list[Any]:
        found = super().each_part(function, *args, background=background)
        if function is close_on_server:
            self.closed += 1
            raise RankTimeoutError("no answer")
        return found


@pytest.mark.parametrize("fails", [False, True])
def test_a_server_that_does_not_answer_the_end_of_a_save_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    shards = Remote([TABLE])
    model = EmbeddingCollection(shards, [Feature("f", "t")])
    model({"f": ints(1)})
    caplog.set_level(logging.WARNING)
    with monkeypatch.context() as patch:
        if fails:
            broken(patch, open_store(tmp_path))
            with pytest.raises(Broken):
                checkpoint.save(model, tmp_path)
        else:
            checkpoint.save(model, tmp_path)
    assert "no answer" in caplog.text
    checkpoint.save(model, tmp_path)  # the model is idle again
    assert shards.closed == 2
