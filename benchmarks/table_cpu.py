"""The cpu table against its peers: pooled training step, lookup, find, growth, memory.

    python benchmarks/table_cpu.py [--quick] [--only NAME,... [--workloads TEXT,...]] [--output PATH]

Method: one process, variants take turns on rotated batches, one-thread CPU time, medians of paired ratios
(harness.py); workloads and peers are in workloads.py. Results are compared before anything is timed. The last
table lists every target and whether it is met. --workloads "K=1e6 d16 100k,zipf" keeps the workloads whose
name holds one of the texts. A full run saves results/table_cpu-DATE.json; a --quick or --only run saves only
to the path given by --output.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from growth import CALL, growth_stall, memory_after_growth
from harness import (
    Run,
    Spread,
    Timings,
    busiest_thread,
    geometric_mean,
    huge_page_bytes,
    interleave,
    print_table,
    progress,
    run_child,
    run_sections,
)
from workloads import (
    BagPeer,
    Batch,
    Batches,
    ManagedCollision,
    Ours,
    TbePeer,
    Variant,
    Workload,
    installed,
    new_weights,
    random_keys,
    short,
)

from megalith import _native

PACKAGES = ("megalith", "torch", "fbgemm_gpu-cpu", "torchrec", "numpy")
PEER_NAMES = {"tbe": "FBGEMM TBE", "bag": "nn.EmbeddingBag", "managed collision": "torchrec MCH"}
HUGE_PAGES = "glibc.malloc.hugetlb=1"


class TableRun(Run):
    """Sizes and rounds of this run, and its results so far. `texts`: parts of names of workloads."""

    def __init__(self, texts: Sequence[str], quick: bool) -> None:
        super().__init__(quick)
        self.texts = texts
        self.table_rows = [10**5, 10**6] if quick else [10**6, 10**7]
        self.batch_ids = [100_000, 1_000_000]
        self.peers = {peer: peer == "bag" or installed(peer) for peer in PEER_NAMES}
        if missing := self.missing_peers():
            print(f"not installed, skipped: {', '.join(missing)}")
        self._batches: dict[int, Batches] = {}

    def rounds(self, ids: int) -> int:
        if self.quick:
            return 3
        return 25 if ids <= 100_000 else 13

    def batches(self, rows: int) -> Batches:
        if rows not in self._batches:
            self._batches[rows] = Batches(random_keys(rows))
        return self._batches[rows]

    def forget_batches(self) -> None:
        self._batches.clear()

    def workloads(self) -> list[Workload]:
        return self.chosen(
            Workload(rows, 16, ids, spread)
            for rows in self.table_rows
            for ids in self.batch_ids
            for spread in ("uniform", "zipf")
        )

    def chosen(self, workloads: Iterable[Workload]) -> list[Workload]:
        """Keeps the workloads that the command line names; all without names."""
        return [w for w in workloads if not self.texts or any(text in str(w) for text in self.texts)]

    def missing_peers(self) -> list[str]:
        return [PEER_NAMES[peer] for peer, there in self.peers.items() if not there]

    def facts(self) -> dict[str, Any]:
        known = {"kernels": _native.kernels(), "missing_peers": self.missing_peers()}
        return known | ({"only_workloads": list(self.texts)} if self.texts else {})


PEERS: dict[str, Callable[[str, torch.Tensor], TbePeer | BagPeer]] = {
    "tbe": TbePeer,
    "bag": BagPeer,
}


# ---- verification


def verify(run: TableRun) -> None:
    """Checks that all variants have the same weights after 3 steps on duplicated ids."""
    keys = random_keys(1000)
    batches = Batches(keys)
    worst: dict[str, float] = {}
    for optimizer, peers in (
        ("adagrad", ["tbe", "bag"]),
        ("sgd", ["tbe", "bag"]),
        ("rowwise_adagrad", ["tbe"]),
        ("adam", ["bag"]),
    ):
        weights = new_weights(keys.numel(), 16)
        ours = Ours(optimizer, keys, 16, weights)
        others = {p: PEERS[p](optimizer, weights.clone()) for p in peers if run.peers[p]}
        for batch in batches(Workload(keys.numel(), 16, 16_000, "uniform"))[:3]:
            for variant in (ours, *others.values()):
                process, thread = time.process_time(), time.thread_time()
                variant.step(batch)
                process, thread = time.process_time() - process, time.thread_time() - thread
                assert process < 1.2 * thread + 1e-3, "a variant worked in another thread"
            for name, peer in others.items():
                error = (ours.lookup(batch) - peer.lookup(batch)).abs().max().item()
                rows = (ours.table.lookup(keys) - peer.weights()).abs().max().item()
                worst[f"{optimizer} {name}"] = max(error, rows, worst.get(f"{optimizer} {name}", 0))
    progress("  largest difference: " + ", ".join(f"{k} {v:.1e}" for k, v in worst.items()))
    assert max(worst.values(), default=0.0) < 1e-5, f"variants disagree: {worst}"
    run.sections["verify"] = worst


# ---- steps and lookups


def build(optimizer: str, rows: int, dim: int, peer: str) -> Variant:
    return PEERS[peer](optimizer, new_weights(rows, dim))


def compare(
    run: TableRun, optimizer: str, workloads: Sequence[Workload], peers: Sequence[str], lookup: bool
) -> list[dict[str, Any]]:
    """Compares our step (and lookup) with the peers', for workloads ordered by table size."""
    records = []
    peers = [peer for peer in peers if run.peers[peer]]
    variants: dict[str, Any] = {}
    built = None
    for workload in workloads:
        if built != (workload.rows, workload.dim):
            variants.clear()
            built = (workload.rows, workload.dim)
            variants = {peer: build(optimizer, *built, peer) for peer in peers}
            variants["ours"] = Ours(optimizer, run.batches(workload.rows).keys, workload.dim)
        records.append(measure(run, optimizer, workload, variants, lookup))
    return records


