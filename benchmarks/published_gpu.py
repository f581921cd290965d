"""DynamicEmb's published benchmark on one GPU: tables with a capacity, through the public calls.

    python benchmarks/published_gpu.py [--quick] [--only NAME,...] [--output PATH]      (make bench-gpu)

One table of 24 Mi rows, dim 128, float32, `Capacity(rows=24 Mi, score="lru")`, filled to 0.95. A step looks
up ids by a power law of 1.05, reads their rows and updates them; every batch is another one. Published for an
H200 (SGD / Adam, ms; TBE is FBGEMM's static table):

    ids         DynamicEmb     static TBE     eval: DynamicEmb, TBE
    1,048,576   2.46 / 2.56    0.89 / 1.23    0.47, 0.31
    65,536      1.06 / 1.02    0.68 / 0.69    0.15, 0.07

Sections: one (that table; with 1 % new ids; full, with 1 % new ids, so that every step removes rows), ten
(ten tables, dim 128, 1,048,570 ids, with and without a capacity), kernels (time on the GPU of the steps of
one). Times are wall times of many steps in a row, because the host may be slower than the GPU.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gpu_timing import DEVICE, ON_GPU, kernel_ms, power_law, release_memory, wall_ms, with_floors
from gpu_workloads import MI, GpuRun, Sizes, engine_of, step_floors
from harness import progress, run_sections
from torch import Tensor

from megalith import SGD, Adam, Capacity, Optimizer, TableConfig
from megalith.shards import LocalShards

OPTIMIZERS: dict[str, Optimizer] = {"SGD": SGD(0.1), "Adam": Adam(1e-3)}
DIM = 128


@dataclass(frozen=True)
class PublishedSizes(Sizes):
    """Rows of the table, and the bars in ms by number of ids: SGD, Adam, lookup without update."""

    capacity: int = 24 * MI
    bars: tuple[tuple[int, tuple[float, float, float]], ...] = (
        (MI, (0.82, 1.05, 0.23)),
        (65_536, (0.30, 0.35, 0.06)),
    )


SMALL = PublishedSizes(capacity=2 * MI, rounds=2)


class PublishedStep:
    """Some tables, and batches of which each is used once."""

    def __init__(
        self, sizes: Sizes, optimizer: Optimizer, tables: int, ids: int, rows: int, *, limited: bool = True
    ) -> None:
        eviction = (Capacity(rows=rows, score="lru"),) if limited else ()
        self.configs = [
            TableConfig(f"t{k}", dim=DIM, optimizer=optimizer, eviction=eviction) for k in range(tables)
        ]
        self.shards = LocalShards(self.configs, engine="cuda")
        self.n, self.known = ids, int(0.95 * rows)
        self.grads = {c.name: torch.randn(ids, DIM, device=DEVICE) * 1e-3 for c in self.configs}
        self.batches: list[dict[str, Tensor]] = []
        self.count = 0
        self.next_new = 1 << 40

    def fill(self, first: int, last: int) -> None:
        for start in range(first, last + 1, MI):
            ids = torch.arange(start, min(start + MI, last + 1), device=DEVICE)
            for config in self.configs:
                engine_of(self.shards.local[config.name]).find_or_create(ids)

    def make_batches(self, count: int, new: float) -> None:
        """Make batches of which a part of the ids is new, outside of the measurement."""
        fresh = math.ceil(self.n * new)
        self.batches = []
        for _ in range(count):
            batch = {}
            for config in self.configs:
                ids = power_law(self.n, self.known)
                ids[:fresh] = torch.arange(self.next_new, self.next_new + fresh, device=DEVICE)
                self.next_new += fresh
                batch[config.name] = ids[torch.randperm(self.n, device=DEVICE)]
            self.batches.append(batch)

    def step(self) -> None:
        self.count += 1
        lookup = self.shards.lookup(self.batches.pop())
        read = [rows.data_ptr() for rows in lookup.rows.values()]
        assert all(read)
        self.shards.apply_gradients(lookup, self.grads, step=self.count, time=self.count)

    def look_up(self) -> None:
        read = [rows.data_ptr() for rows in self.shards.lookup(self.batches.pop()).rows.values()]
        assert all(read)

    def ms(self, run: GpuRun, new: float = 0.0, *, update: bool = True, rounds: int | None = None) -> float:
        call = self.step if update else self.look_up
        times = []
        for k in range((rounds or run.sizes.rounds) + 1):
            steps = run.sizes.steps if k else run.sizes.warmup
            self.make_batches(steps, new)
            times.append(wall_ms(call, steps))
        return statistics.median(times[1:])


def one(run: GpuRun) -> None:
    """One table, and the price of new ids and of removed rows."""
    sizes = run.sizes
    assert isinstance(sizes, PublishedSizes)
    results = run.sections["one"] = {}
    for number, (name, optimizer) in enumerate(OPTIMIZERS.items()):
        for ids, bars in sizes.bars:
            work = PublishedStep(sizes, optimizer, 1, ids, sizes.capacity)
            work.fill(1, work.known)
            what = f"{ids} ids, {name}"
            known = work.ms(run)
            new = work.ms(run, 0.01, rounds=2)  # more would fill the table
            evals = work.ms(run, update=False)
            work.fill(work.known + 1, sizes.capacity)
            work.fill(-MI // 8, -1)  # full
            full = work.ms(run, 0.01)
            evicted = work.shards.stats()["t0"].counters.evicted
            results[what] = {
                "step_ms": known,
                "step_ms, 1 % new": new,
                "step_ms, full, 1 % new": full,
                "lookup_ms": evals,
                "evicted": evicted,
            }
            run.bar(f"{what}, ms", known, bars[number], at_most=True)
            run.bar(f"{what}, 1 % new / all known", new / known, 1.10, at_most=True)
            run.bar(f"{what}, full with 1 % new / all known", full / known, 1.25, at_most=True)
            run.bar(f"{what}, lookup alone, ms", evals, bars[2], at_most=True)
            progress(f"{what}: {results[what]}")
            del work
            release_memory()


def ten(run: GpuRun) -> None:
    """Ten tables without and with a capacity."""
    sizes = run.sizes
    assert isinstance(sizes, PublishedSizes)
    results = run.sections["ten"] = {}
    for limited in (False, True):
        for name, optimizer in OPTIMIZERS.items():
            rows = sizes.capacity // sizes.tables
            work = PublishedStep(sizes, optimizer, sizes.tables, sizes.table_ids, rows, limited=limited)
            work.fill(1, work.known)
            what = f"10 tables, {name}{', capacity' if limited else ''}"
            known, new = work.ms(run), work.ms(run, 0.01, rounds=2)
            results[what] = {"step_ms": known, "step_ms, 1 % new": new}
            barred = name == "Adam" and not limited
            run.bar(f"{what}, ms", known, 0.85 if barred else None, at_most=True)
            run.bar(f"{what}, 1 % new, ms", new, 0.95 if barred else None, at_most=True)
            progress(f"{what}: {results[what]}")
            del work
            release_memory()


def kernels(run: GpuRun) -> None:
    """Time on the GPU of the kernels of a step of `one`, all ids known, and full with 1 % new ids."""
    sizes = run.sizes
    assert isinstance(sizes, PublishedSizes)
    results = run.sections["kernels"] = {}
    for name, optimizer in OPTIMIZERS.items():
        for ids, _ in sizes.bars:
            work = PublishedStep(sizes, optimizer, 1, ids, sizes.capacity)
            work.fill(1, work.known)
            for label, new in (("", 0.0), (", full, 1 % new", 0.01)):
                if new:
                    work.fill(work.known + 1, sizes.capacity)
                    work.fill(-MI // 8, -1)
                work.make_batches(sizes.warmup + sizes.profiled + 1, new)
                wall_ms(work.step, sizes.warmup)
                distinct = work.batches[0]["t0"].unique().numel()
                floors = step_floors(run, ids, distinct, DIM, work.configs[0].row_floats)
                found = kernel_ms(work.step, sizes.profiled)
                what = f"{ids} ids, {name}{label}"
                results[what] = {"all_ms": sum(found.values()), "kernels": with_floors(found, floors)}
                run.bar(f"{what}, GPU ms", sum(found.values()), at_most=True)
                progress(f"{what}: GPU {sum(found.values()):.3f} ms, floor {floors['all']:.3f}")
            del work
            release_memory()


SECTIONS = {"one": one, "ten": ten, "kernels": kernels}


def main(arguments: Sequence[str]) -> None:
    if not ON_GPU and not {"-h", "--help"} & set(arguments):
        sys.exit("published_gpu.py needs a CUDA GPU")

    def start(quick: bool) -> GpuRun:
        return GpuRun(quick, SMALL if quick else PublishedSizes())

    run_sections("published_gpu", arguments, start, SECTIONS, ("torch", "triton"))


if __name__ == "__main__":
    main(sys.argv[1:])
