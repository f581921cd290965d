"""Tables with policies and other optimizers: what they cost, and every optimizer against torch.optim.

    python benchmarks/policies_cpu.py [--quick] [--only NAME,...] [--output PATH]

Method: as in table_cpu.py: one process, variants take turns on rotated batches, one-thread CPU time, medians
of paired ratios. A step is forward, pool, backward and update of 100,000 ids in bags of 8. torch.optim's SGD,
Adagrad and SparseAdam take sparse gradients; its other optimizers reject them, so their EmbeddingBag has
dense gradients. Optimizers that torch lacks are compared with our Adagrad.

    optimizers  every optimizer against torch.optim
    policies    TTL + MinCount + Capacity on the Adagrad step. The table is at its capacity. Of the ids of a
                batch, 3 % are new and are refused, and the 3 % that were new in the batch before get rows,
                for which others are evicted. The plain table gets the same batches and grows. Each step
                includes a thousandth of a pass of eviction, as with evict_every=1000.
    search      the longest update of one id that has to make room, while the rows with low scores are far
                from where the search for them continues
    passes      the longest wait for eviction, divided by the time of a whole pass: for a training step that
                makes a part of a pass, for a thread that waits for the lock of the table, and for a write
                that makes room by a score function
    quality     hits of Capacity divided by the hits of exact LRU and LFU, on ids from a drifting Zipf law

A full run saves results/policies_cpu-DATE.json. It takes about 5 minutes on an idle machine.
"""

from __future__ import annotations

import gc
import heapq
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from harness import Bar, Run, Spread, interleave, print_table, progress, run_sections
from torch import Tensor
from workloads import BAG, Batch, Batches, Ours, Workload, new_weights, random_keys

from megalith.table import (
    FTRL,
    LAMB,
    SGD,
    TTL,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    AMSGrad,
    Capacity,
    Chunk,
    DelayCompensated,
    DynamicWdAdagrad,
    FixedPoint,
    GroupAdagrad,
    GroupFTRL,
    Lion,
    MinCount,
    Momentum,
    MovingAverage,
    OneBit,
    Optimizer,
    RMSProp,
    RMSPropV2,
    RowWiseAdagrad,
    State,
    Table,
    TableConfig,
)
from megalith.table.engines.shard_capacity import PARTS, VISITED
from megalith.table.eviction_pass import EVICT_PARTS, MIN_EVICT_ROWS

LR = 0.01
Maker = Callable[[list[Tensor]], torch.optim.Optimizer]


class AdagradInTorch(Optimizer):
    """Adagrad as a user would write it: what a step in torch costs."""

    name: ClassVar[str] = "adagrad in torch"

    def states(self, dim: int) -> tuple[State, ...]:
        return (State("sum", dim),)

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        state["sum"].addcmul_(grads, grads)
        rows.addcdiv_(grads, state["sum"].sqrt().add_(1e-10), value=-lr)


SPARSE: dict[str, tuple[Optimizer, Maker]] = {
    "SGD": (SGD(LR), lambda p: torch.optim.SGD(p, lr=LR)),
    "Adagrad": (Adagrad(LR), lambda p: torch.optim.Adagrad(p, lr=LR)),
    "Adam": (Adam(LR), lambda p: torch.optim.SparseAdam(p, lr=LR)),
}
"""torch's optimizer takes sparse gradients."""

DENSE: dict[str, tuple[Optimizer, Maker]] = {
    "Momentum": (Momentum(LR), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9)),
    "AdamW": (AdamW(LR), lambda p: torch.optim.AdamW(p, lr=LR)),
    "AMSGrad": (AMSGrad(LR), lambda p: torch.optim.Adam(p, lr=LR, amsgrad=True)),
    "Adadelta": (Adadelta(LR), lambda p: torch.optim.Adadelta(p, lr=LR)),
    "RMSProp": (RMSProp(LR), lambda p: torch.optim.RMSprop(p, lr=LR)),
}
"""torch's optimizer rejects sparse gradients, or does not save work with them."""

