"""move_tables: copies everything that servers hold to other servers, without a file.

Rows with their optimizer state, counts of admission policies, touched ids, counters of rows, the number of
pushes of each worker and the highest step are copied; the source keeps everything. No worker may write
meanwhile.
"""

from __future__ import annotations

from typing import Any

import torch

from megalith.errors import UsageError
from megalith.shards.part import ShardsPart
from megalith.shards.servers.server.part_counters import part_stats
from megalith.shards.servers.server.touched_ids import pending_ids
from megalith.shards.servers.server_messages import Array, ServerWrite, array_of, tensor_of
from megalith.shards.servers.worker.server_link import ServerLink
from megalith.shards.servers.worker.server_rows import ServerRows


def check_empty(target: ServerRows) -> None:
    """Raise UsageError if tables have rows."""
    found = target.links.everywhere(ServerLink.describe)
    if any(sum(server["rows"].values()) or server["step"] >= 0 for server in found):
        raise UsageError("resize: the new servers have tables under this name already: pass new servers")


def move_tables(source: ServerRows, target: ServerRows) -> int:
    """Copy tables to other servers. With a recovery they are in the logs of those servers, on the disk."""
    numbers = source.links.everywhere(ServerLink.describe)
    for name in source.configs:
        for chunk in source.scan(name):
            target.restore(name, chunk)
        _move_counts(source, target, name)
    for consumer in dict.fromkeys(name for server in numbers for name in server["consumers"]):
        target.track(consumer)
        for part in source.each_part(_touched, consumer):
            target.mark_touched(consumer, {name: tensor_of(ids) for name, ids in part.items()})
    pushes: dict[str, int] = {}
    for server in numbers:
        for worker, count in server["pushes"].items():
            pushes[str(worker)] = max(count, pushes.get(str(worker), 0))
    step = max(server["step"] for server in numbers)
    adopted = {"pushes": pushes, "step": step, "complete": all(server["complete"] for server in numbers)}
    first, *others = target.links
    target.links.results([(link, link.write(ServerWrite("adopt", adopted))) for link in others])
    adopted["counters"] = _moved_counters(source, target)
    target.links.results([(first, first.write(ServerWrite("adopt", adopted)))])  # it ends the move
    return int(step)


def _moved_counters(source: ServerRows, target: ServerRows) -> dict[str, list[int]]:
    """Return what server 0 counts, so that the counters of all servers together do not change."""
    before, now, (first, *_) = source.stats(), target.stats(), target.each_part(_own_counters)
    return {
        name: [a - b + c for a, b, c in zip(stats.counters, now[name].counters, first[name], strict=True)]
        for name, stats in before.items()
    }


def stay(source: ServerRows) -> None:
    """Record that tables are still on their servers, after a move that failed."""
    first, *_ = source.links
    adopted = {"pushes": {}, "step": -1, "complete": False}
    source.links.results([(first, first.write(ServerWrite("adopt", adopted)))])


def _move_counts(source: ServerRows, target: ServerRows, table: str) -> None:
    """Copy how often an admission policy has seen ids without a row."""
    parts = [part for part in source.each_part(_counts, table) if part is not None]
    if not parts:
        return
    ids, counts = (torch.cat([tensor_of(part[i]) for part in parts]) for i in (0, 1))
    owners = target.routers[table].owner(ids)
    calls: list[Any] = []
    for server, link in enumerate(target.links):
        own = owners == server
        arrays = {"ids": array_of(ids[own]), "counts": array_of(counts[own])}
        calls.append((link, link.write(ServerWrite("restore_pending", {"table": table}, arrays))))
    target.links.results(calls)


# ---- what runs on servers


def _own_counters(part: ShardsPart) -> dict[str, list[int]]:
    return {name: list(stats.counters) for name, stats in part_stats(part).items()}


def _counts(part: ShardsPart, table: str) -> tuple[Array, Array] | None:
    if part.shards.configs[table].admission is None:
        return None
    ids, counts = part.shards.local[table].pending()
    return array_of(ids), array_of(counts)


def _touched(part: ShardsPart, consumer: str) -> dict[str, Array]:
    return {name: array_of(ids) for name, ids in pending_ids(part, consumer).items()}
