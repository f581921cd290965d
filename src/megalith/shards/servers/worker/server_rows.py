"""ServerRows: the calls of `ServerShards` that concern rows and counters, and what they run on servers."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.errors import UsageError
from megalith.ops import checks
from megalith.routing import Router
from megalith.shards.contract import Ids, Result, Rows, Shards, check_function, row_shares
from megalith.shards.part import ShardsPart
from megalith.shards.preparer import RoutingPreparer
from megalith.shards.servers.server import touched_ids
from megalith.shards.servers.server.part_counters import part_stats
from megalith.shards.servers.server_messages import (
    Array,
    ServerWrite,
    chunk_arrays,
    chunk_of,
    tensor_of,
)
from megalith.shards.servers.worker.link_group import LinkGroup
from megalith.table import Chunk, MemoryUse, RowCounters, TableStats
from megalith.table.validation import check_flag, check_start

logger = logging.getLogger(__name__)


SCAN_SECONDS = 60.0
"""How long a server keeps rows in their places for the next part of a scan."""


class ServerRows(Shards):
    """See the module. Everything concerns the rows of all servers.

    Attributes:
        routers: The router of each table.
        links: The connections to the servers.
    """

    preparer: RoutingPreparer
    routers: Mapping[str, Router]
    links: LinkGroup

    def router(self, table: str) -> Router:
        self.check_name(table)
        return self.routers[table]

    @property
    def holds_rows(self) -> bool:
        # They are on the servers.
        return False

    def assign(self, rows: Rows, *, time: float | None = None) -> None:
        self._write_rows("assign", rows, time)

    def assign_add(self, rows: Rows, *, time: float | None = None) -> None:
        self._write_rows("assign_add", rows, time)

    def _write_rows(self, kind: str, rows: Rows, time: float | None) -> None:
        header = {"time": self._check_time(time)}
        routed, flat = self.preparer.rows(rows)
        dims = torch.tensor([config.dim for config in self.configs.values()], dtype=torch.int64, device="cpu")
        pieces = flat.split_with_sizes((routed.deduped.counts @ dims).tolist())
        self.links.write_ids(kind, header, routed, {"rows": pieces})

    def _check_time(self, time: float | None) -> int | None:
        return None if time is None else self.latest_time(time)

    def reinitialize(
        self, ids: Ids, *, time: float | None = None, missing_ok: bool = False
    ) -> dict[str, Tensor]:
        routed = self.preparer(ids, missing_ok=missing_ok, distinct=False)
        found = self.links.write_ids("reinitialize", {"time": self._check_time(time)}, routed)
        sizes = routed.deduped.counts.sum(1).tolist()
        if any(part is None and size for part, size in zip(found, sizes, strict=True)):
            raise UsageError("reinitialize: a server applied it, but its result was lost with the server")
        parts = [tensor_of(part) for part in found if part is not None]
        return routed.status(torch.cat([torch.empty(0, dtype=torch.int32, device="cpu"), *parts]), ids)

    def remove(self, ids: Ids) -> dict[str, int]:
        found = [part for part in self.links.write_ids("remove", {}, self.preparer(ids)) if part is not None]
        return {name: sum(part.get(name, 0) for part in found) for name in ids}

    def evict(self, now: float | None = None) -> dict[str, Tensor]:
        # The ids are those of all servers.
        return self._evicted(self.links.write_everywhere("evict", {"time": self.latest_time(now)}))

    def evict_part(self, now: float, *, parts: int, start: float | None = None) -> dict[str, Tensor]:
        # A call visits a part of the rows of every server.
        check_start(start, "evict_part")
        count = checks.integer(parts, "evict_part: parts")
        header = {"time": self.latest_time(now), "parts": count, "start": start}
        return self._evicted(self.links.write_everywhere("evict_part", header))

    def _evicted(self, found: Sequence[Mapping[str, Array]]) -> dict[str, Tensor]:
        return {name: torch.cat([tensor_of(part[name]) for part in found]) for name in self.configs}

    def scan(self, table: str, chunk_size: int = 65536) -> Iterator[Chunk]:
        # For the rows of all servers, server by server.
        #
        # Servers keep rows in their places for `SCAN_SECONDS` after each chunk; a caller that takes longer
        # for a chunk may miss rows that moved meanwhile.
        self.check_name(table)
        size = checks.integer(chunk_size, "scan: chunk_size")
        self.flush()
        return self._scan(table, size)

    def _scan(self, table: str, size: int) -> Iterator[Chunk]:
        scan = random.getrandbits(62)
        for link in self.links:
            at = 0
            while at >= 0:
                arrays, at = link.result(link.run(_scan_part, table, at, size, scan, background=False))
                chunk = chunk_of(arrays)
                try:
                    if chunk.ids.numel():
                        yield chunk
                except GeneratorExit:
                    if at >= 0:
                        link.result(link.run(_end_scan, table, scan, background=False))
                    raise

    def restore(self, table: str, chunk: Chunk) -> None:
        owner = self.router(table)
        checked = self.checks[table].chunk(chunk)
        owners = owner.owner(checked.ids)
        calls = []
        for server, link in enumerate(self.links):
            own = checked.select(owners == server)
            if own.ids.numel():
                write = ServerWrite("restore", {"table": table}, chunk_arrays(own))
                calls.append((link, link.write(write)))
        self.links.results(calls)

    def clear(self) -> None:
        self.links.write_everywhere("clear", {"tables": list(self.configs)})

    def reserve(self, rows: Mapping[str, int]) -> None:
        # `rows` counts the rows of all servers, and each reserves its share.
        self.each_part(_reserve, row_shares(self, rows, len(self.links)))

    def each_part(
        self, function: Callable[..., Result], *args: Any, background: bool = False
    ) -> list[Result]:
        # The function runs on every server, and is sent there.
        check_function(function)
        check_flag(background, "background")
        return self.links.everywhere(lambda link: link.run(function, *args, background=background))

    # ---- touched rows, stats

    def track(self, consumer: str) -> None:
        self.links.write_everywhere("track", {"consumer": checks.text(consumer, "track: consumer")})

    def untrack(self, consumer: str) -> None:
        self.links.write_everywhere("untrack", {"consumer": checks.text(consumer, "untrack: consumer")})

    def drain_touched(self, consumer: str) -> dict[str, tuple[Tensor, Tensor]]:
        # If a server fails, no id is lost: the next drain returns all.
        parts = self.each_part(touched_ids.drain, checks.text(consumer, "drain_touched: consumer"))
        try:
            self.each_part(touched_ids.confirm, consumer)
        except Exception as error:  # other servers have forgotten their ids, so they must be returned
            logger.warning("drain_touched: the next call returns some ids again: %s", error)
        found = {}
        for name in self.configs:
            updated, removed = (torch.cat([tensor_of(part[name][i]) for part in parts]) for i in (0, 1))
            found[name] = updated, removed
        return found

    def mark_touched(self, consumer: str, ids: Ids) -> None:
        name = checks.text(consumer, "mark_touched: consumer")
        self.each_part(touched_ids.check_consumer, name)
        self.links.write_ids("mark", {"consumer": name}, self.preparer(ids))

    def stats(self) -> dict[str, TableStats]:
        # Numbers are summed over the servers.
        parts = self.links.ask(_stats)
        return {name: _joint_stats([part[name] for part in parts]) for name in self.configs}

    def memory(self) -> dict[str, MemoryUse]:
        # Bytes are summed over the servers.
        parts = self.links.ask(_memory)
        fields = MemoryUse.__dataclass_fields__
        return {
            name: MemoryUse(*(sum(getattr(part[name], field) for part in parts) for field in fields))
            for name in self.configs
        }


# ---- what runs on servers


def _scan_part(part: ShardsPart, table: str, at: int, size: int, scan: int) -> tuple[dict[str, Array], int]:
    engine = part.shards.local[table].engine_impl
    engine.keep_places(scan, SCAN_SECONDS)
    chunk, following = engine.scan_part(at, size)
    if following < 0:
        _end_scan(part, table, scan)
    return chunk_arrays(chunk), following


def _end_scan(part: ShardsPart, table: str, scan: int) -> None:
    part.shards.local[table].engine_impl.keep_places(scan, 0.0)


def _reserve(part: ShardsPart, rows: Mapping[str, int]) -> None:
    part.shards.reserve(rows)


def _stats(part: ShardsPart) -> dict[str, TableStats]:
    return part_stats(part)


def _memory(part: ShardsPart) -> dict[str, MemoryUse]:
    return part.shards.memory()


def _joint_stats(parts: Sequence[TableStats]) -> TableStats:
    """Return the numbers of a table that is spread over servers."""
    first = parts[0]
    return TableStats(
        first.name,
        first.engine,
        sum(part.rows for part in parts),
        sum(part.capacity for part in parts),
        any(part.growing for part in parts),
        max(part.epoch for part in parts),
        tuple(dict.fromkeys(name for part in parts for name in part.consumers)),
        RowCounters(*(sum(numbers) for numbers in zip(*(part.counters for part in parts), strict=True))),
    )
