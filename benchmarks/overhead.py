"""Python time per training step: how many functions of ours a batch enters, and what they cost.

    python benchmarks/overhead.py [--device cuda] [--batch 1024,4096,16384] [--paths] [--output PATH]

The model has 26 features of one table each; a batch has one id per feature and example ("single") or 1 to
5 ("ragged"). Every batch is another one. A step is forward, backward and update of the embeddings, without a
dense part. Printed for each shape: wall time of a step, functions of ours and calls of them
(`sys.setprofile`), and the time that Python spends in each package, by cProfile, which makes Python about
twice as slow: read it as shares. With --profile, the functions that take most time.

With --paths, the functions and calls of other paths too, in all threads of the process that is named: a step
of the same model on rank 0 of 2 (SyncShards) and on a worker with 2 servers (ServerShards), a Predict request
(client and model server), a push of changed rows (publisher and model server), and a save of a collection.

A hop is a place in our sources that calls a function of ours, as a reader counts who follows a batch, a
request or the rows of a save through the code from the public call to its end: each place counts once,
however many tables, ranks or blocks pass it, and a function that two places call counts twice, so a repeated
check shows. Properties, comprehensions, profiler spans and `native_module` are not hops. --hops PATH lists
those of one path in order ("sync", "save", ...).
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
from functools import cached_property
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from harness import command_line, machine, print_table, result_path, versions, write_result
from torch import Tensor

from megalith import Adagrad, EmbeddingCollection, Feature, Layout, Ragged, ServerShards, Slice, TableConfig

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


class Passed(NamedTuple):
    """What a path passes: functions of ours, their calls, and its hops as text, in order."""

    functions: int
    calls: int
    hops: list[str]


class CallCount:
    """Counts the functions of ours that all threads enter, and their calls; comprehensions are not counted.

    Only threads that start while it exists are seen, besides the one that makes it.
    """

    def __init__(self) -> None:
        self._found: Counter[tuple[str, str]] = Counter()
        self._hops: dict[tuple[str, int, str], bool] = {}
        self._counting = False
        threading.setprofile(self._note)

    def _note(self, frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if not (
            self._counting and event == "call" and PACKAGE in code.co_filename and code.co_name[0] != "<"
        ):
            return
        self._found[code.co_filename, code.co_qualname] += 1
        caller = frame.f_back
        while caller is not None and caller.f_code.co_name[0] == "<":
            caller = caller.f_back
        place = ("", 0) if caller is None else (caller.f_code.co_filename, caller.f_lineno)
        if (*place, code.co_qualname) not in self._hops:
            owner, _, name = code.co_qualname.rpartition(".")
            attribute = getattr(frame.f_globals.get(owner), "__dict__", {}).get(name)
            self._hops[(*place, code.co_qualname)] = not (
                isinstance(attribute, property | cached_property) or name in ("span", "native_module")
            )

    def of(self, work: Callable[[], object]) -> Passed:
        """Return what a call passes."""
        self._found.clear()
        self._hops.clear()
        self._counting = True
        sys.setprofile(self._note)
        try:
            work()
        finally:
            sys.setprofile(None)
            self._counting = False
        hops = [
            f"{Path(path).name}:{line} {name}" for (path, line, name), counts in self._hops.items() if counts
        ]
        return Passed(len(self._found), sum(self._found.values()), hops)


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
        functions, calls, hops = CallCount().of(step)
        spent, stats = profile(step, rounds)
    if show:
        stats.sort_stats("tottime").print_stats(show)
    return {
        "wall_ms": wall * 1e3,
        "host_ms": statistics.median(alone) * 1e3,
        "functions": functions,
        "calls": calls,
        "hops": len(hops),
        "profiled_us": spent,
    }


# ---- other paths


def warm_count(count: CallCount, work: Callable[[], object]) -> Passed:
    for _ in range(4):
        work()
    return count.of(work)


def training_step(tables: Any) -> Callable[[], None]:
    """A step of the model with one id per feature, over these shards."""
    layout = Layout("all", [Slice(name, 0, 16) for name in NAMES])
    collection = EmbeddingCollection(tables, [Feature(name, name) for name in NAMES], layouts=[layout])
    generator = torch.Generator().manual_seed(0)
    batches = cycle([make_batch("single", 1024, generator, "cpu") for _ in range(4)])
    gradient = torch.full((1024, FEATURES * 16), 1e-3)
    return lambda: collection(next(batches))["all"].backward(gradient)


def configs() -> list[TableConfig]:
    return [TableConfig(name, dim=16, optimizer=Adagrad(0.05)) for name in NAMES]


def rank_step(rank: int, folder: str, found: Any) -> None:
    torch.set_num_threads(1)
    count = CallCount()
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    result = warm_count(count, training_step(configs()))
    if rank == 0:
        found.put(result)
    dist.barrier()
    dist.destroy_process_group()


def sync_step(folder: Path) -> Passed:
    context = torch.multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    torch.multiprocessing.start_processes(rank_step, (str(folder), found), nprocs=2, start_method="spawn")
    result: Passed = found.get()
    return result


def server_step() -> Passed:
    count = CallCount()
    with ServerShards(configs(), num_servers=2) as shards:
        step = training_step(shards)

        def whole() -> None:
            step()
            shards.flush()

        return warm_count(count, whole)


def served_paths(folder: Path) -> dict[str, Passed]:
    """A request, a push and a save; grpc's threads and those of the publisher are counted too."""
    from serving_roles import SYNC_NAME, SYNC_TABLE, sync_model

    from megalith import checkpoint
    from megalith.serving import Publisher, export_model
    from megalith.serving.client.predict_client import PredictClient
    from megalith.serving.discovery import StaticDiscovery
    from megalith.serving.server.model_server import ModelServer
    from megalith.serving.server.server_config import ServerConfig

    count, model, ids = CallCount(), sync_model(), torch.arange(100)
    shards = model.embeddings.shards
    shards.apply_gradients({SYNC_TABLE: ids}, {SYNC_TABLE: torch.ones(100, 16)}, step=0)
    export_model(model, folder / "export", name=SYNC_NAME, version=1)
    with ModelServer(folder / "export", ServerConfig(allow_writes=True)) as server:
        with PredictClient(f"static:{server.address}", SYNC_NAME) as client:
            predict = warm_count(count, lambda: client.predict({SYNC_TABLE: ids[:32]}, timeout=60.0))
        with Publisher(model, StaticDiscovery([server.address]), model_name=SYNC_NAME, interval=3600) as out:

            def push() -> None:
                shards.apply_gradients({SYNC_TABLE: ids}, {SYNC_TABLE: torch.ones(100, 16)}, step=0)
                out.flush(60.0)

            pushed = warm_count(count, push)
    saved = warm_count(count, lambda: checkpoint.save(model.embeddings, folder / "checkpoint"))
    return {"Predict, client and server": predict, "push, publisher and server": pushed, "save": saved}


def other_paths() -> dict[str, Passed]:
    with TemporaryDirectory() as folder:
        served = served_paths(Path(folder))
        return {"sync, rank 0 of 2": sync_step(Path(folder)), "2 servers, worker": server_step(), **served}


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
    parser.add_argument("--paths", action="store_true", help="count the calls of other paths too")
    parser.add_argument("--hops", help="with --paths, list the hops of the paths with this beginning")
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
    paths = other_paths() if options.paths else {}
    if paths:
        rows = [[name, str(own.functions), str(own.calls), str(len(own.hops))] for name, own in paths.items()]
        print_table("Other paths", ["path", "functions", "calls", "hops"], rows)
        for name, own in paths.items():
            if options.hops and name.startswith(options.hops):
                print(name, *own.hops, sep="\n  ")
    content = {
        "benchmark": "overhead",
        "command": command_line(arguments),
        "machine": machine(),
        "versions": versions(("megalith", "torch", "triton")),
        "results": results,
        "paths": {
            name: {"functions": own.functions, "calls": own.calls, "hops": len(own.hops)}
            for name, own in paths.items()
        },
    }
    write_result(options.output or result_path(f"overhead_{options.device}"), content)


if __name__ == "__main__":
    main(sys.argv[1:])
