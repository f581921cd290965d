"""Growth of the cpu table: how long a call stalls while the index grows, and the memory it needs.

Rows are small (dim 1 or 3, SGD), so that the index, which grows, is most of the table. Ids are random and
new. On a virtual machine the first write to a page may wait for the host, which is independent of growth,
so stalls are measured twice: on memory that the host has already provided (the target) and on fresh memory.
"""

from __future__ import annotations

import mmap
import statistics
import time

import torch
from harness import progress, resident_bytes
from workloads import random_keys

from megalith.table import SGD, Table, TableConfig

CALL = 16384
CALM = 50


def warm_memory(size: int) -> None:
    """Writes and frees memory on huge pages, so that the host already provides the next allocation."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    for page in range(0, size, mmap.PAGESIZE):
        block[page] = 1
    block.close()


class Inserter:
    """A table and new ids for it; times each call that inserts some."""

    def __init__(self, rows: int, dim: int) -> None:
        self.keys = random_keys(rows + rows // 2, seed=3)
        self.resident_before = resident_bytes()
        self.table = Table(TableConfig("t", dim=dim, optimizer=SGD(lr=0.1)), engine="cpu")
        # reserve() allocates a fifth more: growth then starts when `rows` ids are present.
        self.reserved = int(rows / 1.2)
        self.table.reserve(self.reserved)
        self.at = 0

    @property
    def growing(self) -> bool:
        return self.table.stats().growing

    def warm(self) -> None:
        """Warms the memory that a growth needs: the new index and the rows inserted during it."""
        warm_memory(80 * self.keys.numel())

    def insert(self, n: int = CALL) -> float:
        """Measures the CPU seconds of a call with n new ids."""
        ids = self.keys[self.at : self.at + n]
        self.at += n
        rows = torch.zeros(n, self.table.dim)
        start = time.thread_time()
        self.table.assign(ids, rows, time=1)
        return time.thread_time() - start


def growth_stall(rows: int, warm: bool, runs: int) -> dict[str, float]:
    """Measures the longest call while the index grows, minus a normal call; and the one-shot rebuild.

    Every run does the same work in each call, so the time of a call is the median over the runs.
    """
    calm: list[float] = []
    growing: list[list[float]] = []
    rebuilds = []
    for _ in range(runs):
        inserter = Inserter(rows, dim=1)
        inserter.insert(rows - (CALM + 2) * CALL)
        if warm:
            inserter.warm()
        while not inserter.growing:
            calm.append(inserter.insert())
        growing.append([calm.pop()])
        while inserter.growing:
            growing[-1].append(inserter.insert())
        num_rows = inserter.at
        del inserter
        rebuilds.append(rebuild(rows, warm))
    usual = statistics.median(calm)
    calls = [statistics.median(times) for times in zip(*growing, strict=True)]
    record = {
        "rows_at_start": num_rows - CALL * len(calls),
        "rows_at_end": num_rows,
        "calls": len(calls),
        "runs": runs,
        "usual_call_ms": usual * 1e3,
        "median_stall_ms": (statistics.median(calls) - usual) * 1e3,
        "longest_stall_ms": (max(calls) - usual) * 1e3,
        "longest_stall_of_any_run_ms": (max(map(max, growing)) - usual) * 1e3,
        "rebuild_ms": statistics.median(rebuilds) * 1e3,
        "ratio": (max(calls) - usual) / statistics.median(rebuilds),
    }
    progress("  " + ", ".join(f"{k} {v:.4g}" for k, v in record.items()))
    return record


def rebuild(rows: int, warm: bool) -> float:
    """Measures the CPU seconds to move the index of `growth_stall` to one 1.4 times larger."""
    inserter = Inserter(rows, dim=1)
    inserter.insert(rows - CALL)
    assert not inserter.growing
    if warm:
        inserter.warm()
    before = inserter.table.memory().index
    start = time.thread_time()
    inserter.table.reserve(int(inserter.reserved * 1.4))
    seconds = time.thread_time() - start
    assert inserter.table.memory().index > 1.3 * before
    return seconds


def memory_after_growth(rows: int, dim: int) -> dict[str, float]:
    """Measures bytes per row just after a growth, by the table's own count and by the resident set."""
    inserter = Inserter(rows, dim)
    table = inserter.table
    while not inserter.growing:
        inserter.insert()
    # With few ids per call the growth ends with the fewest rows, so with the most index bytes per row.
    peak = 0.0
    while inserter.growing:
        inserter.insert(16)
        peak = max(peak, beyond(table))
    n, use = len(table), table.memory()
    record = {
        "rows": n,
        "row_bytes": use.rows / n,
        "index_bytes": use.index / n,
        "side_bytes": use.side / n,
        "beyond_weights_and_state": beyond(table),
        "beyond_at_most_while_growing": peak,
        "resident_bytes": (resident_bytes() - inserter.resident_before) / n,
    }
    progress(f"  dim {dim}: " + ", ".join(f"{k} {v:.4g}" for k, v in record.items()))
    return record


def beyond(table: Table) -> float:
    """Returns bytes per row in addition to weights and optimizer state."""
    needed = len(table) * 4 * table.config.row_floats
    return (table.memory().total - needed) / len(table)
