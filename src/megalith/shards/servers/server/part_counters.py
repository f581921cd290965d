"""Counters of rows on a server that continue those from before the rows came there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megalith.shards.part import ShardsPart
from megalith.table.table_data import RowCounters, TableStats


def part_stats(part: ShardsPart) -> dict[str, TableStats]:
    """Return numbers about each table, with the counters since the tables were created anywhere."""
    found = part.shards.stats()
    for name, before in part.counted.items():
        counters = RowCounters(*map(sum, zip(found[name].counters, before, strict=True)))
        found[name] = replace(found[name], counters=counters)
    return found


def count_from(part: ShardsPart, counters: Mapping[str, Sequence[int]]) -> None:
    """Continue the counters of tables whose rows were restored on this server."""
    for name, own in part.shards.stats().items():
        if name in counters:
            before = RowCounters(*(a - b for a, b in zip(counters[name], own.counters, strict=True)))
            part.counted[name] = before._replace(pending=0)