def measure(
    run: TableRun, optimizer: str, workload: Workload, variants: dict[str, Any], lookup: bool
) -> dict[str, Any]:
    batches = run.batches(workload.rows)(workload)
    rounds = run.rounds(workload.ids)
    unique = batches[0].dense.unique().numel() / workload.ids
    record: dict[str, Any] = {"workload": str(workload), "unique_share": unique}
    calls = {name: variant.step for name, variant in variants.items()}
    note(record, "step", interleave(calls, batches, rounds), workload.ids)
    if lookup:
        calls = {name: variant.lookup for name, variant in variants.items()}
        calls["find"] = variants["ours"].find
        note(record, "lookup", interleave(calls, batches, rounds), workload.ids)
    progress(f"  {optimizer} {workload}: " + ", ".join(texts(record)))
    return record


def note(record: dict[str, Any], what: str, times: Timings, ids: int) -> None:
    record[f"{what}_ns_per_id"] = {n: times.median(n) / ids * 1e9 for n in times.seconds}
    record[f"{what}_ratio"] = {n: times.ratio(n, "ours") for n in times.seconds if n not in ("ours", "find")}


def texts(record: dict[str, Any]) -> list[str]:
    found = []
    for what in ("step", "lookup"):
        for peer, ratio in record.get(f"{what}_ratio", {}).items():
            found.append(f"{what} x{ratio.median:.2f} {peer}")
    return found


def ratios(records: Sequence[dict[str, Any]], what: str, peer: str) -> list[float]:
    return [r[f"{what}_ratio"][peer].median for r in records if peer in r[f"{what}_ratio"]]


