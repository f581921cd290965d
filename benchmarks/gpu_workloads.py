"""The workloads of table_gpu.py: their sizes, batches and steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from typing import Any

import torch
from gpu_timing import DEVICE, ON_GPU, bus_speed, copy_speed, power_law, release_memory, wall_ms
from harness import Run, progress
from torch import Tensor, nn

from megalith import Adagrad, EmbeddingCollection, Feature, Layout, Optimizer, Slice, Table, TableConfig
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.shards import LocalShards
from megalith.table.engines.cuda.engine import CudaEngine

MI = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """The sizes of the workloads, and how often a step runs before and during a measurement."""

    slots: int = 64 * MI
    tables: int = 10
    table_ids: int = 104_857
    id_range: int = 10_000_000
    features: int = 26
    batch: int = 65_536
    feature_rows: int = 1_000_000
    host_rows: int = 16 * MI
    host_ids: int = MI
    scan_rows: int = 4 * MI
    copy_bytes: int = 1 << 30
    warmup: int = 8
    steps: int = 40
    rounds: int = 5
    profiled: int = 6


SMALL = Sizes(slots=4 * MI, host_rows=MI, scan_rows=MI // 4, rounds=2)


class GpuRun(Run):
    """The speeds of the machine, which several sections use."""

    def __init__(self, quick: bool, sizes: Sizes | None = None) -> None:
        super().__init__(quick)
        self.sizes = sizes or (SMALL if quick else Sizes())
        self.copy_tb_per_s = copy_speed(self.sizes.copy_bytes)
        release_memory()
        name = torch.cuda.get_device_name() if ON_GPU else "none"
        self._facts = {"gpu": name, "copy_tb_per_s": self.copy_tb_per_s}
        progress(f"{name}, copy {self.copy_tb_per_s:.2f} TB/s")

    @cached_property
    def bus(self) -> dict[str, float]:
        """Speeds of pinned copies, measured when a section first asks."""
        found = bus_speed(self.sizes.copy_bytes // 4)
        self._facts |= {"bus": found}
        return found

    def floor_ms(self, moved: float) -> float:
        """The time that bytes need at the speed of a copy."""
        return moved / self.copy_tb_per_s / 1e9

    def facts(self) -> dict[str, Any]:
        return self._facts


def engine_of(table: Table) -> CudaEngine:
    engine = table.engine_impl
    assert isinstance(engine, CudaEngine)
    return engine


def with_new(ids: dict[str, Tensor], part: float, count: int) -> dict[str, Tensor]:
    """Ids of which a part is replaced by ids that no other count has."""
    found = {}
    for name, own in ids.items():
        fresh = math.ceil(own.numel() * part)
        found[name] = torch.cat([own[fresh:], torch.arange(fresh, device=DEVICE) + (count << 32)])
    return found


class Batches:
    """The batches of a step: some in turns, and batches with new ids, each of which is used once.

    Those are made before a measurement, so that it does not include making them.
    """

    def __init__(self, batches: list[dict[str, Tensor]]) -> None:
        self.known = batches
        self._count = 0
        self._new: list[dict[str, Tensor]] = []

    def make_new(self, part: float, count: int) -> None:
        """Makes batches of which a part of the ids is new; none if the part is 0."""
        first = self._count
        self._new = [with_new(self.known[k % 4], part, first + k + 1) for k in range(count)] if part else []

    def __next__(self) -> dict[str, Tensor]:
        self._count += 1
        return self._new.pop() if self._new else self.known[self._count % 4]


def step_ms(work: SparseStep | PooledModel, steps: int, new: float = 0.0) -> float:
    """The wall time of a step; a part of its ids is new."""
    work.batches.make_new(new, steps)
    return wall_ms(work.step, steps)


class SparseStep:
    """DynamicEmb's workload: 10 tables, dim 128, 1,048,570 ids by a power law, no pooling."""

    dim = 128

    def __init__(self, sizes: Sizes, optimizer: Optimizer, deterministic: bool) -> None:
        n, dim = sizes.table_ids, self.dim
        self.configs = [
            TableConfig(f"t{i}", dim=dim, optimizer=optimizer, deterministic=deterministic)
            for i in range(sizes.tables)
        ]
        self.shards = LocalShards(self.configs, engine="cuda")
        offsets = torch.arange(n + 1, device=DEVICE)
        bags = {
            c.name: (Bags(offsets, (OutputSlice(i, 0, 0, dim),), first=0),)
            for i, c in enumerate(self.configs)
        }
        self.pooling = Pooling(((n, dim),) * sizes.tables, bags)
        self.grads = [torch.randn(n, dim, device=DEVICE) * 1e-3 for _ in self.configs]
        self.batches = Batches(
            [{c.name: power_law(n, sizes.id_range) for c in self.configs} for _ in range(4)]
        )
        self.count = 0

    def step(self) -> None:
        self.count += 1
        lookup = self.shards.lookup(next(self.batches))
        lookup.pool(self.pooling)
        self.shards.apply_gradients(lookup, self.grads, step=self.count, pooling=self.pooling)

    def floors(self, run: GpuRun) -> dict[str, float]:
        """The memory floor of the step in all, and of its largest kernels."""
        ids = self.batches.known[0].values()
        n, distinct = sum(own.numel() for own in ids), sum(own.unique().numel() for own in ids)
        return step_floors(run, n, distinct, self.dim, self.configs[0].row_floats)


