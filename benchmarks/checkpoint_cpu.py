"""Saving and loading a table of 1e7 rows x dim 16 with Adagrad, against torch.save and the bare disk.

    python benchmarks/checkpoint_cpu.py [--rows N] [--rounds N] [--folder PATH] [--output PATH]

Every round writes the same bytes in several ways into one folder, each followed by fsync, in rotating
order: ours, raw blocks of 64 MiB, torch.save; then it reads them back from the page cache: ours (into an
empty table), raw, torch.load. "Insert" is `Table.restore` of the same rows from memory, which every reader
has to do. Extra memory is the process's high-water mark above its size before. The pause is how long
async_save blocked a training loop, in the call and while it waited for buffers. A full run saves
results/checkpoint_cpu-DATE.json.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from harness import (
    Bar,
    command_line,
    machine,
    print_bars,
    print_table,
    progress,
    result_path,
    versions,
    write_result,
)

from megalith import Adagrad, EmbeddingCollection, Feature, TableConfig, checkpoint
from megalith.table import Chunk

DIM, STEP_IDS = 16, 4096
BLOCK = 64 << 20
MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64
MIB = 1 << 20


def make_model() -> EmbeddingCollection:
    return EmbeddingCollection([TableConfig("t", dim=DIM, optimizer=Adagrad(0.05))], [Feature("f", "t")])


def fill(model: EmbeddingCollection, rows: int) -> None:
    for begin in range(0, rows, 1 << 18):
        ids = (torch.arange(begin, min(rows, begin + (1 << 18))) + 1) * MULTIPLIER
        model.shards.apply_gradients({"t": ids}, {"t": torch.randn(ids.numel(), DIM)}, step=0, time=1)


def train(model: EmbeddingCollection, rows: int, generator: torch.Generator) -> None:
    ids = (torch.randint(rows, (STEP_IDS,), generator=generator) + 1) * MULTIPLIER
    model.shards.apply_gradients({"t": ids}, {"t": torch.ones(STEP_IDS, DIM)}, step=1, time=2)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def raw_write(path: Path, data: list[memoryview]) -> None:
    with open(path, "wb", buffering=0) as file:
        for part in data:
            while part:
                part = part[file.write(part[:BLOCK]) :]
        os.fsync(file.fileno())


def raw_read(path: Path) -> None:
    block = bytearray(BLOCK)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass


def torch_save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


class Peak:
    """The peak memory of this process inside a `with`, in addition to its memory before."""

    def __enter__(self) -> Peak:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._field("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.extra = self._field("VmHWM") - self._before
        self.kept = self._field("VmRSS") - self._before

    @staticmethod
    def _field(name: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
        raise LookupError(name)


def measure_pause(model: EmbeddingCollection, rows: int, folder: Path) -> dict[str, float]:
    """Compares steps before and during an async_save."""
    generator = torch.Generator().manual_seed(0)
    usual = [timed(lambda: train(model, rows, generator)) for _ in range(200)]
    began = time.perf_counter()
    handle = checkpoint.async_save(model, folder)
    during = []
    while not handle.done():
        during.append(timed(lambda: train(model, rows, generator)))
    handle.wait()
    return {
        "save": time.perf_counter() - began,
        "frozen": handle.frozen,
        "waited": handle.waited,
        "pause": handle.frozen + handle.waited,
        "steps": len(during),
        "step before": statistics.median(usual),
        "step during": statistics.median(during),
        "longest step during": max(during),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args(arguments)
    torch.set_num_threads(2)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        run(options, folder, arguments)
    finally:
        shutil.rmtree(folder)


def run(options: argparse.Namespace, folder: Path, arguments: Sequence[str]) -> None:
    progress(f"filling a table of {options.rows:,} rows")
    model = make_model()
    fill(model, options.rows)
    bench = Bench(model)
    for number in range(options.rounds + 1):
        progress(f"round {number} of {options.rounds}")
        here = folder / str(number)
        here.mkdir()
        found = {name: bench.time(name, here) for name in _rotated(list(WRITES), number)}
        found |= {name: bench.time(name, here) for name in _rotated(list(READS), number)}
        shutil.rmtree(here)
        if number:  # the first is not counted
            for name, seconds in found.items():
                bench.times.setdefault(name, []).append(seconds)
    size = sum(len(part) for part in bench.data)
    memory = model.shards.local["t"].memory().total
    times, extra = bench.times, bench.extra
    del bench
    pauses = [measure_pause(model, options.rows, folder / "async") for _ in range(3)]
    report(times, extra, pauses, size, memory, options, arguments)


WRITES = ("save", "raw write", "torch.save")
READS = ("load", "raw read", "torch.load", "insert")


class Bench:
    """The same rows in all the forms from which they are written."""

    def __init__(self, model: EmbeddingCollection) -> None:
        self.model = model
        table = model.shards.local["t"]
        self.whole = next(iter(table.scan(len(table))))
        self.tensors = {
            "ids": self.whole.ids,
            "rows": self.whole.rows,
            "time": self.whole.time,
            **self.whole.state,
        }
        self.data = [memoryview(t.reshape(-1).view(torch.uint8).numpy()) for t in self.tensors.values()]
        self.times: dict[str, list[float]] = {}
        self.extra = {"save": 0, "load": 0}

    def time(self, name: str, here: Path) -> float:
        """Measures the seconds of one way to write or read in this folder."""
        gc.collect()
        os.sync()
        if name == "save":
            with Peak() as peak:
                seconds = timed(lambda: checkpoint.save(self.model, here / "ours"))
            self.extra["save"] = max(self.extra["save"], peak.extra)
            return seconds
        if name == "load":
            other = make_model()
            with Peak() as peak:
                seconds = load_into(other, here / "ours")
            self.extra["load"] = max(self.extra["load"], peak.extra - peak.kept)
            return seconds
        if name == "raw write":
            return timed(lambda: raw_write(here / "raw", self.data))
        if name == "torch.save":
            return timed(lambda: torch_save(here / "torch", self.tensors))
        if name == "raw read":
            return timed(lambda: raw_read(here / "raw"))
        if name == "torch.load":
            return timed(lambda: torch.load(here / "torch", weights_only=True))
        return insert(self.whole)


def load_into(model: EmbeddingCollection, path: Path) -> float:
    return timed(lambda: checkpoint.load(model, path, deltas=False))


def insert(whole: Chunk) -> float:
    """Measures the seconds to insert rows from memory into an empty table, one file's rows at a time."""
    table = make_model().shards.local["t"]
    table.reserve(whole.ids.numel())
    step = BLOCK // (16 + 8 * DIM)
    parts = [whole.part(i, min(i + step, whole.ids.numel())) for i in range(0, whole.ids.numel(), step)]
    return timed(lambda: [table.restore(part) for part in parts])