def print_records(title: str, records: Sequence[dict[str, Any]]) -> None:
    """Prints ns per id and, for peers, the ratio to ours."""
    for what in ("step", "lookup"):
        if not records or f"{what}_ratio" not in records[0]:
            continue
        names = list(records[0][f"{what}_ns_per_id"])
        order = [n for n in ("ours", "find", "tbe", "bag") if n in names]
        rows = []
        for r in records:
            cells = [r["workload"], f"{r['unique_share']:.2f}"]
            for name in order:
                cell = f"{r[f'{what}_ns_per_id'][name]:.1f}"
                if name in r[f"{what}_ratio"]:
                    cell += f"  x{r[f'{what}_ratio'][name]}"
                cells.append(cell)
            rows.append(cells)
        print_table(f"{title}: {what}, ns per id", ("workload", "unique", *order), rows)


def pair_of_bars(
    run: TableRun,
    name: str,
    numbers: list[float],
    required: tuple[float, float],
    goals: tuple[float | None, float | None] = (None, None),
) -> None:
    """Adds targets for the geometric mean and the worst of some ratios, in that order."""
    if not numbers:
        return
    over = f"{len(numbers)} workloads"
    run.bar(f"{name}, geomean", geometric_mean(numbers), required[0], goal=goals[0], note=over)
    run.bar(f"{name}, worst", min(numbers), required[1], goal=goals[1], note=over)


def adagrad(run: TableRun) -> None:
    """Bars 1, 2, 4, 5: Adagrad step and lookup over the eight dim-16 workloads."""
    records = compare(run, "adagrad", run.workloads(), ["tbe", "bag"], lookup=True)
    run.sections["adagrad"] = records
    print_records("Adagrad", records)
    for name, what, peer, required, goals in (
        ("Adagrad step vs TBE", "step", "tbe", (2.6, 2.0), (3.0, 2.1)),
        ("Adagrad step vs EmbeddingBag+Adagrad", "step", "bag", (7, 5), (None, None)),
        ("lookup vs TBE", "lookup", "tbe", (0.78, 0.62), (0.9, None)),
        ("lookup vs EmbeddingBag", "lookup", "bag", (0.65, 0.45), (None, None)),
    ):
        pair_of_bars(run, name, ratios(records, what, peer), required, goals)


def wide(run: TableRun) -> None:
    """Bar 3: Adagrad step at dim 64."""
    rows = run.table_rows[-1]
    workloads = run.chosen(Workload(rows, 64, 100_000, spread) for spread in ("uniform", "zipf"))
    records = compare(run, "adagrad", workloads, ["tbe"], lookup=True)
    run.sections["wide"] = records
    print_records("Adagrad, dim 64", records)
    if numbers := ratios(records, "step", "tbe"):
        run.bar("Adagrad step d64 vs TBE, worst", min(numbers), 2.2, note="2 workloads")


def other(run: TableRun, optimizer: str, peer: str, name: str, required: float, strict: bool) -> None:
    records = compare(run, optimizer, run.workloads(), [peer], lookup=False)
    run.sections[optimizer] = records
    print_records(optimizer, records)
    if numbers := ratios(records, "step", peer):
        over = f"{len(numbers)} workloads, worst {min(numbers):.2f}"
        mean = geometric_mean(numbers)
        run.bar(f"{name}, geomean", mean, required, strict=strict, note=over)


def sgd(run: TableRun) -> None:
    other(run, "sgd", "tbe", "SGD step vs TBE", 1.0, strict=True)


def rowwise(run: TableRun) -> None:
    other(run, "rowwise_adagrad", "tbe", "row-wise Adagrad step vs TBE", 1.0, strict=True)


def adam(run: TableRun) -> None:
    other(run, "adam", "bag", "Adam step vs EmbeddingBag+SparseAdam", 5.0, strict=False)


# ---- find, threads, one call


