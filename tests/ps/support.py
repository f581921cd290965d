"""What tests send to servers and other workers. Those processes import this module, so it imports little."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from megalith import SGD, Servers, ServerShards, Shards, TableConfig, Zeros
from megalith.shards import ShardsPart

NAMES = (f"tables-{number}" for number in itertools.count())
Make = Callable[..., ServerShards]


def table(name: str = "t", dim: int = 1, lr: Any = 1.0, **options: Any) -> TableConfig:
    """A table that starts at zeros."""
    return TableConfig(name, dim=dim, optimizer=SGD(lr), initializer=Zeros(), **options)


def read(shards: Shards, name: str, *ids: int) -> list[list[float]]:
    found: list[list[float]] = shards.lookup({name: torch.tensor(ids)}).rows[name].tolist()
    return found


def push(shards: Shards, ids: list[int], grads: list[list[float]], step: int = 0, name: str = "t") -> None:
    shards.apply_gradients(shards.lookup({name: torch.tensor(ids)}), {name: torch.tensor(grads)}, step=step)


def nap(part: ShardsPart, seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def where(part: ShardsPart, number: int = 5) -> tuple[int, int, int]:
    return part.index, number, os.getpid()


def work(servers: Servers, options: dict[str, Any]) -> list[list[list[float]]]:
    """Worker 1 of two synchronous ones: two steps."""
    shards = ServerShards([table()], servers=servers, worker=1, **options)
    seen = []
    for step in range(2):
        push(shards, [1], [[2.0]], step)
        seen.append(read(shards, "t", 1))
    return seen


def rows_of(shards: Shards, name: str = "t") -> dict[int, list[Any]]:
    """All rows of a table by id: weights, state, time."""
    found = {}
    for chunk in shards.scan(name, 64):
        columns = [chunk.rows.tolist(), *(x.tolist() for x in chunk.state.values()), chunk.time.tolist()]
        found |= dict(zip(chunk.ids.tolist(), map(list, zip(*columns, strict=True)), strict=True))
    return found
