"""Training on two ranks: what exchanges cost, and whole steps against the peers that run on CPUs.

    python benchmarks/sync_cpu.py [--quick] [--rounds N] [--output PATH]

Two processes with one thread each, gloo over loopback. First the four exchanges of a step, with tables that
do nothing, against bare all_to_all_single of the same bytes. Then whole steps (`sync_variants.py`): variants
take turns round by round, each on a few batches; a time is that of the slower rank, a ratio the median of the
rounds' ratios. The variants' losses are compared first. On loopback an exchange keeps the CPU busy and leaves
little to overlap, so pipelines are also shown on a wire whose time is slept. A full run saves
results/sync_cpu-DATE.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    Bar,
    Timings,
    command_line,
    machine,
    print_bars,
    print_table,
    result_path,
    say,
    versions,
    write_result,
)
from sync_variants import (
    DIM,
    TABLES,
    Batch,
    SlowWire,
    SparseBags,
    TorchRec,
    Weights,
    joined,
    make_batch,
    make_tables,
    make_weights,
    one_process,
    two_ranks,
)
from torch import Tensor

from megalith import Router
from megalith.shards.exchange import Exchange
from megalith.shards.messages import Messages, Push
from megalith.shards.prepare import Preparer, SyncPrepared

PACKAGES = ("megalith", "torch", "torchrec", "fbgemm_gpu-cpu", "numpy")
RANKS = 2
LATENCY, BANDWIDTH = 0.5e-3, 1.25e9  # of the slow wire: seconds, bytes a second (10 Gbit/s)
SECONDS = 1800
OURS, TORCHREC, SPARSE, ALONE = (
    "megalith",
    "torchrec row-wise",
    "DDP, sparse EmbeddingBags",
    "one process",
)

Loop = Callable[[Sequence[Batch]], object]


@dataclass(frozen=True)
class Settings:
    """How much to measure."""

    rows: int = 200_000
    """Ids of each table."""
    batch: int = 4096
    """Examples of a rank's batch."""
    rounds: int = 15
    steps: int = 4
    """Batches a variant trains on in a round."""


def batch_of(settings: Settings, number: int, rank: int) -> Batch:
    return make_batch(RANKS * number + rank, settings.batch, settings.rows)


# ---- both ranks, in step


def interleave(variants: Mapping[str, Callable[[int], object]], rounds: int) -> Timings:
    """Times every variant once a round, ranks starting together, after one round that is not counted."""
    names = list(variants)
    own = torch.zeros(rounds, len(names), dtype=torch.float64)
    gc.collect()
    gc.disable()
    try:
        for r in range(rounds + 1):
            for v in range(len(names)):
                number = (v + r) % len(names)
                dist.barrier()
                start = time.perf_counter()
                variants[names[number]](r)
                if r > 0:
                    own[r - 1, number] = time.perf_counter() - start
    finally:
        gc.enable()
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return Timings({name: own[:, number].tolist() for number, name in enumerate(names)})


# ---- exchanges


class Idle:
    """A table that takes no time."""

    dim = DIM

    def __len__(self) -> int:
        return 0

    def find_with_epoch(self, ids: Tensor) -> tuple[Tensor, int]:
        return ids, 0

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


class Exchanges:
    """The four exchanges of a step for given batches; and the same bytes by bare collectives."""

    def __init__(self, transport: str, batches: Sequence[Batch]) -> None:
        self._exchange = Exchange(transport=transport)
        tables: Any = {name: Idle() for name in TABLES}
        self._messages = Messages(self._exchange, tables, ("float32", "float32"))
        prepare = Preparer(
            {config.name: config for config in make_tables()},
            {name: Router("roundrobin", RANKS) for name in TABLES},
        )
        columns = [dict(zip(TABLES, (c.values for c in b.features.values()), strict=True)) for b in batches]
        self._prepared = [prepare(ids) for ids in columns]
        self._flat = [torch.randn(p.deduped.ids.numel() * DIM) for p in self._prepared]

    def step(self, number: int) -> None:
        at = number % len(self._prepared)
        prepared, flat = self._prepared[at], self._flat[at]
        self._exchange.run(lambda: self._all_four(prepared, flat))

    def _all_four(self, prepared: SyncPrepared, flat: Tensor) -> None:
        asked = self._messages.ask("lookup", prepared, None, False)
        self._messages.send_rows(asked, prepared)
        self._messages.push(asked, prepared, Push(flat, None, 0, None, 1.0, None), None)

    def bare(self) -> Callable[[int], None]:
        """Bare all_to_all_single calls with the sizes of each batch's exchanges, buffers made beforehand."""
        noted: list[list[tuple[Tensor, Tensor, list[int], list[int]]]] = []
        call = self._exchange.all_to_all

        def note(send: Tensor, out: Sequence[int], into: Sequence[int], what: str) -> Tensor:
            noted[-1].append((torch.empty(sum(into), dtype=torch.uint8), send.clone(), list(into), list(out)))
            return call(send, out, into, what)

        self._exchange.all_to_all = note  # type: ignore[method-assign]
        for number in range(len(self._prepared)):
            noted.append([])
            self.step(number)
        self._exchange.all_to_all = call  # type: ignore[method-assign]

        def bare(number: int) -> None:
            for received, send, into, out in noted[number % len(noted)]:
                dist.all_to_all_single(received, send, into, out)

        self.sent = [sum(sum(out) for *_, out in four) / 1e6 for four in noted]
        return bare