def find(run: TableRun) -> None:
    """Bar 6: raw key -> row, every key known, against torchrec's eval remap."""
    records = []
    if not run.peers["managed collision"]:
        return
    for rows in run.table_rows:
        keys = run.batches(rows).keys
        ours, peer = Ours("sgd", keys, 4), ManagedCollision(keys)
        for spread in ("uniform", "zipf"):
            workload = Workload(rows, 4, 100_000, spread)
            batches = run.batches(rows)(workload)
            assert torch.equal(peer.remap(batches[0]), batches[0].dense)
            assert bool((ours.find(batches[0]) >= 0).all())
            calls = {"ours": ours.find, "managed collision": peer.remap}
            times = interleave(calls, batches, run.rounds(workload.ids))
            record: dict[str, Any] = {"workload": f"K={short(rows)} 100k {spread}"}
            note(record, "find", times, workload.ids)
            records.append(record)
            progress(f"  {record['workload']}: x{record['find_ratio']['managed collision']}")
    run.sections["find"] = records
    numbers = ratios(records, "find", "managed collision")
    run.bar("find vs managed-collision remap, worst", min(numbers), 12, note="4 workloads")


def threads(run: TableRun) -> None:
    """Bar 9: one-thread CPU time / the busiest thread's CPU time with two threads.

    If other processes use the second core, the caller's thread takes over work and the gain looks smaller:
    rounds that had to wait for a core are dropped as long as three others remain.
    """
    records = []
    for rows in run.table_rows:
        workload = Workload(rows, 16, 100_000, "uniform")
        batches = run.batches(rows)(workload)
        ours = Ours("adagrad", run.batches(rows).keys, 16)

        def steps(ours: Ours = ours, batches: list[Batch] = batches) -> None:
            for batch in batches:
                ours.step(batch)

        gains, quiet, walls = [], [], []
        for _ in range(3 if run.quick else 30):
            torch.set_num_threads(1)
            one, one_wall = busiest_thread(steps)
            torch.set_num_threads(2)
            two, two_wall = busiest_thread(steps)
            gains.append(one / two)
            walls.append(one_wall / two_wall)
            if two_wall < 1.3 * two:
                quiet.append(one / two)
        torch.set_num_threads(1)
        counted = quiet if len(quiet) >= 3 else gains
        record: dict[str, Any] = {
            "workload": str(workload),
            "cpu": Spread.of(counted),
            "wall": Spread.of(walls),
        }
        record |= {"cpu_all_rounds": Spread.of(gains), "rounds": len(gains), "quiet": len(quiet)}
        records.append(record)
        progress("  " + ", ".join(f"{k} {v}" for k, v in record.items()))
    run.sections["threads"] = records
    worst = min(r["cpu"].median for r in records)
    over = f"100k uniform, {sum(r['quiet'] for r in records)} quiet rounds"
    run.bar("two threads (one-thread CPU / busiest thread), worst", worst, 1.6, note=over)


def call(run: TableRun) -> None:
    """Measures the cost of a call to the native module with two tensors."""
    ids, values = torch.arange(64), torch.zeros(64, 16)
    check = _native.check_tensors
    repeats = 20_000
    costs = []
    for _ in range(9):
        start = time.thread_time()
        for _ in range(repeats):
            check(ids, values)
        costs.append((time.thread_time() - start) / repeats * 1e6)
    cost = Spread.of(costs)
    run.sections["call"] = {"microseconds": cost}
    run.bar("one native call, microseconds", cost.median, 1.0, at_most=True, strict=True)


# ---- growth and memory


def growth(run: TableRun) -> None:
    """Bar 10: the longest call while the index grows, against rebuilding it at once."""
    rows = run.table_rows[-1]
    run.sections["growth"] = section = {"table": "dim 1, SGD", "ids_a_call": CALL}
    for memory, required in (("warm", 0.05), ("fresh", None)):
        record = growth_stall(rows, memory == "warm", runs=1 if run.quick else 5)
        section[f"{memory} memory"] = record
        name = f"longest growth stall / one-shot rebuild, {memory} memory"
        over = f"{short(rows)} rows, calls of {CALL}"
        run.bar(name, record["ratio"], required, at_most=True, note=over)


