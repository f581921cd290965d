"""The cuda engine on one GPU: find and gather, the sparse training step, a pooled model, rows in host memory.

    python benchmarks/table_gpu.py [--quick] [--output PATH]      (make bench-gpu)

Method: medians of triton.testing.do_bench, which empties the cache before each run, for kernels; wall time of
many steps in a row for whole steps, because the host may be slower than the GPU; "GPU" columns add up the
kernels of a step as torch's profiler reports them. All ids are in the tables, unless a line says "1 % new". A
full run saves results/table_gpu-DATE.json. It needs torch and Triton, not the native module.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Bar, command_line, machine, print_bars, progress, result_path, versions, write_result
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from triton.testing import do_bench

from megalith import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingCollection,
    Feature,
    Layout,
    Optimizer,
    Slice,
    Table,
    TableConfig,
)
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.shards import LocalShards
from megalith.table.engines.cuda.engine import CudaEngine

GPU = "cuda"
MILLION = 1 << 20


def median_ms(call: Callable[[], object]) -> float:
    return float(do_bench(call, warmup=30, rep=120, return_mode="median"))


def wall_ms(step: Callable[[], object], steps: int = 40) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1e3


def kernel_ms(step: Callable[[], object], steps: int = 6) -> dict[str, float]:
    """Milliseconds on the GPU per step, by kernel."""
    step()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    times = {e.key[:60]: e.device_time_total / steps / 1e3 for e in found.key_averages()}
    return {name: ms for name, ms in sorted(times.items(), key=lambda pair: -pair[1]) if ms > 0}


def copy_speed() -> float:
    """Bytes read and written per second by a copy, in TB/s."""
    source = torch.empty(MILLION << 10, dtype=torch.int8, device=GPU)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source)) / 1e9


def power_law(n: int, ids: int) -> Tensor:
    """Ids 1 to `ids` with probabilities falling as rank ** -1.05."""
    u = torch.rand(n, device=GPU, dtype=torch.float64)
    top = float(ids) ** -0.05
    return ((u * (top - 1) + 1) ** -20.0).long().clamp(1, ids)


def find_and_gather(slots: int, copy: float) -> dict[str, Any]:
    """Find and read 1 Mi of the rows that half fill the index."""
    results: dict[str, Any] = {}
    for dim in (16, 64, 128):
        table = Table(TableConfig("t", dim=dim, optimizer=SGD(0.1)), engine="cuda")
        engine = table.engine_impl
        assert isinstance(engine, CudaEngine)
        table.reserve(slots // 2)
        ids = torch.randint(-(2**62), 2**62, (slots // 2,), device=GPU)
        for part in ids.split(MILLION):
            engine.find_or_create(part)
        assert engine.table.slots == slots
        wanted = ids[torch.randint(0, ids.numel(), (MILLION,), device=GPU)]
        out, size, group = torch.empty(MILLION, dim, device=GPU), [MILLION], engine.group
        found = group.find(wanted, size)
        assert bool((found.rows >= 0).all())

        def both(group: Any = group, wanted: Tensor = wanted, out: Tensor = out) -> None:
            group.read(wanted, None, [MILLION], out)

        def read(group: Any = group, wanted: Tensor = wanted, out: Tensor = out, found: Any = found) -> None:
            group.read(wanted, found, [MILLION], out)

        together = median_ms(both)
        floor = MILLION * (8 + 32 + 8 * dim) / copy / 1e9
        results[f"dim {dim}"] = {
            "billion_rows_per_s": MILLION / together / 1e6,
            "find_billion_per_s": MILLION / median_ms(lambda g=group, w=wanted: g.find(w, [MILLION])) / 1e6,
            "gather_billion_per_s": MILLION / median_ms(read) / 1e6,
            "ms": together,
            "memory_floor_ms": floor,
        }
        if dim == 16:
            results["find or insert, half new"] = find_or_insert(engine, wanted)
        progress(f"find and gather, dim {dim}: {MILLION / together / 1e6:.2f} billion rows/s")
    return results


def find_or_insert(engine: CudaEngine, known: Tensor) -> dict[str, Any]:
    """The time of a call in a row of calls, so that the GPU does not wait for the host."""
    calls = []
    for _ in range(12):
        new = torch.randint(-(2**62), 2**62, (MILLION // 2,), device=GPU)
        calls.append(torch.cat([known[: MILLION // 2], new])[torch.randperm(MILLION, device=GPU)])
    engine.reserve(len(engine) + 13 * MILLION)
    engine.find_or_create(calls[0])
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10_000_000)
    begin.record()
    for ids in calls[1:]:
        engine.find_or_create(ids)
    end.record()
    torch.cuda.synchronize()
    ms = begin.elapsed_time(end) / (len(calls) - 1)
    return {"ms": ms, "billion_per_s": MILLION / ms / 1e6}


def sparse_step(
    optimizer: Optimizer, new: float, kernels: bool, deterministic: bool = True
) -> dict[str, Any]:
    """DynamicEmb's workload: 10 tables, dim 128, 1,048,570 ids by a power law, no pooling.

    After torch's profiler has run in a process, every launch takes longer, so one run either measures the
    wall time or adds up kernels.
    """
    n, dim = 104_857, 128
    configs = [
        TableConfig(f"t{i}", dim=dim, optimizer=optimizer, deterministic=deterministic) for i in range(10)
    ]
    shards = LocalShards(configs, engine="cuda")
    offsets = torch.arange(n + 1, device=GPU)
    bags = {c.name: (Bags(offsets, (OutputSlice(i, 0, 0, dim),), first=0),) for i, c in enumerate(configs)}
    pooling = Pooling(((n, dim),) * 10, bags)
    grads = [torch.randn(n, dim, device=GPU) * 1e-3 for _ in configs]
    batches = [{c.name: power_law(n, 10_000_000) for c in configs} for _ in range(4)]
    fresh = int(n * new)
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        ids = batches[count % 4]
        if fresh:
            extra = torch.arange(fresh, device=GPU) + (count << 32)
            ids = {name: torch.cat([own[fresh:], extra]) for name, own in ids.items()}
        lookup = shards.lookup(ids)
        lookup.pool(pooling)
        shards.apply_gradients(lookup, grads, step=count, pooling=pooling)

    for _ in range(8):
        step()
    joined = torch.cat([own + (k << 40) for k, own in enumerate(batches[0].values())])
    if not kernels:
        times = [wall_ms(step) for _ in range(5)]
        return {"wall_ms": statistics.median(times), "distinct": torch.unique(joined).numel()}
    found = kernel_ms(step)
    return {"gpu_ms": sum(found.values()), "kernels_ms": dict(list(found.items())[:16])}


def pooled_model(kernels: bool) -> dict[str, Any]:
    """26 features of 1 M rows, dim 64, Adagrad, batch 65,536, MLP 512-256-1 with fused Adam, TF32."""
    features, batch, dim, rows = 26, 65_536, 64, 1_000_000
    torch.backends.cuda.matmul.allow_tf32 = True
    configs = [TableConfig(f"t{i}", dim=dim, optimizer=Adagrad(0.01)) for i in range(features)]
    names = [f"f{i}" for i in range(features)]
    collection = EmbeddingCollection(
        configs,
        [Feature(name, f"t{i}") for i, name in enumerate(names)],
        layouts=[Layout("x", [Slice(name, 0, dim) for name in names])],
        engine="cuda",
    )
    for table in collection.tables.values():
        assert isinstance(table.engine_impl, CudaEngine)
        for part in torch.arange(1, rows + 1, device=GPU).split(MILLION // 4):
            table.engine_impl.find_or_create(part)
    batches = [{name: power_law(batch, rows) for name in names} for _ in range(4)]
    mlp = nn.Sequential(
        nn.Linear(features * dim, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
    ).to(GPU)
    dense = torch.optim.Adam(mlp.parameters(), fused=True)
    label = torch.rand(batch, 1, device=GPU)
    count = 0

    def train(x: Tensor) -> None:
        nn.functional.binary_cross_entropy_with_logits(mlp(x), label).backward()
        dense.step()
        dense.zero_grad()

    def ours() -> None:
        nonlocal count
        count += 1
        train(collection(batches[count % 4])["x"])

    given = torch.randn(batch, features * dim, device=GPU, requires_grad=True)

    def mlp_alone() -> None:
        given.grad = None
        train(given)

    for _ in range(5):
        ours()
        mlp_alone()
    results: dict[str, Any] = {}
    if kernels:
        found, alone = kernel_ms(ours), kernel_ms(mlp_alone)
        results |= {"gpu_ms": sum(found.values()), "mlp_gpu_ms": sum(alone.values())}
        results["kernels_ms"] = dict(list(found.items())[:20])
        return results
    pairs = [(wall_ms(ours), wall_ms(mlp_alone)) for _ in range(5)]
    results["step_ms"] = statistics.median(step for step, _ in pairs)
    results["mlp_ms"] = statistics.median(alone for _, alone in pairs)
    results["embedding_ms"] = statistics.median(step - alone for step, alone in pairs)
    collection.shards.clear()
    torch.cuda.empty_cache()
    results["26_bags_ms"] = many_bags_ms(batches, rows, dim, train)
    torch.cuda.empty_cache()
    results["one_bag_ms"] = one_bag_ms(batches, rows, dim, train)
    return results


def many_bags_ms(
    batches: list[dict[str, Tensor]], rows: int, dim: int, train: Callable[[Tensor], None]
) -> float:
    """One nn.EmbeddingBag per feature, with torch's Adagrad."""
    names, size = list(batches[0]), next(iter(batches[0].values())).numel()
    bags = nn.ModuleList([nn.EmbeddingBag(rows + 1, dim, mode="sum", sparse=True) for _ in names]).to(GPU)
    optimizer = torch.optim.Adagrad(bags.parameters(), lr=0.01)
    each = torch.arange(size, device=GPU)
    chosen = iter(batches * 100)

    def step() -> None:
        batch = next(chosen)
        train(torch.cat([bag(batch[name], each) for name, bag in zip(names, bags, strict=True)], 1))
        optimizer.step()
        optimizer.zero_grad()

    step()
    return wall_ms(step, 10)