def report(
    times: dict[str, list[float]],
    extra: dict[str, int],
    pauses: list[dict[str, float]],
    size: int,
    memory: int,
    options: argparse.Namespace,
    arguments: Sequence[str],
) -> None:
    rows = []
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        rows.append((name, f"{middle:.2f}", spread, f"{size / middle / 1e9:.2f}"))
    print_table(f"{options.rows:,} rows, {size / 1e9:.2f} GB", ("what", "s", "all rounds", "GB/s"), rows)
    shown = [(name, *(f"{pause[name]:.4g}" for pause in pauses)) for name in pauses[0]]
    columns = ("seconds", *(f"run {number + 1}" for number in range(len(pauses))))
    print_table("async_save during training", columns, shown)

    def ratio(top: Sequence[str], bottom: Sequence[str]) -> float:
        pairs = zip(*(times[n] for n in (*top, *bottom)), strict=True)
        return statistics.median(sum(p[: len(top)]) / sum(p[len(top) :]) for p in pairs)

    pause = statistics.median(p["pause"] / p["save"] for p in pauses)
    allowed = max(0.05 * memory, 256 * MIB)
    bars = [
        Bar("save / raw write", ratio(["save"], ["raw write"]), 1.3, at_most=True),
        Bar("load / (raw read + insert)", ratio(["load"], ["raw read", "insert"]), 1.5, at_most=True),
        Bar("extra memory of save, MiB", extra["save"] / MIB, allowed / MIB, at_most=True),
        Bar("extra memory of load, MiB", extra["load"] / MIB, allowed / MIB, at_most=True),
        Bar("training pause / save", pause, 0.05, at_most=True),
        Bar("torch.save / save", ratio(["torch.save"], ["save"])),
        Bar("torch.load / load", ratio(["torch.load"], ["load"])),
    ]
    print_bars(bars)
    content = {
        "benchmark": "checkpoint_cpu",
        "command": command_line(arguments),
        "machine": machine(),
        "versions": versions(("megalith", "torch", "numpy")),
        "rows": options.rows,
        "bytes": size,
        "seconds": times,
        "async_save": pauses,
        "extra_bytes": extra,
        "bars": bars,
    }
    if options.output or options.rows >= 10_000_000:
        write_result(options.output or result_path("checkpoint_cpu"), content)


def _rotated(names: list[str], by: int) -> list[str]:
    k = by % len(names)
    return names[k:] + names[:k]


if __name__ == "__main__":
    main(sys.argv[1:])