def step_floors(run: GpuRun, n: int, distinct: int, dim: int, row_floats: int) -> dict[str, float]:
    """Each id is looked up once; each gradient is read once; each distinct row is read and written once."""
    moved = {"find_rows": n * (8 + 32 + 4), "place_rows": n * (4 + 8 * dim)}
    moved["walk_chunks"] = n * 4 * dim + distinct * 8 * row_floats
    return {name: run.floor_ms(size) for name, size in {**moved, "all": sum(moved.values())}.items()}


class PooledModel:
    """26 features of 1 M rows, dim 64, Adagrad, batch 65,536, MLP 512-256-1 with fused Adam, TF32."""

    dim = 64

    def __init__(self, sizes: Sizes, deterministic: bool) -> None:
        torch.backends.cuda.matmul.allow_tf32 = True
        features, dim, self.rows = sizes.features, self.dim, sizes.feature_rows
        configs = [
            TableConfig(f"t{i}", dim=dim, optimizer=Adagrad(0.01), deterministic=deterministic)
            for i in range(features)
        ]
        self.row_floats = configs[0].row_floats
        names = [f"f{i}" for i in range(features)]
        self.collection = EmbeddingCollection(
            configs,
            [Feature(name, f"t{i}") for i, name in enumerate(names)],
            layouts=[Layout("x", [Slice(name, 0, dim) for name in names])],
            engine="cuda",
        )
        every = torch.arange(1, self.rows + 1, device=DEVICE)
        for table in self.collection.tables.values():
            for part in every.split(MI // 4):
                engine_of(table).find_or_create(part)
        self.batches = Batches(
            [{name: power_law(sizes.batch, self.rows) for name in names} for _ in range(4)]
        )
        self.mlp = nn.Sequential(
            nn.Linear(features * dim, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        ).to(DEVICE)
        self.dense = torch.optim.Adam(self.mlp.parameters(), fused=True)
        self.label = torch.rand(sizes.batch, 1, device=DEVICE)
        self.given = torch.randn(sizes.batch, features * dim, device=DEVICE, requires_grad=True)

    def train(self, x: Tensor) -> None:
        nn.functional.binary_cross_entropy_with_logits(self.mlp(x), self.label).backward()
        self.dense.step()
        self.dense.zero_grad()

    def step(self) -> None:
        self.train(self.collection(next(self.batches))["x"])

    def mlp_alone(self) -> None:
        self.given.grad = None
        self.train(self.given)

    def floors(self, run: GpuRun) -> dict[str, float]:
        ids = self.batches.known[0].values()
        n, distinct = sum(own.numel() for own in ids), sum(own.unique().numel() for own in ids)
        return step_floors(run, n, distinct, self.dim, self.row_floats)

    def free_tables(self) -> None:
        self.collection.shards.clear()
        release_memory()

    def many_bags_ms(self, steps: int) -> float:
        """One nn.EmbeddingBag per feature, with torch's Adagrad."""
        names, size = list(self.batches.known[0]), self.label.shape[0]
        bags = nn.ModuleList(
            nn.EmbeddingBag(self.rows + 1, self.dim, mode="sum", sparse=True, device=DEVICE) for _ in names
        )
        optimizer = torch.optim.Adagrad(bags.parameters(), lr=0.01)
        each = torch.arange(size, device=DEVICE)
        chosen = cycle(self.batches.known)

        def one() -> None:
            batch = next(chosen)
            self.train(torch.cat([bag(batch[name], each) for name, bag in zip(names, bags, strict=True)], 1))
            optimizer.step()
            optimizer.zero_grad()

        one()
        return wall_ms(one, steps)

    def one_bag_ms(self, steps: int) -> float:
        """One nn.EmbeddingBag for all features, with torch's Adagrad."""
        count, size, dim = len(self.batches.known[0]), self.label.shape[0], self.dim
        bag = nn.EmbeddingBag(count * (self.rows + 1), dim, mode="sum", sparse=True, device=DEVICE)
        optimizer = torch.optim.Adagrad(bag.parameters(), lr=0.01)
        every = torch.arange(size * count, device=DEVICE)
        shift = torch.arange(count, device=DEVICE) * (self.rows + 1)
        chosen = cycle(
            (torch.stack(list(batch.values()), 1) + shift).reshape(-1) for batch in self.batches.known
        )

        def one() -> None:
            self.train(bag(next(chosen), every).view(size, count * dim))
            optimizer.step()
            optimizer.zero_grad()

        one()
        return wall_ms(one, steps)
