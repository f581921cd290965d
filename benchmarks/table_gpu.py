"""The cuda engine on one GPU: find and gather, the sparse step, a pooled model, rows in host memory, scans.

    python benchmarks/table_gpu.py [--quick] [--only NAME,...] [--output PATH]      (make bench-gpu)

Sections: find, step, pooled, host, scan, and kernels, which adds up the kernels of step and pooled as torch's
profiler reports them. It comes last, because every launch takes longer after the profiler has run in a
process. Method: medians of triton.testing.do_bench, which empties the cache before each call, for single
calls; wall time of many steps in a row for whole steps, because the host may be slower than the GPU. Memory
floors are the bytes that must move, at the speed of a copy on the GPU. All ids are in the tables, unless a
line says "1 % new". "fast" is `deterministic=False`. A full run saves results/table_gpu-DATE.json. It needs
torch and Triton, not the native module.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from gpu_timing import (
    DEVICE,
    ON_GPU,
    kernel_ms,
    median_ms,
    power_law,
    release_memory,
    row_of_calls_ms,
    synchronize,
    wall_ms,
    with_floors,
)
from gpu_workloads import (
    MI,
    GpuRun,
    PooledModel,
    SparseStep,
    engine_of,
    step_ms,
    with_new,
)
from harness import progress, run_sections
from torch import Tensor

from megalith import (
    SGD,
    Adagrad,
    Adam,
    Optimizer,
    Table,
    TableConfig,
)
from megalith.table.engines.cuda.engine import CudaEngine

OPTIMIZERS: dict[str, Optimizer] = {"Adam": Adam(1e-3), "SGD": SGD(0.1)}
COLUMNS = {"": True, ", fast": False}


# ---- find


def find(run: GpuRun) -> None:
    """Find and read rows of an index that is half full; then find or insert, half of the ids new."""
    slots, n = run.sizes.slots, run.sizes.slots // 64
    results = run.sections["find"] = {"slots": slots, "ids": n}
    for dim, bar in ((16, 9.0), (64, 5.0), (128, 3.2)):
        table = Table(TableConfig("t", dim=dim, optimizer=SGD(0.1)), engine="cuda")
        engine = engine_of(table)
        table.reserve(slots * 5 // 8)
        ids = torch.randint(-(2**62), 2**62, (slots // 2,), device=DEVICE)
        for part in ids.split(slots // 8):
            engine.find_or_create(part)
        assert engine.table.slots == slots
        wanted = ids[torch.randint(0, ids.numel(), (n,), device=DEVICE)]
        out, group = torch.empty(n, dim, device=DEVICE), engine.group
        found = group.find(wanted, [n])
        assert bool((found.rows >= 0).all())
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "find + gather": (lambda g=group, w=wanted, o=out: g.read(w, None, [n], o), 8 + 32 + 8 * dim),
            "find": (lambda g=group, w=wanted: g.find(w, [n]), 8 + 32 + 4),
            "gather": (lambda g=group, w=wanted, f=found, o=out: g.read(w, f, [n], o), 4 + 8 * dim),
        }
        some = with_new({"t": wanted}, 0.01, 1)["t"]  # a lookup does not insert them; it reads initial rows
        calls["find + gather, 1 % new"] = (
            lambda g=group, w=some, o=out: g.read(w, None, [n], o),
            8 + 32 + 8 * dim,
        )
        for name, (call, row_bytes) in calls.items():
            results[f"{name}, dim {dim}"] = speed(n, median_ms(call), run.floor_ms(n * row_bytes))
        rate = results[f"find + gather, dim {dim}"]["billion_per_s"]
        run.bar(f"find + gather, dim {dim}, billion rows/s", rate, bar)
        with_some = results[f"find + gather, 1 % new, dim {dim}"]["billion_per_s"]
        run.bar(f"find + gather, 1 % new, dim {dim}, billion rows/s", with_some)
        if dim == 16:
            own = results["find or insert, half new"] = find_or_insert(engine, wanted)
            own["slots"] = engine.table.slots
            run.bar("find or insert, half new, billion/s", own["billion_per_s"], 2.5)
        progress(f"find and gather, dim {dim}: {rate:.2f} billion rows/s")
        del table, engine, ids, wanted, some, out, group, found, calls, call
        release_memory()


def speed(n: int, ms: float, floor: float) -> dict[str, float]:
    return {"billion_per_s": n / ms / 1e6, "ms": ms, "memory_floor_ms": floor, "times_floor": ms / floor}


def find_or_insert(engine: CudaEngine, known: Tensor) -> dict[str, Any]:
    """The index does not grow: there is room for eight calls."""
    n = known.numel()
    calls: list[Callable[[], object]] = []
    for _ in range(8):
        new = torch.randint(-(2**62), 2**62, (n // 2,), device=DEVICE)
        ids = torch.cat([known[: n - n // 2], new])[torch.randperm(n, device=DEVICE)]
        calls.append(lambda ids=ids: engine.find_or_create(ids))  # type: ignore[misc]
    calls[0]()
    ms = row_of_calls_ms(calls[1:])
    return {"ms": ms, "billion_per_s": n / ms / 1e6}


# ---- step


def step(run: GpuRun) -> None:
    """The wall time of the step: all ids known, and 1 % new ids; deterministic and fast."""
    results = run.sections["step"] = {}
    bars: dict[str, dict[str, float]] = {"Adam": {"required": 1.0, "goal": 0.8}, "SGD": {"required": 0.75}}
    for name, optimizer in OPTIMIZERS.items():
        for suffix, deterministic in COLUMNS.items():
            work = SparseStep(run.sizes, optimizer, deterministic)
            floor = work.floors(run)["all"]
            for label, new in (("", 0.0), (", 1 % new", 0.01)):
                step_ms(work, run.sizes.warmup, new)
                ms = statistics.median(step_ms(work, run.sizes.steps, new) for _ in range(run.sizes.rounds))
                results[name + suffix + label] = {
                    "wall_ms": ms,
                    "memory_floor_ms": floor,
                    "times_floor": ms / floor,
                }
                own: dict[str, Any] = bars[name] if not suffix and not label else {}
                run.bar(f"10 tables, {name}{suffix}{label}, ms", ms, at_most=True, **own)
                progress(f"{name}{suffix}{label}: {ms:.3f} ms, floor {floor:.3f} ms")
            del work
            release_memory()


# ---- pooled


def pooled(run: GpuRun) -> None:
    """The wall time of the whole step less the MLP's, and the same model with nn.EmbeddingBag."""
    results = run.sections["pooled"] = {}
    steps, rounds = run.sizes.steps, run.sizes.rounds
    for suffix, deterministic in COLUMNS.items():
        work = PooledModel(run.sizes, deterministic)
        wall_ms(work.step, run.sizes.warmup)
        wall_ms(work.mlp_alone, run.sizes.warmup)
        pairs = [(wall_ms(work.step, steps), wall_ms(work.mlp_alone, steps)) for _ in range(rounds)]
        whole = statistics.median(step for step, _ in pairs)
        part = statistics.median(step - alone for step, alone in pairs)
        own = results["deterministic" if deterministic else "fast"] = {
            "step_ms": whole,
            "mlp_ms": statistics.median(alone for _, alone in pairs),
            "embedding_ms": part,
            "memory_floor_ms": work.floors(run)["all"],
        }
        own["times_floor"] = part / own["memory_floor_ms"]
        run.bar(
            f"pooled model{suffix}, embedding part, ms",
            part,
            1.5 if deterministic else None,
            at_most=True,
        )
        step_ms(work, run.sizes.warmup, 0.01)
        pairs = [(step_ms(work, steps, 0.01), wall_ms(work.mlp_alone, steps)) for _ in range(rounds)]
        own["embedding_ms, 1 % new"] = statistics.median(step - alone for step, alone in pairs)
        run.bar(
            f"pooled model{suffix}, embedding part, 1 % new, ms", own["embedding_ms, 1 % new"], at_most=True
        )
        work.free_tables()
        if deterministic:
            peers = {
                "26 nn.EmbeddingBag": (work.many_bags_ms, 6.0),
                "one nn.EmbeddingBag": (work.one_bag_ms, 1.7),
            }
            for name, (measure, bar) in peers.items():
                results[name] = {"step_ms": measure(max(1, steps // 4))}
                run.bar(f"{name} / ours", results[name]["step_ms"] / whole, bar)
                release_memory()
        progress(f"pooled model{suffix}: {own}")
        del work
        release_memory()


# ---- host


def host(run: GpuRun) -> None:
    """A table of four times its budget of GPU memory: dim 64, Adagrad, 1 Mi ids a step by a power law."""
    results = run.sections["host"] = {**run.bus}
    for suffix, deterministic in COLUMNS.items():
        own = results["deterministic" if deterministic else "fast"] = host_tier(run, deterministic)
        release_memory()
        run.bar(
            f"host tier{suffix}, step / time of its bytes over the bus",
            own["step_by_bus"],
            1.5 if deterministic else None,
            at_most=True,
        )
        run.bar(f"host tier{suffix}, step / time of reading as many random rows", own["step_by_random"])
        run.bar(f"host tier{suffix}, hit rate", own["hit_rate"])
        progress(f"host tier{suffix}: {own}")


def host_tier(run: GpuRun, deterministic: bool) -> dict[str, float]:
    """Measures one table. A step finds rows, reads them and updates them, as a training step does.

    The bytes that travel in a step: a row that is missed travels to the GPU, and the row that it displaces
    travels to the host. A missed row that finds no place on the GPU is read and written where it is: its
    weights by the lookup, the whole row by the update. `bus_ms` is the time of these bytes at the speed of
    large copies, one direction after the other. `step_by_random` compares with reading the headers of as many
    random rows: each is in another page of host memory, and the translation of addresses limits their number
    per second. `separate_calls_ms` is the time of a step whose update finds its rows again.
    """
    dim, n, rows, rounds = 64, run.sizes.host_ids, run.sizes.host_rows, 2 * run.sizes.rounds
    optimizer = Adagrad(0.01)
    stride = CudaEngine(TableConfig("t", dim=dim, optimizer=optimizer)).layout.stride
    config = TableConfig(
        "t", dim=dim, optimizer=optimizer, device_bytes=rows * stride // 4, deterministic=deterministic
    )
    table = Table(config, engine="cuda")
    engine = engine_of(table)
    assert engine.tier is not None
    for part in (torch.randperm(rows, device=DEVICE) + 1).split(MI):
        engine.find_or_create(part)
    # Each step has other ids; the same few batches would soon have all their rows on the GPU.
    batches = [power_law(n, rows) for _ in range(5 * rounds + 1)]
    grads = torch.randn(n, dim, device=DEVICE) * 1e-3
    count = 0

    def one() -> None:
        nonlocal count
        count += 1
        ids = batches[count]
        found = table.find(ids)
        epoch = table.epoch
        table.read(found, ids, epoch=epoch)
        table.update(found, ids, grads, step=count, epoch=epoch)

    def separate_calls() -> None:
        nonlocal count
        count += 1
        table.lookup(batches[count])
        table.apply_gradients(batches[count], grads, step=count)

    wall_ms(one, 3 * rounds)
    before = table.stats().host_tier
    ms = wall_ms(one, rounds)
    after = table.stats().host_tier
    assert before is not None
    assert after is not None
    separate_ms = wall_ms(separate_calls, rounds)
    misses, moved = (after.misses - before.misses) / rounds, (after.moved - before.moved) / rounds
    hits = (after.hits - before.hits) / rounds
    some = torch.randint(engine.tier.boundary, rows, (MI // 8,), device=DEVICE, dtype=torch.int32)
    row_ns = median_ms(lambda: engine.table.headers(some)) / some.numel() * 1e6
    random_ms = misses * row_ns / 1e6
    written = misses * stride
    read = written + (misses - moved) * 4 * dim
    to_gpu, to_host = run.bus["to_gpu_gb_per_s"] * 1e6, run.bus["to_host_gb_per_s"] * 1e6
    bus_ms = read / to_gpu + written / to_host
    return {
        "rows": rows,
        "rows_on_gpu": engine.tier.boundary,
        "step_ms": ms,
        "hit_rate": hits / (hits + misses),
        "missed_rows_per_step": misses,
        "moved_rows_per_step": moved,
        "bytes_read_per_step": read,
        "bytes_written_per_step": written,
        "bus_ms": bus_ms,
        "step_by_bus": ms / bus_ms if bus_ms else float("inf"),
        "separate_calls_ms": separate_ms,
        "random_row_ns": row_ns,
        "step_by_random": ms / random_ms if random_ms else float("inf"),
    }


# ---- scan


def scan(run: GpuRun) -> None:
    """Rows of a table to the host and back: dim 64, Adagrad; against a pinned copy of the same bytes."""
    rows, chunk_rows = run.sizes.scan_rows, 1 << 16
    config = TableConfig("t", dim=64, optimizer=Adagrad(0.01))
    table, other = Table(config, engine="cuda"), Table(config, engine="cuda")
    for part in (torch.randperm(rows, device=DEVICE) + 1).split(MI):
        engine_of(table).find_or_create(part)
    size = rows * (8 + 8 + 4 * config.row_floats)
    results = run.sections["scan"] = {"rows": rows, "bytes": size, **run.bus}
    # In ordinary memory; `list(table.scan(...))` would keep memory that scans use.
    kept = [chunk.select(torch.arange(chunk.ids.numel())) for chunk in table.scan(chunk_rows)]

    def read_snapshot() -> Iterator[int]:
        with table.snapshot() as snapshot:
            chunk = table.new_chunk(chunk_rows)
            while count := snapshot.read(chunk):
                yield count

    def restore() -> Iterator[int]:
        other.clear()
        for chunk in kept:
            other.restore(chunk)
            yield chunk.ids.numel()

    ways: dict[str, tuple[Callable[[], Iterator[int]], str]] = {
        "scan": (lambda: (chunk.ids.numel() for chunk in table.scan(chunk_rows)), "to_host_gb_per_s"),
        "snapshot": (read_snapshot, "to_host_gb_per_s"),
        "restore": (restore, "to_gpu_gb_per_s"),
    }
    for name, (start, direction) in ways.items():
        times = []
        for _ in range(3):
            synchronize()
            began = time.perf_counter()
            assert sum(start()) == rows
            synchronize()
            times.append(time.perf_counter() - began)
        seconds = statistics.median(times[1:])
        rate = size / seconds / 1e9
        results[name] = {"seconds": seconds, "gb_per_s": rate, "part_of_bus": rate / run.bus[direction]}
        run.bar(f"{name}, GB/s", rate)
        run.bar(f"{name}, part of the speed of a pinned copy", rate / run.bus[direction])
        progress(f"{name}: {rate:.2f} GB/s of {run.bus[direction]:.2f}")
    began = time.perf_counter()
    snapshot = table.snapshot()
    results["snapshot"]["begin_seconds"] = time.perf_counter() - began
    snapshot.close()


# ---- kernels


def kernels(run: GpuRun) -> None:
    """Time on the GPU of the kernels of `step` and `pooled`."""
    results = run.sections["kernels"] = {}
    for name, optimizer in OPTIMIZERS.items():
        for suffix, deterministic in COLUMNS.items():
            work = SparseStep(run.sizes, optimizer, deterministic)
            floors = work.floors(run)
            for label, new in (("", 0.0), (", 1 % new", 0.01)):
                step_ms(work, run.sizes.warmup, new)
                work.batches.make_new(new, run.sizes.profiled + 1)
                found = kernel_ms(work.step, run.sizes.profiled)
                own = {"gpu_ms": sum(found.values()), "kernels": with_floors(found, floors)}
                results[f"10 tables, {name}{suffix}{label}"] = own
                run.bar(f"10 tables, {name}{suffix}{label}, GPU ms", own["gpu_ms"], at_most=True)
            del work
            release_memory()
    work = PooledModel(run.sizes, deterministic=True)
    wall_ms(work.step, run.sizes.warmup)
    found = kernel_ms(work.step, run.sizes.profiled)
    alone = kernel_ms(work.mlp_alone, run.sizes.profiled)
    results["pooled"] = {
        "gpu_ms": sum(found.values()),
        "mlp_gpu_ms": sum(alone.values()),
        "kernels": with_floors(found, work.floors(run)),
    }
    part = sum(found.values()) - sum(alone.values())
    run.bar("pooled model, embedding part, GPU ms", part, at_most=True)


SECTIONS = {"find": find, "step": step, "pooled": pooled, "host": host, "scan": scan, "kernels": kernels}


def main(arguments: Sequence[str]) -> None:
    if not ON_GPU and not {"-h", "--help"} & set(arguments):
        sys.exit("table_gpu.py needs a CUDA GPU")
    run_sections("table_gpu", arguments, GpuRun, SECTIONS, ("torch", "triton"))


if __name__ == "__main__":
    main(sys.argv[1:])
