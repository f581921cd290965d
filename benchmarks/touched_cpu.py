"""Touched rows of the cpu table: the time to drain them, and how long training calls wait meanwhile.

    python benchmarks/touched_cpu.py [--quick] [--only NAME,...] [--output PATH]

    drain  `Table.drain_touched` of 10,000 touched rows of a table with 1e7 rows, against a walk over all
           flags, as the table did before (WALK: the same two loops, compiled with the options of the
           library). Variants take turns; one-thread CPU time, median of paired ratios. Once with caches as
           the training of the rows left them, once with cold caches: the walk reads memory in order, so it is
           not slower then.
    stall  the longest training call while another thread drains, divided by the longest one without. Before
           each run of calls 1e6 rows are touched, so that a large drain is in progress. Wall time; one thread
           trains.

A full run saves results/touched_cpu-DATE.json.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from harness import Run, Spread, geometric_mean, print_table, run_sections
from torch import Tensor
from workloads import FILL_CHUNK, new_weights, random_keys, short

from megalith.table import Adagrad, Table, TableConfig

DIM = 16
TOUCHED = 10_000
CALL = 16_384
CONSUMER = "benchmark"
CHUNK_SHIFT = 19
COMPILE = ("c++", "-std=c++17", "-O3", "-march=x86-64-v2", "-fPIC", "-shared")
WALK = """
#include <cstdint>
#include <vector>
struct Rows {
  uint32_t shift;
  int64_t high;
  std::vector<uint8_t*> flags;
  std::vector<int64_t*> ids;
  int32_t mask() const { return static_cast<int32_t>((1u << shift) - 1); }
  uint8_t& flag(int32_t row) const { return flags[row >> shift][row & mask()]; }
  int64_t& id_of(int32_t row) const { return ids[row >> shift][row & mask()]; }
};
extern "C" int64_t walk(uint8_t* flags, int64_t* ids, int64_t high, uint32_t shift, uint8_t bit,
                        int64_t* out) {
  Rows rows{shift, high, {}, {}};
  for (int64_t r = 0; r < high; r += int64_t{1} << shift) {
    rows.flags.push_back(flags + r);
    rows.ids.push_back(ids + r);
  }
  std::vector<int64_t> updated;
  for (int64_t r = 0; r < rows.high; ++r) {
    const int32_t row = static_cast<int32_t>(r);
    if (rows.flag(row) & bit) updated.push_back(rows.id_of(row));
  }
  for (int64_t r = 0; r < rows.high; ++r) rows.flag(static_cast<int32_t>(r)) &= static_cast<uint8_t>(~bit);
  for (int64_t id : updated) *out++ = id;
  return static_cast<int64_t>(updated.size());
}
"""


class Walk:
    """A flag and an id for each row, and the walk over all of them."""

    def __init__(self, rows: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "walk.cpp", Path(folder) / "walk.so"
            source.write_text(WALK)
            subprocess.run([*COMPILE, str(source), "-o", str(library)], check=True)
            self._call = ctypes.CDLL(str(library)).walk
        self._call.restype = ctypes.c_int64
        self.flags = torch.zeros(rows, dtype=torch.uint8)
        self.ids = torch.arange(rows)
        self.out = torch.empty(rows, dtype=torch.int64)

    def drain(self) -> Tensor:
        pointers = (ctypes.c_void_p(x.data_ptr()) for x in (self.flags, self.ids))
        sizes = (ctypes.c_int64(self.ids.numel()), ctypes.c_uint32(CHUNK_SHIFT), ctypes.c_uint8(1))
        return self.out[: self._call(*pointers, *sizes, ctypes.c_void_p(self.out.data_ptr()))]


def new_table(keys: Tensor) -> Table:
    """A tracked table with a row for each key, none of them touched."""
    table = Table(TableConfig("t", dim=DIM, optimizer=Adagrad(lr=0.01)), engine="cpu")
    table.reserve(keys.numel())
    for part in keys.split(FILL_CHUNK):
        table.assign(part, new_weights(part.numel(), DIM))
    table.track(CONSUMER)
    return table


class TouchedRun(Run):
    """The table of this run, and its results so far."""

    def __init__(self, quick: bool) -> None:
        super().__init__(quick)
        self.keys = random_keys(10**6 if quick else 10**7)
        self.table = new_table(self.keys)

    def choose(self, n: int, seed: int) -> Tensor:
        """Row numbers, int64 [n]; few are equal."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.keys.numel(), (n,), generator=generator)


def seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def drain(run: TouchedRun) -> None:
    walk = Walk(run.keys.numel())
    for caches, required in (("after training", 100), ("cold", None)):
        times = drain_times(run, walk, cold=caches == "cold")
        ratio = Spread.of([a / b for a, b in zip(times["walk"], times["drain"], strict=True)])
        record = {name: Spread.of([t * 1e6 for t in ts]) for name, ts in times.items()}
        run.sections[f"drain, caches {caches}"] = {"microseconds": record, "ratio": ratio}
        rows = [[name, str(spread)] for name, spread in record.items()] + [["walk / drain", str(ratio)]]
        size = f"{TOUCHED} of {short(run.keys.numel())} rows"
        print_table(f"Draining {size}, caches {caches}, microseconds", ("variant", "time"), rows)
        run.bar(f"walk over all flags / drain, caches {caches}", ratio.median, required, note=size)


def drain_times(run: TouchedRun, walk: Walk, cold: bool) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"drain": [], "walk": []}
    trash = torch.zeros(100 << 20, dtype=torch.uint8)
    for r in range(4 if run.quick else 31):
        chosen = run.choose(TOUCHED, r).unique()
        ids = run.keys[chosen]
        gradients = torch.ones(ids.numel(), DIM)
        found: dict[str, Tensor] = {}
        calls = {
            "drain": lambda found=found: found.update(ours=run.table.drain_touched(CONSUMER)[0]),
            "walk": lambda found=found: found.update(walk=walk.drain()),
        }
        for name in sorted(calls, reverse=bool(r % 2)):
            if name == "drain":
                run.table.apply_gradients(ids, gradients, step=r)
            else:
                walk.flags[chosen] = 1
            if cold:
                trash.add_(1)
            elapsed = seconds(calls[name])
            if r > 0:
                times[name].append(elapsed)
        assert torch.equal(found["ours"].sort().values, ids.sort().values)
        assert torch.equal(found["walk"].sort().values, chosen)
    return times


def longest_call(run: TouchedRun, draining: bool, calls: int, seed: int) -> tuple[float, int]:
    """Returns the longest of some training calls, in seconds, and the number of drained rows."""
    table, drained = run.table, 0
    table.drain_touched(CONSUMER)
    table.mark_touched(CONSUMER, run.keys[run.choose(run.keys.numel() // 10, seed)])
    batches = [run.keys[run.choose(CALL, seed + k)] for k in range(8)]
    gradients = torch.ones(CALL, DIM)
    stop, started = threading.Event(), threading.Event()

    def work() -> None:
        nonlocal drained
        started.set()
        while not stop.is_set():
            drained += table.drain_touched(CONSUMER)[0].numel()
            time.sleep(0.001)

    thread = threading.Thread(target=work)
    if draining:
        thread.start()
        started.wait()
    longest = 0.0
    for k in range(calls):
        start = time.perf_counter()
        table.apply_gradients(batches[k % len(batches)], gradients, step=k)
        longest = max(longest, time.perf_counter() - start)
    stop.set()
    if draining:
        thread.join()
    return longest, drained


def stall(run: TouchedRun) -> None:
    calls, rounds = (20, 3) if run.quick else (100, 25)
    alone: list[float] = []
    draining: list[float] = []
    total = 0
    for r in range(rounds):
        for with_drain in (False, True) if r % 2 else (True, False):
            longest, drained = longest_call(run, with_drain, calls, 1000 * r)
            (draining if with_drain else alone).append(longest)
            total += drained
    ratio = Spread.of([a / b for a, b in zip(draining, alone, strict=True)])
    record = {
        "longest_alone_ms": Spread.of([t * 1e3 for t in alone]),
        "longest_while_draining_ms": Spread.of([t * 1e3 for t in draining]),
        "ratio": ratio,
        "ratio_of_geometric_means": geometric_mean(draining) / geometric_mean(alone),
        "calls": calls,
        "rounds": rounds,
        "ids_per_call": CALL,
        "drained_rows_per_round": total // rounds,
    }
    run.sections["stall"] = record
    print_table("Longest training call", ("quantity", "value"), [[k, str(v)] for k, v in record.items()])
    over = f"{rounds} rounds of {calls} calls"
    run.bar("longest call while draining / alone", ratio.median, 1.2, at_most=True, note=over)


SECTIONS: dict[str, Callable[[TouchedRun], None]] = {"drain": drain, "stall": stall}


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    run_sections("touched_cpu", arguments, TouchedRun, SECTIONS, ("megalith", "torch"))


if __name__ == "__main__":
    main(sys.argv[1:])