def one_bag_ms(
    batches: list[dict[str, Tensor]], rows: int, dim: int, train: Callable[[Tensor], None]
) -> float:
    """One nn.EmbeddingBag for all features, with torch's Adagrad."""
    count, size = len(batches[0]), next(iter(batches[0].values())).numel()
    bag = nn.EmbeddingBag(count * (rows + 1), dim, mode="sum", sparse=True).to(GPU)
    optimizer = torch.optim.Adagrad(bag.parameters(), lr=0.01)
    every = torch.arange(size * count, device=GPU)
    shift = torch.arange(count, device=GPU) * (rows + 1)
    flat = [(torch.stack(list(batch.values()), 1) + shift).reshape(-1) for batch in batches]
    chosen = iter(flat * 100)

    def step() -> None:
        train(bag(next(chosen), every).view(size, count * dim))
        optimizer.step()
        optimizer.zero_grad()

    step()
    return wall_ms(step, 10)


def bus_speed() -> dict[str, float]:
    """Bytes per second of copies between pinned host memory and the GPU, in GB/s."""
    host = torch.empty(MILLION << 8, dtype=torch.int8, pin_memory=True)
    device = torch.empty_like(host, device=GPU)
    to_gpu = median_ms(lambda: device.copy_(host, non_blocking=True))
    to_host = median_ms(lambda: host.copy_(device, non_blocking=True))
    return {"to_gpu_gb_per_s": host.numel() / to_gpu / 1e6, "to_host_gb_per_s": host.numel() / to_host / 1e6}


