"""TableNumbers: rows, counters and bytes of all tables of a run, on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields

from megalith.shards import Shards
from megalith.table import HostTierUse, MemoryUse
from megalith.training.run_ranks import RunRanks

_TOTALS = ("created", "removed", "evicted", "refused")
"""The counters of rows that only increase."""


class TableNumbers:
    """See the module. All calls are collective."""

    def __init__(self, shards: Shards, ranks: RunRanks) -> None:
        self._shards = shards
        self._ranks = ranks
        self._before: dict[str, dict[str, int]] = {}
        self._logged: dict[str, HostTierUse] = {}

    def continue_from(self, saved: Mapping[str, Mapping[str, int]] | None) -> None:
        """Continue the counters of a saved run: rows that were loaded are not created again."""
        for name, counts in self.counters().items():
            before = counts if saved is None else saved.get(name, counts)
            self._before[name] = {key: before.get(key, 0) - counts[key] for key in _TOTALS}

    def rows(self) -> dict[str, int]:
        own = {name: stats.rows for name, stats in self._shards.stats().items()}
        everywhere = self._ranks.gather(own)
        return {name: sum(rows[name] for rows in everywhere) for name in own}

    def counters(self) -> dict[str, dict[str, int]]:
        own = {
            name: {key: getattr(each.counters, key) for key in (*_TOTALS, "pending")}
            for name, each in self._shards.stats().items()
        }
        everywhere = self._ranks.gather(own)
        return {
            name: {
                key: sum(rank[name][key] for rank in everywhere) + self._before.get(name, {}).get(key, 0)
                for key in counts
            }
            for name, counts in own.items()
        }

    def host_tier(self) -> dict[str, HostTierUse]:
        own = {name: tuple(each.host_tier) for name, each in self._shards.stats().items() if each.host_tier}
        everywhere = self._ranks.gather(own)
        return {
            name: HostTierUse(
                *(sum(parts) for parts in zip(*(rank[name] for rank in everywhere), strict=True))
            )
            for name in own
        }

    def host_tier_since(self) -> dict[str, dict[str, float]]:
        """Return the numbers of `host_tier` for a line of the log."""
        found = {}
        for name, use in self.host_tier().items():
            before = self._logged.get(name, HostTierUse(0, 0, 0, 0, 0))
            since = HostTierUse(
                *use[:2], *(now - then for now, then in zip(use[2:], before[2:], strict=True))
            )
            found[name] = {**since._asdict(), "hit_rate": since.hit_rate}
            self._logged[name] = use
        return found

    def memory(self) -> dict[str, int]:
        uses = [asdict(use) for use in self._shards.memory().values()]
        own = {part.name: sum(use[part.name] for use in uses) for part in fields(MemoryUse)}
        everywhere = self._ranks.gather(own)
        return {part: sum(rank[part] for rank in everywhere) for part in own}
