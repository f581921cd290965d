"""Tables of different dims on one GPU: one set of launches for all of them, or one per dim.

    python benchmarks/mixed_dims_gpu.py [--quick] [--only NAME] [--output PATH]

26 tables of 200,000 rows of dims 36, 48, 56 and 64 in turns, Adagrad, one id per feature and row of a batch,
drawn by a power law. A step looks the ids up, concatenates the outputs and updates the rows with a given
gradient; the model has no dense part. Three variants take turns in one process:

    together     all tables share launches, because their padded dims are equal
    by dim       tables share launches only if their dims are equal (four sets)
    all 64       the same number of tables, all of dim 64, so that the kernels have all numbers as constants

Wall time is that of many steps in a row, GPU time the sum of the kernels. Two batches are measured: with a
small one the host is the limit, with a large one the memory of the GPU.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from unittest import mock

import torch
from gpu_timing import DEVICE, ON_GPU, kernel_ms, power_law, release_memory, wall_ms
from harness import Run, progress, run_sections

from megalith import Adagrad, EmbeddingCollection, Feature, Layout, Slice, TableConfig
from megalith.table.engines.cuda import engine_group
from megalith.table.engines.cuda.engine import CudaEngine

DIMS = (36, 48, 56, 64)
BATCHES = (4_096, 65_536)


class Step:
    """A step of 26 tables."""

    def __init__(self, dims: Sequence[int], batch: int, rows: int) -> None:
        names = [f"t{k}" for k in range(len(dims))]
        self.collection = EmbeddingCollection(
            [TableConfig(n, dim=d, optimizer=Adagrad(0.01)) for n, d in zip(names, dims, strict=True)],
            [Feature(n, n) for n in names],
            layouts=[Layout("x", [Slice(n, 0, d) for n, d in zip(names, dims, strict=True)])],
            engine="cuda",
        )
        for table in self.collection.tables.values():
            engine = table.engine_impl
            assert isinstance(engine, CudaEngine)
            for part in torch.arange(1, rows + 1, device=DEVICE).split(1 << 18):
                engine.find_or_create(part)
        self.batches = [{n: power_law(batch, rows) for n in names} for _ in range(4)]
        self.grad = torch.randn(batch, sum(dims), device=DEVICE) * 1e-3
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        self.collection(self.batches[self.count % 4])["x"].backward(self.grad)


def by_dim(layout: object) -> object:
    """The kind of a table, with its exact dim."""
    return KIND(layout), layout.dim  # type: ignore[arg-type,attr-defined]


KIND = engine_group.launch_kind


def measure(run: Run, batch: int) -> None:
    tables, rows, steps, rounds = (26, 200_000, 40, 7) if ON_GPU and not run.quick else (4, 2_000, 2, 1)
    dims = [DIMS[k % len(DIMS)] for k in range(tables)]
    variants = {"together": Step(dims, batch, rows), "all 64": Step([64] * tables, batch, rows)}
    with mock.patch.object(engine_group, "launch_kind", by_dim):
        variants["by dim"] = Step(dims, batch, rows)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for step in variants.values():
        wall_ms(step, 8)
    for _ in range(rounds):
        for name, step in variants.items():
            times[name].append(wall_ms(step, steps))
    results = run.sections[f"batch {batch}"] = {
        name: {"wall_ms": statistics.median(own), "kinds": _kinds(variants[name])}
        for name, own in times.items()
    }
    for name, step in variants.items():
        kernels = kernel_ms(step, 6)
        results[name] |= {"gpu_ms": sum(kernels.values()), "kernels": dict(list(kernels.items())[:8])}
        progress(f"batch {batch}, {name}: {results[name]}")
    for number in ("wall_ms", "gpu_ms"):
        one, other = results["by dim"][number], results["together"][number]
        run.bar(f"batch {batch}, by dim / together, {number}", one / other if other else float("nan"))
    variants.clear()
    release_memory()


def _kinds(step: Step) -> int:
    group = step.collection.shards.engines  # type: ignore[union-attr]
    return len(group._shared)


SECTIONS = {f"batch{batch}": lambda run, batch=batch: measure(run, batch) for batch in BATCHES}


def main(arguments: Sequence[str]) -> None:
    if not ON_GPU and not {"-h", "--help"} & set(arguments):
        sys.exit("mixed_dims_gpu.py needs a CUDA GPU")
    run_sections("mixed_dims_gpu", arguments, Run, SECTIONS, ("torch", "triton"))


if __name__ == "__main__":
    main(sys.argv[1:])