def memory(run: TableRun) -> None:
    """Bar 11: bytes per row in addition to weights and state just after growth; small rows stay small."""
    records = {f"dim {dim} SGD": memory_after_growth(run.table_rows[-1], dim) for dim in (1, 3)}
    run.sections["memory"] = records
    most = max(r["beyond_weights_and_state"] for r in records.values())
    three = records["dim 3 SGD"]
    run.bar("bytes per row in addition to weights and state after growth", most, 40, at_most=True)
    run.bar("stored bytes of a 12-byte row (not padded)", three["row_bytes"], 12, at_most=True)
    held = three["resident_bytes"]
    run.bar("resident bytes a 12-byte row, index and all", held, 64, at_most=True, strict=True)


# ---- bars 1 and 4 with huge pages for the peers


def hugepages(run: TableRun) -> None:
    """Measures in a child process whose malloc uses 2 MiB pages; our tables always use them."""
    if HUGE_PAGES in os.environ.get("GLIBC_TUNABLES", ""):
        run.sections["hugepages"] = with_huge_pages(run)
        return
    run.forget_batches()
    arguments = ["--only", "hugepages", *(["--quick"] if run.quick else [])]
    arguments += ["--workloads", ",".join(run.texts)] if run.texts else []
    child = run_child(arguments, {"GLIBC_TUNABLES": HUGE_PAGES})
    run.sections["hugepages"] = child["sections"]["hugepages"]
    records = run.sections["hugepages"]["workloads"]
    for record in records:
        for what in ("step_ratio", "lookup_ratio"):
            record[what] = {peer: Spread(**ratio) for peer, ratio in record[what].items()}
    print_records("Adagrad, 2M pages for the peers", records)
    for what, title in (("step", "Adagrad step"), ("lookup", "lookup")):
        if numbers := ratios(records, what, "tbe"):
            over = f"{len(numbers)} workloads, K={short(run.table_rows[-1])}"
            name = f"{title} vs TBE on 2M pages"
            run.bar(f"{name}, geomean", geometric_mean(numbers), note=over)
            run.bar(f"{name}, worst", min(numbers), note=over)


def with_huge_pages(run: TableRun) -> dict[str, Any]:
    rows = run.table_rows[-1]
    before = huge_page_bytes()
    variants: dict[str, Any] = {p: build("adagrad", rows, 16, p) for p in PEERS if run.peers[p]}
    share = (huge_page_bytes() - before) / (len(variants) * rows * 16 * 8)
    progress(f"  {share:.0%} of the peers' memory is on 2M pages")
    assert share > 0.9, "the peers did not get huge pages"
    variants["ours"] = Ours("adagrad", run.batches(rows).keys, 16)
    workloads = [w for w in run.workloads() if w.rows == rows]
    records = [measure(run, "adagrad", w, variants, lookup=True) for w in workloads]
    return {"peer_share_on_huge_pages": share, "workloads": records}


# ---- the command


SECTIONS: dict[str, Callable[[TableRun], None]] = {
    "verify": verify,
    "call": call,
    "adagrad": adagrad,
    "sgd": sgd,
    "rowwise": rowwise,
    "adam": adam,
    "wide": wide,
    "find": find,
    "threads": threads,
    "growth": growth,
    "memory": memory,
    "hugepages": hugepages,
}


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Set explicitly, because torch warns otherwise: sparse gradients are not checked.
    torch.sparse.check_sparse_tensor_invariants.disable()
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--workloads", default="")
    own, others = parser.parse_known_args(arguments)
    if own.workloads and "--only" not in others:
        parser.error("--workloads needs --only: it is not a full run")
    texts = [text for text in own.workloads.split(",") if text]
    run_sections("table_cpu", others, partial(TableRun, texts), SECTIONS, PACKAGES)


if __name__ == "__main__":
    main(sys.argv[1:])