OURS: dict[str, Optimizer] = {
    "Adam, by row": Adam(LR, bias_correction="row"),
    "Adam, nesterov": Adam(LR, nesterov=True),
    "RowWiseAdagrad": RowWiseAdagrad(LR),
    "DynamicWdAdagrad": DynamicWdAdagrad(LR, weight_decay=0.01),
    "GroupAdagrad": GroupAdagrad(LR),
    "FTRL": FTRL(LR),
    "GroupFTRL": GroupFTRL(LR),
    "RMSPropV2": RMSPropV2(LR),
    "Lion": Lion(LR),
    "LAMB": LAMB(LR),
    "MovingAverage": MovingAverage(),
    "DelayCompensated(Adagrad)": DelayCompensated(Adagrad(LR)),
    "an Adagrad written in torch": AdagradInTorch(LR),
}
"""torch.optim does not have it."""


class TorchBag:
    """nn.EmbeddingBag with an optimizer of torch."""

    def __init__(self, make: Maker, weights: Tensor, sparse: bool) -> None:
        self.bag = torch.nn.EmbeddingBag.from_pretrained(
            weights, freeze=False, mode="sum", sparse=sparse, include_last_offset=True
        )
        self.optimizer = make([self.bag.weight])

    def step(self, batch: Batch) -> None:
        self.bag(batch.dense, batch.offsets).backward(batch.grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class PoliciesRun(Run):
    """Sizes of this run, and its results so far."""

    def __init__(self, quick: bool) -> None:
        super().__init__(quick)
        self.rows, self.ids = (10**5, 20_000) if quick else (10**6, 100_000)
        self.rounds = 3 if quick else 11


def optimizers(run: PoliciesRun) -> None:
    """Compares every optimizer with torch.optim, or with our Adagrad where torch has none."""
    keys = random_keys(run.rows)
    workload = Workload(run.rows, 16, run.ids, "uniform")
    batches = Batches(keys)(workload)
    baseline = Ours(Adagrad(LR), keys, 16)
    records = []
    for name, ours, peer in _pairs(run.rows):
        variants = {"ours": Ours(ours, keys, 16), "adagrad": baseline}
        calls: dict[str, Callable[[Batch], object]] = {k: v.step for k, v in variants.items()}
        if peer is not None:
            calls["torch"] = peer.step
        times = interleave(calls, batches, run.rounds)
        record: dict[str, Any] = {
            "optimizer": name,
            "ns_per_id": times.median("ours") / run.ids * 1e9,
            "of_adagrad": times.ratio("ours", "adagrad"),
        }
        if peer is not None:
            record["torch_ns_per_id"] = times.median("torch") / run.ids * 1e9
            record["ratio"] = times.ratio("torch", "ours")
            gradients = "sparse" if name in SPARSE else "dense"
            run.bars.append(Bar(f"{name} vs torch.optim, {gradients} gradients", record["ratio"].median, 3.0))
        records.append(record)
        progress(f"  {name}: {record['ns_per_id']:.0f} ns per id, x{record.get('ratio', '-')} torch")
    run.sections["optimizers"] = {"workload": str(workload), "records": records}
    print_table(
        f"Optimizer step, {workload}, ns per id",
        ("optimizer", "ours", "our Adagrad = 1", "torch.optim", "torch / ours"),
        [
            (
                r["optimizer"],
                f"{r['ns_per_id']:.1f}",
                str(r["of_adagrad"]),
                f"{r['torch_ns_per_id']:.1f}" if "ratio" in r else "-",
                str(r.get("ratio", "-")),
            )
            for r in records
        ],
    )


def _pairs(rows: int) -> Any:
    for pairs, sparse in ((SPARSE, True), (DENSE, False)):
        for name, (ours, make) in pairs.items():
            yield name, ours, TorchBag(make, new_weights(rows, 16), sparse)
    for name, ours in OURS.items():
        yield name, ours, None


# ---- the cost of policies

NEW = 0.03
"""Part of the ids of a batch that are new."""
WARM_UP = 40


class Drifting:
    """Batches of known ids, new ids, and the new ids of the batch before.

    Known ids are drawn from a window over all ids in the order of their arrival. It covers nine tenths of the
    capacity and moves on as new ids arrive.
    """

    def __init__(self, capacity: int, ids: int, dim: int, steps: int) -> None:
        self._new, self._dim = int(NEW * ids), dim
        self._keys = random_keys(capacity + (steps + 1) * self._new)
        self._capacity, self._known = capacity, ids - 2 * self._new
        self._at = 0
        self._generator = torch.Generator().manual_seed(3)

    @property
    def first(self) -> Tensor:
        """The ids that fill the table."""
        return self._keys[: self._capacity]

    def __call__(self) -> Batch:
        end = self._capacity + self._at
        picked = torch.randint(end - self._capacity * 9 // 10, end, (self._known,), generator=self._generator)
        ids = torch.cat([self._keys[picked], self._keys[end : end + 2 * self._new]])
        self._at += self._new
        ids = ids[torch.randperm(ids.numel(), generator=self._generator)]
        offsets = torch.arange(0, ids.numel() + 1, BAG)
        grad = torch.randn(offsets.numel() - 1, self._dim, generator=self._generator)
        return Batch(ids, ids, offsets, grad)


class WithPolicies(Ours):
    """A table at its capacity; its clock advances by a second per step."""

    def __init__(self, keys: Tensor, dim: int, **policies: Any) -> None:
        super().__init__(Adagrad(LR), keys, dim, **policies)
        self.time = 1000.0
        self._part = max(1, keys.numel() // 1000)
        self._has_passes = bool(policies.get("eviction"))

    def step(self, batch: Batch) -> None:
        assert self.time is not None
        self.time += 1
        super().step(batch)
        if self._has_passes:
            self.table.evict_part(self.time, rows=self._part)


def policies(run: PoliciesRun) -> None:
    """Compares the Adagrad step of a table with policies with that of a plain table."""
    ttl, count = TTL(1e6), MinCount(2)
    rounds = 2 * run.rounds
    steps = WARM_UP + rounds
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "TTL": {"eviction": [ttl]},
        "MinCount": {"admission": count},
        "Capacity, lru": {"eviction": [Capacity(run.rows)]},
        "TTL + MinCount + Capacity, lru": {"admission": count, "eviction": [ttl, Capacity(run.rows)]},
        "TTL + MinCount + Capacity, lfu": {
            "admission": count,
            "eviction": [ttl, Capacity(run.rows, score="lfu")],
        },
    }
    records: list[dict[str, Any]] = []
    for dim in (16, 64):
        draws = {name: Drifting(run.rows, run.ids, dim, steps) for name in variants}
        tables = {name: WithPolicies(draws[name].first, dim, **o) for name, o in variants.items()}
        for name, table in tables.items():
            for _ in range(WARM_UP):
                table.step(draws[name]())
        seconds: dict[str, list[float]] = {name: [] for name in tables}
        for number in range(rounds):
            names = list(tables)[number % len(tables) :] + list(tables)[: number % len(tables)]
            for name in names:
                batch = draws[name]()
                start = time.thread_time()
                tables[name].step(batch)
                seconds[name].append(time.thread_time() - start)
        for name, table in tables.items():
            ratio = Spread.of([a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)])
            counters = table.table.stats().counters
            per_id = sorted(seconds[name])[rounds // 2] / run.ids * 1e9
            records.append(
                {
                    "policies": name,
                    "dim": dim,
                    "ns_per_id": per_id,
                    "of_plain": ratio,
                    "evicted_per_step": counters.evicted / steps,
                    "refused_per_step": counters.refused / steps,
                }
            )
            progress(f"  d{dim} {name}: {per_id:.0f} ns per id, x{ratio}")
            if name.startswith("TTL +"):
                run.bars.append(Bar(f"{name}, d{dim}: step / plain step", ratio.median, 1.25, at_most=True))
    run.sections["policies"] = {"rows": run.rows, "ids": run.ids, "new_ids": NEW, "records": records}
    print_table(
        f"Adagrad step with policies, {run.rows:,} rows, {run.ids:,} ids, {NEW:.0%} of them new, ns per id",
        ("policies", "dim", "ns per id", "plain = 1", "evicted per step", "refused per step"),
        [
            (
                r["policies"],
                str(r["dim"]),
                f"{r['ns_per_id']:.1f}",
                str(r["of_plain"]),
                f"{r['evicted_per_step']:.0f}",
                f"{r['refused_per_step']:.0f}",
            )
            for r in records
        ],
    )


SEARCH_MS = 1.0
"""Longest allowed update of one id at a capacity, in milliseconds. A walk over 2 million rows takes 20."""


def search(run: PoliciesRun) -> None:
    """Measures how long an update of one id waits for room in a large table."""
    rows = 2 * run.rows
    keys = random_keys(rows + 3000)
    records: list[dict[str, Any]] = []
    for score in ("lru", "lfu"):
        table = Table(TableConfig("t", dim=16, optimizer=Adagrad(LR), eviction=Capacity(rows, score=score)))
        table.reserve(rows)
        # The last eighth of the rows is old; the search begins at the first row.
        for start in range(0, rows, 1 << 18):
            part = keys[start : min(rows, start + (1 << 18))]
            table.assign(part, new_weights(part.numel(), 16), time=100 if start < rows * 7 // 8 else 1)
        gradient, seconds = torch.ones(1, 16), []
        gc.collect()
        gc.disable()  # a collection of Python takes longer than the longest update
        for step, id in enumerate(keys[rows:].split(1)):
            begin = time.thread_time()
            table.apply_gradients(id, gradient, step=step, time=200)
            seconds.append(time.thread_time() - begin)
        gc.enable()
        ordered = sorted(seconds)
        record = {
            "score": score,
            "median_ms": ordered[len(ordered) // 2] * 1e3,
            "p999_ms": ordered[-3] * 1e3,
            "longest_ms": ordered[-1] * 1e3,
        }
        records.append(record)
        progress(f"  {record}")
        name = f"update of one id at a capacity of {rows:,} rows, {score}: longest of 3,000, ms"
        run.bars.append(Bar(name, ordered[-1] * 1e3, SEARCH_MS, at_most=True))
    run.sections["search"] = {"rows": rows, "records": records}
    print_table(
        f"Updates of one id in a full table of {rows:,} rows, CPU ms",
        ("score", "median", "99.9 %", "longest"),
        [(r["score"], *(f"{r[key]:.4f}" for key in ("median_ms", "p999_ms", "longest_ms"))) for r in records],
    )


def passes(run: PoliciesRun) -> None:
    """Measures how long a pass of eviction keeps a training step or another thread waiting."""
    rows = 4 * run.rows
    records: list[dict[str, Any]] = []
    for expired in (0.0, 0.1, 0.7):
        spread = [_timed_parts(_aged_table(rows, expired, together=False)) for _ in range(3)]
        together = [_timed_calls(_aged_table(rows, expired, together=True)) for _ in range(3)]
        record: dict[str, Any] = {
            "expired": expired,
            "seconds": sorted(sum(seconds) for seconds in together)[1],
            "parts": len(spread[0]),
            "longest_part_of_pass": sorted(max(seconds) / sum(seconds) for seconds in spread)[1],
            "longest_call_of_pass": sorted(max(seconds) / sum(seconds) for seconds in together)[1],
        }
        records.append(record)
        progress(f"  {record}")
        what = f"{expired:.0%} of {rows:,} rows expired"
        for name, key in (("evict_part", "longest_part_of_pass"), ("lock in evict", "longest_call_of_pass")):
            run.bars.append(Bar(f"longest {name} / whole pass, {what}", record[key], 0.05, at_most=True))
    timed = [_timed_scores(rows) for _ in range(3)]
    wholes = [sum(seconds) * rows / visited for seconds, visited in timed]
    longest = sorted(max(seconds) / whole for (seconds, _), whole in zip(timed, wholes, strict=True))
    scored = {"score": "function", "seconds": sorted(wholes)[1], "longest_room_of_pass": longest[1]}
    records.append(scored)
    progress(f"  {scored}")
    name = f"longest room by a score function / whole pass, {rows:,} rows"
    run.bars.append(Bar(name, scored["longest_room_of_pass"], 0.05, at_most=True))
    run.sections["passes"] = {"rows": rows, "parts": EVICT_PARTS, "records": records}


def _aged_table(rows: int, expired: float, *, together: bool) -> Table:
    """A table of which a part has expired. together: rows that expired are often neighbours."""
    table = Table(TableConfig("t", dim=16, optimizer=Adagrad(LR), eviction=TTL(100)))
    table.reserve(rows)
    generator = torch.Generator().manual_seed(0)
    for chunk in random_keys(rows).split(1 << 18):
        weights = new_weights(chunk.numel(), 16)
        old = torch.rand(chunk.numel(), generator=generator) < expired
        order = torch.argsort(old, stable=True) if together else torch.arange(chunk.numel())
        table.assign(chunk[order], weights, time=1000)
        table.assign(chunk[old], weights[old], time=0)
    return table


def _timed_parts(table: Table) -> list[float]:
    """The times of the parts of a pass, as an EmbeddingCollection with evict_every makes it."""
    rows = max(MIN_EVICT_ROWS, len(table) // EVICT_PARTS)
    seconds = []
    while True:
        start = time.thread_time()
        table.evict_part(1000, rows=rows)
        seconds.append(time.thread_time() - start)
        if table._eviction.at_start:  # the pass, and the moves of rows after it, are done
            return seconds


def _timed_calls(table: Table) -> list[float]:
    """The times of the calls of the engine in Table.evict. Each holds the lock of the table."""
    seconds = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            result = call(*args, **options)
            seconds.append(time.thread_time() - start)
            return result

        return run

    for name in ("scan_part", "evict", "compact"):
        setattr(table.engine_impl, name, timed(getattr(table.engine_impl, name)))
    table.evict(1000)
    return seconds


def _timed_scores(rows: int) -> tuple[list[float], int]:
    """The times in which writes make room by a score function, and the number of rows that they visit."""
    visited = 0

    def updates_and_norm(chunk: Chunk) -> Tensor:
        nonlocal visited
        visited += chunk.ids.numel()
        assert chunk.count is not None
        return chunk.count * chunk.rows.norm(dim=1)

    capacity = Capacity(rows, score=updates_and_norm)
    table = Table(TableConfig("t", dim=16, optimizer=Adagrad(LR), eviction=capacity))
    table.reserve(rows)
    few = rows // (PARTS * VISITED)
    keys = random_keys(rows + 3 * PARTS * few)
    for chunk in keys[:rows].split(1 << 18):
        table.assign(chunk, new_weights(chunk.numel(), 16), time=1)
    search, seconds = table.engine_impl.score_search, []
    assert search is not None
    make_room = search.make_room

    def timed(need: int, kept: Tensor) -> None:
        start = time.thread_time()
        make_room(need, kept)
        seconds.append(time.thread_time() - start)

    search.make_room = timed  # type: ignore[method-assign]
    for chunk in keys[rows:].split(few):
        table.assign(chunk, new_weights(chunk.numel(), 16), time=2)
    return seconds, visited


def quality(run: PoliciesRun) -> None:
    """Compares the hits of Capacity with those of exact LRU and LFU."""
    steps = 100 if run.rounds < 5 else 400
    records: list[dict[str, Any]] = []
    for capacity in (5_000, 20_000):
        for score in ("lru", "lfu"):
            ours, exact, total = _hits(capacity, score, steps)
            record: dict[str, Any] = {
                "capacity": capacity,
                "score": score,
                "hit_rate": ours / total,
                "exact_hit_rate": exact / total,
                "ratio": ours / exact,
            }
            records.append(record)
            progress(f"  {record}")
            name = f"hits / hits of exact {score.upper()}, {capacity:,} rows"
            run.bars.append(Bar(name, record["ratio"], 0.985))
    run.sections["quality"] = {"steps": steps, "records": records}
    print_table(
        "Hits of distinct ids at capacity, Zipf(1.2) that drifts",
        ("rows", "score", "Capacity", "exact", "Capacity / exact"),
        [
            (
                f"{r['capacity']:,}",
                r["score"],
                f"{r['hit_rate']:.4f}",
                f"{r['exact_hit_rate']:.4f}",
                f"{r['ratio']:.4f}",
            )
            for r in records
        ],
    )


def _hits(capacity: int, score: str, steps: int) -> tuple[int, int, int]:
    """Returns the hits of Capacity and of an exact policy, and the number of distinct ids."""
    table = Table(TableConfig("t", dim=4, optimizer=SGD(LR), eviction=Capacity(capacity, score=score)))
    random = np.random.default_rng(1)
    last: dict[int, int] = {}
    count: dict[int, int] = {}
    ours = exact = total = 0
    for step in range(steps):
        drawn = random.zipf(1.2, size=2000) % 200_000 + 5 * step
        ids = torch.from_numpy(drawn.astype(np.int64))
        distinct = ids.unique()
        known = distinct.tolist()
        if step >= steps // 4:
            ours += int((table.find(distinct) >= 0).sum())
            exact += sum(id in last for id in known)
            total += len(known)
        table.apply_gradients(ids, torch.zeros(ids.numel(), 4), step=step, time=step)
        need = len(last) + sum(id not in last for id in known) - capacity
        if need > 0:
            call = set(known)
            key = (lambda id: last[id]) if score == "lru" else (lambda id: (count[id], last[id]))
            for id in heapq.nsmallest(need, (id for id in last if id not in call), key=key):
                del last[id], count[id]
        for id in known:
            last[id] = step
            count[id] = count.get(id, 0) + 1
    return ours, exact, total


def precision(run: PoliciesRun) -> None:
    """Compares rows of 16 bits, and views of serving precisions, with rows of float32: step and lookup."""
    keys = random_keys(run.rows)
    records = []
    for dim in (16, 64):
        workload = Workload(run.rows, dim, run.ids, "uniform")
        batches = Batches(keys)(workload)
        tables = {
            "float32": Ours(Adagrad(LR), keys, dim),
            "bfloat16": Ours(Adagrad(LR), keys, dim, precision="bfloat16"),
            "float16": Ours(Adagrad(LR), keys, dim, precision="float16"),
            "bfloat16, stochastic": Ours(Adagrad(LR), keys, dim, precision="bfloat16", rounding="stochastic"),
            "float32, served as FixedPoint": Ours(Adagrad(LR), keys, dim, serving=FixedPoint(0.1)),
            "float32, served as OneBit": Ours(Adagrad(LR), keys, dim, serving=OneBit(0.05)),
        }
        for what in ("step", "lookup"):
            times = interleave({k: getattr(v, what) for k, v in tables.items()}, batches, run.rounds)
            for name in tables:
                records.append(
                    {
                        "rows": name,
                        "dim": dim,
                        "call": what,
                        "ns_per_id": times.median(name) / run.ids * 1e9,
                        "of_float32": times.ratio(name, "float32"),
                    }
                )
            if dim == 64 and what == "step":
                faster = times.ratio("float32", "bfloat16").median
                run.bars.append(Bar("bfloat16 rows vs float32, step at dim 64", faster, 1.0))
    run.sections["precision"] = {"rows": run.rows, "ids": run.ids, "records": records}
    print_table(
        f"Precision of rows, K={run.rows}, {run.ids} ids, Adagrad, ns per id",
        ("rows", "dim", "call", "ns per id", "float32 = 1"),
        [
            (r["rows"], str(r["dim"]), r["call"], f"{r['ns_per_id']:.1f}", str(r["of_float32"]))
            for r in records
        ],
    )


SECTIONS: dict[str, Callable[[PoliciesRun], None]] = {
    "optimizers": optimizers,
    "policies": policies,
    "search": search,
    "passes": passes,
    "quality": quality,
    "precision": precision,
}


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    run_sections("policies_cpu", arguments, PoliciesRun, SECTIONS, ("megalith", "torch", "numpy"))


if __name__ == "__main__":
    main(sys.argv[1:])