def exchanges(settings: Settings) -> dict[str, Any]:
    batches = [batch_of(settings, i, dist.get_rank()) for i in range(6)]
    gloo, shared = Exchanges("gloo", batches), Exchanges("auto", batches)
    bare = gloo.bare()
    times = interleave(
        {"bare all_to_all_single": bare, "megalith, gloo": gloo.step, "megalith, shared memory": shared.step},
        10 * settings.rounds,
    )
    return {"seconds": times.seconds, "megabytes": sum(gloo.sent) / len(gloo.sent)}


# ---- whole steps


def steps(settings: Settings) -> dict[str, Any]:
    weights = make_weights(settings.rows)
    parts = [[batch_of(settings, i, rank) for rank in range(RANKS)] for i in range(11)]
    own, whole = [each[dist.get_rank()] for each in parts], [joined(each) for each in parts]
    models = build(weights)
    verify(models, own[:3], whole[:3])
    variants: dict[str, Callable[[int], object]] = {}
    for name, loop in loops(models).items():
        shift = len(variants)  # in a round each variant has other batches
        variants[name] = _turn(loop, whole if name.startswith("one process") else own, settings.steps, shift)
    times = interleave(variants, settings.rounds)
    return {"seconds": {name: [s / settings.steps for s in found] for name, found in times.seconds.items()}}


def build(weights: Weights) -> dict[str, Any]:
    """The models, by name; None on a rank that has no part in one."""
    models: dict[str, Any] = {OURS: two_ranks(weights, "auto"), "megalith, gloo": two_ranks(weights, "gloo")}
    try:
        models[TORCHREC] = TorchRec(weights)
    except ImportError as error:
        say(f"{TORCHREC}: left out, {error}")
    models[SPARSE] = SparseBags(weights)
    models[ALONE] = one_process(weights) if dist.get_rank() == 0 else None
    return models


def loops(models: Mapping[str, Any]) -> dict[str, Loop]:
    """What is timed: every model's plain loop, pipelines, and both again on a slow wire."""
    ours = models[OURS]
    piped: dict[str, Loop] = {
        "pipeline, ids": ours.piped(),
        "pipeline, ids, push": ours.piped(push=True),
        "pipeline, rows, push": ours.piped(mode="rows", push=True),
    }
    slow = SlowWire(ours.collection.shards, LATENCY, BANDWIDTH)
    found = {name: _plain(model) for name, model in models.items() if name != ALONE}
    found |= piped
    slowed = {OURS: found[OURS], **piped}
    found |= {f"slow wire: {name}": _within(slow, loop) for name, loop in slowed.items()}
    for threads in (1, 2):
        found[f"{ALONE}, {threads} thread(s)"] = _with_threads(models[ALONE], threads)
    return found


def verify(models: Mapping[str, Any], own: Sequence[Batch], whole: Sequence[Batch]) -> None:
    """All variants must learn alike: equal losses over some steps, the mean of the ranks'."""
    losses: dict[str, list[float]] = {}
    for name, model in models.items():
        found = torch.zeros(len(own))
        if model is not None:
            found += torch.tensor([model.step(batch) for batch in (whole if name == ALONE else own)])
        dist.all_reduce(found)
        losses[name] = (found if name == ALONE else found / RANKS).tolist()
        for ours, theirs in zip(losses[OURS], losses[name], strict=True):
            if abs(ours - theirs) > 2e-3:
                raise SystemExit(f"{name} learns otherwise: {losses[name]} against {losses[OURS]}")


def _turn(loop: Loop, batches: Sequence[Batch], count: int, shift: int) -> Callable[[int], object]:
    return lambda r: loop([batches[((r + shift) * count + i) % len(batches)] for i in range(count)])


def _plain(model: Any) -> Loop:
    return lambda batches: [model.step(batch) for batch in batches]


def _within(slow: SlowWire, loop: Loop) -> Loop:
    def run(batches: Sequence[Batch]) -> object:
        with slow:
            return loop(batches)

    return run


def _with_threads(model: Any, threads: int) -> Loop:
    def run(batches: Sequence[Batch]) -> object:
        if model is None:
            return None
        torch.set_num_threads(threads)
        try:
            return [model.step(batch) for batch in batches]
        finally:
            torch.set_num_threads(1)

    return run


# ---- the ranks


