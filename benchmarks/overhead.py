"""Python time per training step: how many functions of ours a batch enters, and what they cost.

    python benchmarks/overhead.py [--device cuda] [--batch 1024,4096,16384] [--output PATH]

The model has 26 features of one table each; a batch has one id per feature and example ("single") or 1 to
5 ("ragged"). Every batch is another one. A step is forward, backward and update of the embeddings, without a
dense part. Printed for each shape: wall time of a step, functions of ours and calls of them
(`sys.setprofile`), and the time that Python spends in each package, by cProfile, which makes Python about
twice as slow: read it as shares. With --profile, the functions that take most time.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import command_line, machine, print_table, result_path, versions, write_result
from torch import Tensor

from megalith import Adagrad, EmbeddingCollection, Feature, Layout, Ragged, Slice, TableConfig

FEATURES, ROWS = 26, 200_000
NAMES = [f"f{i}" for i in range(FEATURES)]
BATCHES = 8
PACKAGE = "/megalith/"


def make_collection(dim: int, device: str) -> EmbeddingCollection:
    tables = [TableConfig(name, dim=dim, optimizer=Adagrad(0.05)) for name in NAMES]
    layout = Layout("all", [Slice(name, 0, dim) for name in NAMES])
    engine = "cuda" if device == "cuda" else "cpu"
    return EmbeddingCollection(tables, [Feature(n, n) for n in NAMES], layouts=[layout], engine=engine)


def make_batch(shape: str, size: int, generator: torch.Generator, device: str) -> dict[str, Any]:
    def ids(n: int) -> Tensor:
        even = torch.rand(n, generator=generator, dtype=torch.float64)
        top = 1 - ROWS**-0.05  # Zipf's law with exponent 1.05, by inverting its continuous form
        return ((1 - even * top) ** (-1 / 0.05)).long().clamp(1, ROWS).to(device)

    if shape == "single":
        return {name: ids(size) for name in NAMES}
    lengths = [torch.randint(1, 6, (size,), generator=generator) for _ in NAMES]
    return {
        name: Ragged.from_lengths(ids(int(own.sum())), own.to(device))
        for name, own in zip(NAMES, lengths, strict=True)
    }


def count_calls(work: Callable[[], object]) -> tuple[int, int]:
    """Return how many functions of ours a call enters, and how often; comprehensions are not counted."""
    found: Counter[tuple[str, str]] = Counter()

    def note(frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and PACKAGE in code.co_filename and not code.co_name.startswith("<"):
            found[code.co_filename, code.co_qualname] += 1

    threading.setprofile(note)  # backward runs in a thread of torch, on a GPU
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return len(found), sum(found.values())


def package_of(path: str) -> str:
    if PACKAGE not in path:
        return "torch and Python"
    inner = path.rsplit(PACKAGE, 1)[1].split("/")
    return "/".join(inner[:-1]) or inner[0]


def profile(work: Callable[[], object], rounds: int) -> tuple[dict[str, float], pstats.Stats]:
    """Return the microseconds that a call spends in each package."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(rounds):
        work()
    profiler.disable()
    stats = pstats.Stats(profiler)
    spent: Counter[str] = Counter()
    for (path, _, _), (_, _, own, _, _) in stats.stats.items():  # type: ignore[attr-defined]
        spent[package_of(path)] += own / rounds * 1e6
    return dict(spent.most_common()), stats


def measure(shape: str, size: int, dim: int, device: str, show: int) -> dict[str, Any]:
    collection = make_collection(dim, device)
    generator = torch.Generator().manual_seed(0)
    batches = [make_batch(shape, size, generator, device) for _ in range(BATCHES)]
    gradient = torch.full((size, FEATURES * dim), 1e-3, device=device)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    turn = 0

    def step() -> None:
        nonlocal turn
        turn += 1
        collection(batches[turn % BATCHES])["all"].backward(gradient)

    def seconds(rounds: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            step()
        synchronize()
        return (time.perf_counter() - start) / rounds

    seconds(4 * BATCHES)
    rounds = 3 * BATCHES
    wall = statistics.median(seconds(rounds) for _ in range(7))
    # The host's own time: it does not wait for the device, whose queue is empty.
    alone = []
    for _ in range(3 * rounds):
        synchronize()
        start = time.perf_counter()
        step()
        alone.append(time.perf_counter() - start)
    # On a GPU, backward runs in a thread of its own: forced into this one, so that it is counted.
    with torch.autograd.set_multithreading_enabled(False):
        functions, calls = count_calls(step)
        spent, stats = profile(step, rounds)
    if show:
        stats.sort_stats("tottime").print_stats(show)
    return {
        "wall_ms": wall * 1e3,
        "host_ms": statistics.median(alone) * 1e3,
        "functions": functions,
        "calls": calls,
        "profiled_us": spent,
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", default="1024,4096,16384")
    parser.add_argument("--shapes", default="single,ragged")
    parser.add_argument("--dim", type=int, help="default: 16 on the CPU, 64 on a GPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", type=int, default=0, help="print this number of functions")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    dim = options.dim or (64 if options.device == "cuda" else 16)
    results = {}
    for shape in options.shapes.split(","):
        for size in map(int, options.batch.split(",")):
            results[f"{shape}, batch {size}"] = measure(shape, size, dim, options.device, options.profile)
    print_table(
        f"A step of {FEATURES} features, dim {dim}, on {options.device}",
        ["shape", "wall ms", "host ms", "functions", "calls", "microseconds in (profiled)"],
        [
            [
                name,
                f"{own['wall_ms']:.2f}",
                f"{own['host_ms']:.2f}",
                str(own["functions"]),
                str(own["calls"]),
                ", ".join(f"{where} {us:.0f}" for where, us in list(own["profiled_us"].items())[:7]),
            ]
            for name, own in results.items()
        ],
    )
    content = {
        "benchmark": "overhead",
        "command": command_line(arguments),
        "machine": machine(),
        "versions": versions(("megalith", "torch", "triton")),
        "results": results,
    }
    write_result(options.output or result_path(f"overhead_{options.device}"), content)


if __name__ == "__main__":
    main(sys.argv[1:])