def host_tier(rows: int) -> dict[str, Any]:
    """A table of four times its budget of GPU memory: dim 64, Adagrad, 1 Mi ids a step by a power law.

    The bytes that must travel in a step: the weights of each occurrence whose row is on the host are read by
    the lookup; each distinct such row is read and written by the update; rows that change places travel both
    ways.
    """
    dim, n = 64, MILLION
    optimizer = Adagrad(0.01)
    stride = CudaEngine(TableConfig("t", dim=dim, optimizer=optimizer)).layout.stride
    config = TableConfig("t", dim=dim, optimizer=optimizer, device_bytes=rows * stride // 4)
    table = Table(config, engine="cuda")
    engine = table.engine_impl
    assert isinstance(engine, CudaEngine)
    assert engine.tier is not None
    for part in (torch.randperm(rows, device=GPU) + 1).split(MILLION):
        engine.find_or_create(part)
    batches = [power_law(n, rows) for _ in range(8)]
    grads = torch.randn(n, dim, device=GPU) * 1e-3
    count = 0
    occurrences = 0

    def step() -> None:
        nonlocal count
        count += 1
        ids = batches[count % 8]
        table.lookup(ids)
        table.apply_gradients(ids, grads, step=count)

    for _ in range(24):
        step()
    before = table.stats().host_tier
    ms = wall_ms(step, 16)
    after = table.stats().host_tier
    assert before is not None
    assert after is not None
    for ids in batches:
        occurrences += int((table.find(ids) >= engine.tier.boundary).sum())
    misses, moved = (after.misses - before.misses) / 16, (after.moved - before.moved) / 16
    bus = bus_speed()
    read = occurrences / 8 * 4 * dim + (misses + moved) * stride
    written = (misses + moved) * stride
    floor = read / bus["to_gpu_gb_per_s"] / 1e6 + written / bus["to_host_gb_per_s"] / 1e6
    hits = after.hits - before.hits
    return {
        **bus,
        "rows": rows,
        "rows_on_gpu": engine.tier.boundary,
        "step_ms": ms,
        "hit_rate": hits / (hits + 16 * misses),
        "missed_rows_per_step": misses,
        "moved_rows_per_step": moved,
        "bytes_read_per_step": read,
        "bytes_written_per_step": written,
        "bus_ms": floor,
        "step_by_bus": ms / floor,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small index; nothing is saved")
    parser.add_argument("--output", type=Path, help="where to save the result")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("table_gpu.py needs a CUDA GPU")
    copy = copy_speed()
    progress(f"{torch.cuda.get_device_name()}, copy {copy:.2f} TB/s")
    steps: dict[str, Any] = {}
    pooled: dict[str, Any] = {}
    gather: dict[str, Any] = {}
    tier: dict[str, Any] = {}
    for kernels in (False, True):
        for name, optimizer in (("Adam", Adam(1e-3)), ("SGD", SGD(0.1))):
            for label, new in (("", 0.0), (", 1 % new", 0.01), (", atomic additions", 0.0)):
                fixed = label != ", atomic additions"
                found = sparse_step(optimizer, new, kernels, deterministic=fixed)
                steps.setdefault(name + label, {}).update(found)
                torch.cuda.empty_cache()
                shown = {key: value for key, value in steps[name + label].items() if key.endswith("_ms")}
                progress(f"{name}{label}: {shown}")
        pooled |= pooled_model(kernels)
        torch.cuda.empty_cache()
        if not kernels:
            progress(f"pooled model: {pooled}")
            gather = find_and_gather((1 << 22) if arguments.quick else (1 << 26), copy)
            torch.cuda.empty_cache()
            tier = host_tier(MILLION if arguments.quick else 16 * MILLION)
            progress(f"host tier: {tier}")
            torch.cuda.empty_cache()
    bars = [
        *(
            Bar(f"find + gather, dim {dim}, billion rows/s", gather[f"dim {dim}"]["billion_rows_per_s"], bar)
            for dim, bar in ((16, 9.0), (64, 5.0), (128, 3.2))
        ),
        Bar("find or insert, half new, billion/s", gather["find or insert, half new"]["billion_per_s"], 2.5),
        Bar("10 tables, Adam, ms", steps["Adam"]["wall_ms"], 1.0, 0.8, at_most=True),
        Bar("10 tables, Adam, GPU ms", steps["Adam"]["gpu_ms"], at_most=True),
        Bar("10 tables, SGD, ms", steps["SGD"]["wall_ms"], 0.75, at_most=True),
        Bar("10 tables, SGD, GPU ms", steps["SGD"]["gpu_ms"], at_most=True),
        Bar(
            "10 tables, Adam, atomic additions, ms", steps["Adam, atomic additions"]["wall_ms"], at_most=True
        ),
        Bar("10 tables, SGD, atomic additions, ms", steps["SGD, atomic additions"]["wall_ms"], at_most=True),
        Bar("pooled model, embedding part, ms", pooled["embedding_ms"], 1.5, at_most=True),
        Bar("pooled model, embedding part, GPU ms", pooled["gpu_ms"] - pooled["mlp_gpu_ms"], at_most=True),
        Bar("26 nn.EmbeddingBag / ours", pooled["26_bags_ms"] / pooled["step_ms"], 6.0),
        Bar("one nn.EmbeddingBag / ours", pooled["one_bag_ms"] / pooled["step_ms"], 1.7),
        Bar("host tier, step / time of its bytes over the bus", tier["step_by_bus"], 1.5, at_most=True),
    ]
    print_bars(bars)
    target = arguments.output or (None if arguments.quick else result_path("table_gpu"))
    if target is not None:
        content = {
            "command": command_line(sys.argv),
            "gpu": torch.cuda.get_device_name(),
            "copy_tb_per_s": copy,
            "machine": machine(),
            "versions": versions(("torch", "triton")),
            "bars": bars,
            "find_and_gather": gather,
            "sparse_step": steps,
            "pooled_model": pooled,
            "host_tier": tier,
        }
        write_result(target, content)
        print(f"saved {target}")


if __name__ == "__main__":
    main()