def run_ranks(settings: Settings) -> dict[str, Any]:
    """Starts the ranks, and returns what rank 0 found."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe(duplex=False)
        ranks = [
            context.Process(target=rank_main, args=(rank, f"{folder}/store", settings, theirs), daemon=True)
            for rank in range(RANKS)
        ]
        try:
            for rank in ranks:
                rank.start()
            theirs.close()
            deadline = time.monotonic() + SECONDS
            while not ours.poll(1.0):
                if time.monotonic() > deadline or any(rank.exitcode for rank in ranks):
                    raise SystemExit("a rank failed or took too long; see above")
            found: dict[str, Any] = json.loads(ours.recv_bytes())
            return found
        except EOFError:
            raise SystemExit("the ranks ended without a result; see above") from None
        finally:
            for rank in ranks:
                rank.join(10)
                rank.kill()


def rank_main(rank: int, store: str, settings: Settings, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timeout
    )
    found = {}
    for name, section in (("exchanges", exchanges), ("steps", steps)):
        if rank == 0:
            say(name)
        found[name] = section(settings)
    if rank == 0:
        pipe.send_bytes(json.dumps(found).encode())
    dist.barrier()


# ---- report


def report_exchanges(found: dict[str, Any]) -> tuple[dict[str, Any], list[Bar]]:
    times = Timings(found["seconds"])
    bare, gloo, shared = times.seconds
    title = f"The four exchanges of a step, {found['megabytes']:.1f} MB a rank"
    rows = [(n, f"{times.median(n) * 1e3:.2f}", str(times.ratio(n, bare))) for n in times.seconds]
    print_table(title, ("variant", "ms", "time / bare"), rows)
    section = {
        "megabytes": found["megabytes"],
        "variants": {
            name: {"milliseconds": times.median(name) * 1e3, "ratio": times.ratio(name, bare)}
            for name in times.seconds
        },
    }
    return section, [
        Bar("exchange time, gloo / bare", times.ratio(gloo, bare).median, 1.25, at_most=True),
        Bar("exchange time, gloo / shared memory", times.ratio(gloo, shared).median),
    ]


def report_steps(found: dict[str, Any], settings: Settings) -> tuple[dict[str, Any], list[Bar]]:
    times = Timings(found["seconds"])
    section, rows = {}, []
    for name in times.seconds:
        seconds, ratio = times.median(name), times.ratio(name, OURS)
        samples = RANKS * settings.batch / seconds
        rows.append((name, f"{seconds * 1e3:.1f}", f"{samples:,.0f}", str(ratio)))
        section[name] = {"milliseconds": seconds * 1e3, "samples_per_second": samples, "ratio": ratio}
    print_table("A step", ("variant", "ms", "samples/s", "time / ours"), rows)
    return section, [*_peer_bars(times), *_own_bars(times)]


def _peer_bars(times: Timings) -> list[Bar]:
    bars = [Bar(f"step vs {SPARSE}", times.ratio(SPARSE, OURS).median)]
    if TORCHREC in times.seconds:
        bars.append(Bar(f"step vs {TORCHREC}", times.ratio(TORCHREC, OURS).median, 1.5))
        bars.append(Bar("the same, ours over gloo", times.ratio(TORCHREC, "megalith, gloo").median))
    return bars


def _own_bars(times: Timings) -> list[Bar]:
    pairs = [
        ("one process with 2 threads / 2 ranks", f"{ALONE}, 2 thread(s)", OURS),
        ("one process with 1 thread / 2 ranks", f"{ALONE}, 1 thread(s)", OURS),
        ("gloo / shared memory", "megalith, gloo", OURS),
    ]
    for wire in ("", "slow wire: "):
        for mode in ("ids", "ids, push", "rows, push"):
            piped = f"{wire}pipeline, {mode}"
            pairs.append((f"{wire}no pipeline / pipeline, {mode}", f"{wire}{OURS}", piped))
    return [Bar(name, times.ratio(slow, fast).median) for name, slow, fast in pairs]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small tables, few rounds; nothing is saved")
    parser.add_argument("--rounds", type=int, help="rounds of whole steps, default 15")
    parser.add_argument("--output", type=Path, help="where to save the result")
    options = parser.parse_args(arguments)
    settings = Settings(rows=20_000, batch=1024, rounds=3) if options.quick else Settings()
    if options.rounds:
        settings = replace(settings, rounds=options.rounds)
    here = machine()
    found = run_ranks(settings)
    exchange_section, exchange_bars = report_exchanges(found["exchanges"])
    step_section, step_bars = report_steps(found["steps"], settings)
    bars = [*exchange_bars, *step_bars]
    print_bars(bars)
    content = {
        "benchmark": "sync_cpu",
        "command": command_line(arguments),
        "machine": here,
        "versions": versions(PACKAGES),
        "settings": asdict(settings),
        "sections": {"exchanges": exchange_section, "steps": step_section},
        "bars": bars,
    }
    if options.output or not options.quick:
        write_result(options.output or result_path("sync_cpu"), content)


if __name__ == "__main__":
    main(sys.argv[1:])
