"""Random programs of calls, made from a seed, that two tables run side by side.

Weights that were only looked up, initialised or assigned must be equal to the bit, what an optimizer touched
within 1e-6. It needs neither the native module nor hypothesis, so that a machine with a GPU can run it with
torch and Triton alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith import Table, TableConfig
from megalith.ops import Bags, OutputSlice, Pooling
from tests.table.support import whole as everything

SPECIAL = (0, -1, 2**63 - 1, -(2**63), -0x5BD1E995_27D4EB2F, -0x1B873593_CC9E2D51)
"""Ids at the ends of the range, and the two that equal the reserved keys of the cuda engine's index."""
CALLS = (
    "lookup",
    "pool",
    "update",
    "update",
    "update_pooled",
    "assign",
    "assign_add",
    "reinitialize",
    "remove",
    "restore",
    "drain",
    "mark",
    "snapshot",
    "evict",
)


class Program:
    """Two tables that run the same random calls.

    Args:
        config: The config of both tables.
        seed: Determines the calls.
        engines: The engine under test and the one that defines the results.
        distinct: Number of different ids.
        batch: Largest number of ids of a call.
        calls: The calls to choose from.
        tolerance: Allowed difference of trained weights, relative and absolute.
    """

    def __init__(
        self,
        config: TableConfig,
        seed: int,
        *,
        engines: tuple[str, str] = ("cuda", "reference"),
        distinct: int = 12,
        batch: int = 9,
        calls: Sequence[str] = CALLS,
        tolerance: float = 1e-6,
    ) -> None:
        self.config = config
        self.generator = torch.Generator().manual_seed(seed)
        self.tables = [Table(config, engine=engine, seed=seed % 5) for engine in engines]
        ids = torch.randint(-(2**62), 2**62, (max(1, distinct - len(SPECIAL)),), generator=self.generator)
        self.ids = torch.cat([torch.tensor(SPECIAL), ids])
        self.batch = batch
        self.calls = calls
        self.tolerance = tolerance
        self.trained: set[int] = set()
        self.step = 0
        for table in self.tables:
            table.track("publisher")

    def run(self, calls: int) -> None:
        """Run random calls, then compare the tables."""
        for _ in range(calls):
            name = self.calls[self._integer(len(self.calls))]
            getattr(self, name)()
        self.compare()

    # ---- random input

    def _integer(self, below: int) -> int:
        return int(torch.randint(0, below, (1,), generator=self.generator))

    def _some_ids(self) -> Tensor:
        n = self._integer(self.batch + 1)
        return self.ids[torch.randint(0, self.ids.numel(), (n,), generator=self.generator)]

    def _values(self, *shape: int) -> Tensor:
        """Multiples of 1/64, whose sums are exact in any order."""
        return torch.randint(-128, 129, shape, generator=self.generator).to(torch.float32) / 64

    def _pooling(self, n: int) -> Pooling:
        """One or two features with several parts, gaps, weights and divisors."""
        dim, rows = self.config.dim, 1 + self._integer(4)
        features, begin, width = [], 0, 0
        for _ in range(1 + self._integer(2)):
            inner = 1 + self._integer(2)
            cuts = torch.randint(begin, n + 1, (rows * inner + 1,), generator=self.generator).sort().values
            begin = int(cuts[-1])
            parts = []
            for _ in range(1 + self._integer(2)):
                start = self._integer(dim)
                end = start + 1 + self._integer(dim - start) if self._integer(2) else dim
                parts.append(OutputSlice(0, width, start, end, inner))
                if self._integer(2):
                    parts.append(OutputSlice(0, width, start, end, inner, accumulate=True))
                width += inner * (end - start)
            weights = self._values(n) if self._integer(2) else None
            divisor = 2.0 ** self._values(rows * inner).round() if self._integer(2) else None
            features.append(Bags(cuts, tuple(parts), weights, divisor))
        return Pooling(((rows, width + 1),), {self.config.name: tuple(features)})

    # ---- calls

    def lookup(self) -> None:
        ids = self._some_ids()
        got, expected = (table.lookup(ids) for table in self.tables)
        self._close(got, expected, exact=self.trained.isdisjoint(ids.tolist()))

    def pool(self) -> None:
        ids = self._some_ids()
        pooling = self._pooling(ids.numel())
        got, expected = (table.read(table.find(ids), ids, pooling)[0] for table in self.tables)
        self._close(got, expected, exact=self.trained.isdisjoint(ids.tolist()))

    def update(self) -> None:
        ids = self._some_ids()
        grads = self._values(ids.numel(), self.config.dim)
        clip = (None, 0.5)[self._integer(2)]
        scale = (1.0, -0.5)[self._integer(2)]
        self.step += 1
        for table in self.tables:
            table.update(None, ids, grads, step=self.step, time=self.step, clip_norm=clip, scale=scale)
        self.trained.update(ids.tolist())

    def update_pooled(self) -> None:
        ids = self._some_ids()
        pooling = self._pooling(ids.numel())
        grads = [self._values(*shape) for shape in pooling.outputs]
        self.step += 1
        for table in self.tables:
            rows, epoch = table.find(ids), table.epoch
            table.update(rows, ids, grads, pooling, step=self.step, time=self.step, epoch=epoch)
        self.trained.update(ids.tolist())

    def assign(self) -> None:
        ids = self._some_ids()
        rows = self._values(ids.numel(), self.config.dim) * 0.3
        for table in self.tables:
            table.assign(ids, rows, time=7)
        self.trained.difference_update(ids.tolist())

    def assign_add(self) -> None:
        ids = self._some_ids()
        rows = self._values(ids.numel(), self.config.dim) * 0.3
        for table in self.tables:
            table.assign_add(ids, rows, time=8)

    def reinitialize(self) -> None:
        ids = self._some_ids()
        got, expected = (table.reinitialize(ids, time=9) for table in self.tables)
        assert got.tolist() == expected.tolist()
        self.trained.difference_update(ids.tolist())

    def remove(self) -> None:
        ids = self._some_ids()[:3]
        got, expected = (table.remove(ids) for table in self.tables)
        assert got == expected

    def restore(self) -> None:
        chunks = list(self.tables[self._integer(2)].scan(1 + self._integer(5)))
        if chunks:
            chunk = chunks[self._integer(len(chunks))]
            for table in self.tables:
                table.restore(chunk)

    def drain(self) -> None:
        got, expected = ([sorted(x.tolist()) for x in t.drain_touched("publisher")] for t in self.tables)
        assert got == expected

    def mark(self) -> None:
        ids = self._some_ids()
        for table in self.tables:
            table.mark_touched("publisher", ids)

    def snapshot(self) -> None:
        for table in self.tables:
            with table.snapshot() as snapshot:
                assert sum(chunk.ids.numel() for chunk in snapshot.chunks(3)) == len(table)

    def evict(self) -> None:
        got, expected = (sorted(table.evict(self.step + 3).tolist()) for table in self.tables)
        assert got == expected

    # ---- results

    def compare(self) -> None:
        """Compare ids, times, weights and states."""
        got, expected = (everything(table) for table in self.tables)
        assert got.ids.tolist() == expected.ids.tolist()
        assert got.time.tolist() == expected.time.tolist()
        exact = torch.tensor([id not in self.trained for id in expected.ids.tolist()], dtype=torch.bool)
        self._close(got.rows[exact], expected.rows[exact], exact=True)
        self._close(got.rows, expected.rows, exact=False)
        for key in expected.state:
            self._close(got.state[key], expected.state[key], exact=False)
        assert self.tables[0].stats().counters == self.tables[1].stats().counters
        refused, expected_ids = (table.drain_refused().tolist() for table in self.tables)
        assert refused == expected_ids
        assert len(self.tables[0]) == len(self.tables[1])

    def _close(self, got: Tensor, expected: Tensor, *, exact: bool) -> None:
        if exact:
            assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
        else:
            torch.testing.assert_close(got, expected, rtol=self.tolerance, atol=self.tolerance)
