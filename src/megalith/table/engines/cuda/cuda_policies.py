"""The policies of the cuda engine: which new ids get a row, and which rows are removed for them.

Decisions are those of the other engines. Kernels admit ids (admission_kernels.py) and keep a `Capacity` with
a named score (victim_kernels.py), so the host does not learn how many rows an update creates and removes.
They write removed and refused ids to rings on the device. The host takes them when somebody asks, or when a
ring may be full. Only these updates wait for the device: of a full table whose score is a function, or that
has none; of one that counts `MinCount.max_ids` ids; and with more ids than a full table may have rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalith.errors import TableFullError
from megalith.table.engines.cuda.device_functions import COUNTED, CREATED, EVICTED, REFUSED
from megalith.table.engines.cuda.streams import retire
from megalith.table.engines.reference_policies import AdmissionState, IdLog
from megalith.table.engines.shard_capacity import make_room
from megalith.table.policies import MinCount
from megalith.table.table_data import RowCounters

if TYPE_CHECKING:
    from megalith.table.engines.cuda.engine import CudaEngine

LAST_NUMBER = 1 << 30  # Numbers of counted ids start again after this one, if there are not as many


class CudaPolicies:
    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine
        config, limits = engine.config, engine.limits
        # Whether the host removes rows, or raises, if there are too many.
        self.by_host = config.capacity is not None and not engine.table.row_limit
        self.evicted_log, self.refused_log = IdLog(limits.log_ids), IdLog(limits.log_ids)
        self.removed = 0
        self._evicted = 0  # by the host
        self._dropped = 0
        self._taken = [0, 0]  # removed and refused ids that were taken from the rings
        self._numbers_left = LAST_NUMBER

    # ---- decisions of the host

    def admits(self, ids: Tensor, seen: Tensor, step: int) -> Tensor:
        """Return which ids without a row an update would admit, bool [n]. Waits for the device."""
        # ids: int64 [n], distinct; seen: number of occurrences of each, int64 [n].
        engine = self._engine
        state = AdmissionState(engine.config.admission, engine.table.key, engine.limits.counted_ids, 1)
        if engine.config.admission is not None:
            state.counts = dict(zip(*(column.tolist() for column in engine.pending()), strict=True))
        return state.admits(ids.cpu(), seen.cpu(), step).to(engine.device)

    def make_room(
        self, ids: Tensor, wanted: Tensor | None = None, seen: Tensor | None = None, step: int | None = None
    ) -> None:
        """Remove rows so that new ids fit, none that belongs to the call; kernels do so for named scores."""
        # ids: int64 [n], all ids of the call; wanted: int8 [n], which of them count; seen: int64 [n], how
        # many each stands for; step: of an update, None for calls that admit all ids.
        engine = self._engine
        capacity, limit = engine.config.capacity, engine.row_limit
        if capacity is None or limit is None or not ids.numel() or engine.most_rows + ids.numel() <= limit:
            return
        if not self.by_host and ids.numel() <= limit:
            return
        found = engine.group.find(ids, [ids.numel()]).rows
        missing = found < 0 if wanted is None else (found < 0) & (wanted != 0)
        distinct, where = first_occurrences(ids[missing])
        new = distinct.numel()
        if step is not None and new and engine.config.admission is not None:
            each = torch.ones_like(where) if seen is None else seen.to(ids.device)[missing]
            total = torch.zeros_like(distinct).index_add_(0, where, each)
            new = int(self.admits(distinct, total, step).sum())
        need = len(engine) + new - limit
        if not new or need <= 0:
            return
        if callable(capacity.score):
            make_room(engine, ids.cpu(), new)
            need = len(engine) + new - limit
        kept = torch.unique(found[found >= 0]).numel()
        if need > 0 and (self.by_host or len(engine) - kept < need):
            raise TableFullError(
                f"table {engine.name!r} holds {len(engine)} rows and needs {new} more, but its Capacity is "
                f"{limit} rows"
            )

    # ---- before and after launches

    def expect(self, n: int) -> None:
        """Prepare for launches that may remove or refuse up to n ids; after room was made for as many."""
        engine, table = self._engine, self._engine.table
        known_at = table.known_at
        if table.row_limit and table.most_rows > table.row_limit:
            engine.advance_epoch()
            if table.most_evicted - self._taken[0] > table.evicted_log.numel():
                table.evicted_log = self._larger(table.evicted_log, n, everything=engine.consumers)
        if table.admits:
            if table.most_refused - self._taken[1] > table.refused_log.numel():
                table.refused_log = self._larger(table.refused_log, n, everything=False)
            self._numbers_left -= n
            if self._numbers_left < 0:
                table.set_counted(*self._pending())
                self._numbers_left = LAST_NUMBER - table.most_counted
        if table.known_at != known_at:
            table.ensure_room(n)  # the rows were counted, and the bound has lost those of this call

    def _larger(self, ring: Tensor, n: int, *, everything: bool) -> Tensor:
        """Return a ring in which the ids of some more calls fit; without `everything` the latest suffice."""
        table, most = self._engine.table, self.evicted_log.most
        room = min(most, max(n, 4 * ring.numel()))
        if everything or ring.numel() < room:
            self.collect()
        if everything:
            room = max(room, 8 * n)
        if room <= ring.numel():
            return ring
        retire(ring)
        table.changed()
        return torch.empty(room, dtype=torch.int64, device=ring.device)

    def limit_counted(self) -> None:
        """Drop the ids that were counted first, beyond those that may be counted; after the launches."""
        table, most = self._engine.table, self._engine.limits.counted_ids
        if not most or table.most_counted <= most:
            return
        excess = table.read_counters()[COUNTED.value] - most
        if excess > 0:
            table.drop_counted(table.counted_ids()[0][:excess].contiguous())
            self._dropped += excess

    def collect(self) -> None:
        """Take the ids that kernels removed and refused. Waits for the device."""
        engine, table = self._engine, self._engine.table
        if not table.row_limit and not table.admits:
            return
        values = table.read_counters()
        rings = (table.evicted_log, self.evicted_log), (table.refused_log, self.refused_log)
        for k, ((ring, log), total) in enumerate(
            zip(rings, (values[EVICTED.value], values[REFUSED.value]), strict=True)
        ):
            count = min(total - self._taken[k], ring.numel())
            if count:
                places = torch.arange(total - count, total, device=engine.device) % ring.numel()
                ids = ring[places].cpu()
                log.lost += total - self._taken[k] - count
                log.add(ids.tolist())
                if k == 0:
                    engine.note_removed(ids)
            self._taken[k] = total

    def evict(self, ids: Tensor) -> None:
        """Log ids that the host removed, int64 [n] on the CPU."""
        self.collect()
        self._evicted += ids.numel()
        self.evicted_log.add(ids.tolist())

    # ---- counts of ids without a row

    def _pending(self) -> tuple[Tensor, Tensor]:
        ids, values = self._engine.table.counted_ids()
        return ids, (-2 - values) & 0xFFFFFFFF

    def pending(self) -> tuple[Tensor, Tensor]:
        if not isinstance(self._engine.config.admission, MinCount):
            none = torch.empty(0, dtype=torch.int64, device="cpu")
            return none, none
        ids, counts = self._pending()
        return ids.cpu(), counts.cpu()

    def count(self, ids: Tensor, counts: Tensor) -> None:
        """Add counts of ids without a row, int64 [n] each."""
        engine = self._engine
        if isinstance(engine.config.admission, MinCount):
            state = AdmissionState(engine.config.admission, 0, engine.limits.counted_ids, 1)
            state.counts = dict(zip(*(column.tolist() for column in self.pending()), strict=True))
            for id, number in zip(ids.tolist(), counts.tolist(), strict=True):
                state.count(id, number)
            self._dropped += state.dropped
            columns = list(state.counts), list(state.counts.values())
            engine.table.set_counted(
                *(torch.tensor(x, dtype=torch.int64, device=engine.device) for x in columns)
            )

    def counters(self, values: list[int]) -> RowCounters:
        # values: the counters of the table.
        evicted, refused = values[EVICTED.value], values[REFUSED.value]
        return RowCounters(
            created=values[CREATED.value],
            removed=self.removed,
            evicted=self._evicted + evicted,
            refused=refused,
            pending=values[COUNTED.value],
            pending_dropped=self._dropped,
            log_lost=self.evicted_log.lost_with(evicted - self._taken[0])
            + self.refused_log.lost_with(refused - self._taken[1]),
        )

    def memory(self) -> int:
        """Return the bytes of logs and candidates; counted ids are in the index."""
        search, table = self._engine.score_search, self._engine.table
        logs = 8 * (len(self.evicted_log) + len(self.refused_log))
        logs += 8 * table.evicted_log.numel() if table.row_limit else 0
        logs += 8 * table.refused_log.numel() if table.admits else 0
        return logs + (0 if search is None else search.bytes)


def first_occurrences(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Find the distinct ids in the order of their first occurrences."""
    # ids: int64 [n]; returns: the distinct ids, int64 [u], and for each id its position among them, int64
    # [n].
    distinct, inverse = torch.unique(ids, return_inverse=True)
    positions = torch.arange(ids.numel(), device=ids.device)
    first = torch.full_like(distinct, ids.numel()).scatter_reduce_(0, inverse, positions, "amin")
    order = torch.argsort(first)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=ids.device)
    return distinct[order], rank[inverse]


def last_of_each(rows: Tensor) -> Tensor:
    """Replace all but the last occurrence of each number by -1. Does not wait for the device."""
    # rows: int32 [n].
    ordered, order = torch.sort(rows, stable=True)
    ends = torch.ones_like(ordered, dtype=torch.bool)
    ends[:-1] = ordered[1:] != ordered[:-1]
    return torch.empty_like(rows).index_copy_(0, order, torch.where(ends, ordered, -1))
