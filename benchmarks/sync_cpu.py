"""Training on two ranks: the cost of exchanges, and whole steps against the peers that run on CPUs.

    python benchmarks/sync_cpu.py [--quick] [--only exchanges] [--rounds N] [--output PATH]

Two processes with one thread each, gloo over loopback. First the four exchanges of a step against bare
all_to_all_single of the same bytes: our calls alone, and including all work on messages before tables get
them (the tables here do nothing). Then whole steps (`sync_variants.py`): variants take turns, each on a few
batches per round; a time is that of the slower rank, a ratio is the median of the ratios of the rounds. The
losses of the variants are compared first. On loopback an exchange keeps the CPU busy and leaves little to
overlap, so pipelines are also measured with a simulated slow network that sleeps. A full run takes some
minutes and saves results/sync_cpu-DATE.json.
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
    progress,
    result_path,
    versions,
    write_result,
)
from sync_variants import (
    DIM,
    TABLES,
    Batch,
    DenseOnly,
    SlowWire,
    SparseBags,
    TorchRec,
    Weights,
    concatenated,
    make_batch,
    make_tables,
    make_weights,
    one_process,
    two_ranks,
)
from torch import Tensor

from megalith import Router
from megalith.distributed.exchange import Exchange
from megalith.shards.gradients import Gradients
from megalith.shards.preparer import RoutedIds, RoutingPreparer
from megalith.shards.rank_messages import RankMessages
from megalith.table.table_data import FoundRows, Update

PACKAGES = ("megalith", "torch", "torchrec", "fbgemm_gpu-cpu", "numpy")
RANKS = 2
LATENCY, BANDWIDTH = 1e-3, 2.5e9 / 8  # of the slow network: seconds, bytes per second
SECONDS = 1800
BARE, OURS, TORCHREC, SPARSE, DENSE, ALONE = (
    "bare all_to_all_single",
    "megalith",
    "torchrec row-wise",
    "DDP, sparse EmbeddingBags",
    "MLP only",
    "one process",
)

Loop = Callable[[Sequence[Batch]], object]


@dataclass(frozen=True)
class Settings:
    """The sizes of the measurement."""

    rows: int = 200_000
    """Number of ids of each table."""
    batch: int = 4096
    """Number of examples of a rank's batch."""
    rounds: int = 11
    steps: int = 8
    """Number of batches per variant and round."""
    sections: tuple[str, ...] = ("exchanges", "steps")


def batch_of(settings: Settings, number: int, rank: int) -> Batch:
    return make_batch(RANKS * number + rank, settings.batch, settings.rows)


# ---- both ranks, synchronised


def interleave(variants: Mapping[str, Callable[[int], object]], rounds: int) -> Timings:
    """Times every variant once per round, ranks starting together; the first round is not counted."""
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


class IdleTable:
    """A table whose calls do nothing."""

    dim = DIM
    config = make_tables()[0]

    def __len__(self) -> int:
        return 0

    @property
    def checks(self) -> IdleTable:
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


class IdleShards:
    """Shards whose engines do nothing."""

    def __init__(self) -> None:
        self.local = {name: IdleTable() for name in TABLES}
        self.engines = self

    def find(self, ids: Mapping[str, Tensor]) -> dict[str, FoundRows]:
        return {name: FoundRows(own, 0) for name, own in ids.items()}

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


class Exchanges:
    """The four exchanges of a step: with messages, with our calls alone, with bare collectives."""

    def __init__(self, transport: str, batches: Sequence[Batch]) -> None:
        self._exchange = Exchange(transport=transport)
        shards: Any = IdleShards()
        self._messages = RankMessages(self._exchange, shards, ("float32", "float32"))
        prepare = RoutingPreparer(
            {config.name: config for config in make_tables()},
            {name: Router("roundrobin", RANKS) for name in TABLES},
        )
        columns = [dict(zip(TABLES, (c.values for c in b.features.values()), strict=True)) for b in batches]
        self._prepared = [prepare(ids) for ids in columns]
        self._flat = [torch.randn(p.deduped.ids.numel() * DIM) for p in self._prepared]
        self._noted = [self._note(number) for number in range(len(batches))]

    def _note(self, number: int) -> list[Noted]:
        """Runs the exchanges of a batch once and records what was sent."""
        noted: list[Noted] = []
        call = self._exchange.all_to_all

        def note(send: Tensor, out: Sequence[int], into: Sequence[int], what: str) -> Tensor:
            noted.append(Noted(send.clone(), list(out), list(into)))
            return call(send, out, into, what)

        self._exchange.all_to_all = note  # type: ignore[method-assign]
        self.messages(number)
        self._exchange.all_to_all = call  # type: ignore[method-assign]
        return noted

    @property
    def megabytes(self) -> float:
        return sum(each.send.nbytes for four in self._noted for each in four) / len(self._noted) / 1e6

    def messages(self, number: int) -> None:
        """Runs the exchanges with all work on messages: pack, check, split, pass to tables."""
        at = number % len(self._prepared)
        self._exchange.run(lambda: self._all_four(self._prepared[at], self._flat[at]))

    def _all_four(self, prepared: RoutedIds, flat: Tensor) -> None:
        asked = self._messages.request("lookup", prepared)
        self._messages.send_rows(asked, prepared)
        update = Update(0, None, 1.0, 0.0, {name: [0.0] for name in TABLES})
        self._messages.push(asked, prepared, (Gradients(prepared.deduped.ids, flat), update))

    def calls(self, number: int) -> None:
        def work() -> None:
            for each in self._noted[number % len(self._noted)]:
                self._exchange.all_to_all(each.send, each.out, each.into, "benchmark")

        self._exchange.run(work)

    def bare(self, number: int) -> None:
        for each in self._noted[number % len(self._noted)]:
            dist.all_to_all_single(each.received, each.send, each.into, each.out)


class Noted:
    """One exchange: what a rank sends, in parts of `out` bytes, and a buffer for what it receives."""

    def __init__(self, send: Tensor, out: list[int], into: list[int]) -> None:
        self.send, self.out, self.into = send, out, into
        self.received = torch.empty(sum(into), dtype=torch.uint8)


def exchanges(settings: Settings) -> dict[str, Any]:
    """Measures exchanges by size: that of the steps below, and larger batches."""
    found = {}
    for size in (settings.batch, 4 * settings.batch):
        larger = replace(settings, batch=size)
        batches = [batch_of(larger, i, dist.get_rank()) for i in range(6)]
        gloo, shared = Exchanges("gloo", batches), Exchanges("auto", batches)
        variants = {BARE: gloo.bare, "calls, gloo": gloo.calls, "messages, gloo": gloo.messages}
        variants |= {"calls, shared memory": shared.calls, "messages, shared memory": shared.messages}
        times = interleave(variants, 4 * settings.rounds)
        found[f"{gloo.megabytes:.1f} MB a rank"] = times.seconds
    return found


# ---- whole steps


def steps(settings: Settings) -> dict[str, Any]:
    weights = make_weights(settings.rows)
    parts = [[batch_of(settings, i, rank) for rank in range(RANKS)] for i in range(11)]
    own, whole = [each[dist.get_rank()] for each in parts], [concatenated(each) for each in parts]
    models = build(weights)
    verify(models, own[:3], whole[:3])
    variants: dict[str, Callable[[int], object]] = {}
    for name, loop in loops(models).items():
        shift = len(variants)  # in a round each variant has different batches
        variants[name] = _turn(loop, whole if name.startswith("one process") else own, settings.steps, shift)
    times = interleave(variants, settings.rounds)
    return {"seconds": {name: [s / settings.steps for s in found] for name, found in times.seconds.items()}}


def build(weights: Weights) -> dict[str, Any]:
    """Returns the models by name; None on a rank that does not take part in one."""
    models: dict[str, Any] = {OURS: two_ranks(weights, "auto"), "megalith, gloo": two_ranks(weights, "gloo")}
    try:
        models[TORCHREC] = TorchRec(weights)
    except ImportError as error:
        progress(f"{TORCHREC}: skipped, {error}")
    models[SPARSE] = SparseBags(weights)
    models[DENSE] = DenseOnly()
    models[ALONE] = one_process(weights) if dist.get_rank() == 0 else None
    return models


def loops(models: Mapping[str, Any]) -> dict[str, Loop]:
    """Returns what is timed: the plain loop of every model, pipelines, and both again on a slow network."""
    ours = models[OURS]
    pipelines: dict[str, Loop] = {
        "pipeline, ids": ours.pipeline_loop(),
        "pipeline, ids, push": ours.pipeline_loop(push=True),
        "pipeline, ids, push, depth 3": ours.pipeline_loop(push=True, depth=3),
        "pipeline, rows, push": ours.pipeline_loop(mode="rows", push=True),
    }
    slow = SlowWire(ours.collection.shards, LATENCY, BANDWIDTH)
    found = {name: _plain(model) for name, model in models.items() if name != ALONE}
    found |= pipelines
    slowed = {OURS: found[OURS], **pipelines}
    found |= {f"slow network: {name}": _within(slow, loop) for name, loop in slowed.items()}
    for threads in (1, 2):
        found[f"{ALONE}, {threads} thread(s)"] = _with_threads(models[ALONE], threads)
    return found


def verify(models: Mapping[str, Any], own: Sequence[Batch], whole: Sequence[Batch]) -> None:
    """Checks that all variants have equal losses over some steps (mean over ranks)."""
    losses: dict[str, list[float]] = {}
    for name, model in models.items():
        if name == DENSE:
            continue
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
    """Starts the ranks and returns the result of rank 0."""
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
    for name in settings.sections:
        if rank == 0:
            progress(name)
        found[name] = {"exchanges": exchanges, "steps": steps}[name](settings)
    if rank == 0:
        pipe.send_bytes(json.dumps(found).encode())
    dist.barrier()


# ---- report


def report_exchanges(found: dict[str, Any]) -> tuple[dict[str, Any], list[Bar]]:
    sections, bars = {}, []
    for size, seconds in found.items():
        times = Timings(seconds)
        ratios = {name: times.ratio(name, BARE) for name in seconds}
        rows = [(name, f"{times.median(name) * 1e3:.2f}", str(ratio)) for name, ratio in ratios.items()]
        print_table(f"The four exchanges of a step, {size}", ("variant", "ms", "time / bare"), rows)
        sections[size] = {
            name: {"milliseconds": times.median(name) * 1e3, "ratio": ratio} for name, ratio in ratios.items()
        }
        for name, most in (("calls, gloo", 1.25), ("messages, gloo", 1.4), ("messages, shared memory", 1.4)):
            bars.append(Bar(f"{name} / bare", ratios[name].median, most, at_most=True, note=size))
        between = times.ratio("messages, gloo", "messages, shared memory").median
        bars.append(Bar("messages, gloo / shared memory", between, note=size))
    return sections, bars


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
        bars.append(Bar(f"{DENSE} vs {TORCHREC}, the limit", times.ratio(TORCHREC, DENSE).median))
        bars.append(Bar("the same, ours over gloo", times.ratio(TORCHREC, "megalith, gloo").median))
    return bars


def _own_bars(times: Timings) -> list[Bar]:
    pairs = [
        ("one process with 2 threads / 2 ranks", f"{ALONE}, 2 thread(s)", OURS),
        ("one process with 1 thread / 2 ranks", f"{ALONE}, 1 thread(s)", OURS),
        ("gloo / shared memory", "megalith, gloo", OURS),
    ]
    for wire in ("", "slow network: "):
        for mode in ("ids", "ids, push", "ids, push, depth 3", "rows, push"):
            pipelines = f"{wire}pipeline, {mode}"
            pairs.append((f"{wire}no pipeline / pipeline, {mode}", f"{wire}{OURS}", pipelines))
    return [Bar(name, times.ratio(slow, fast).median) for name, slow, fast in pairs]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small tables, few rounds; nothing is saved")
    parser.add_argument("--only", choices=Settings.sections, help="only one part; saved only with --output")
    parser.add_argument("--rounds", type=int, help="rounds of whole steps, default 11")
    parser.add_argument("--output", type=Path, help="where to save the result")
    options = parser.parse_args(arguments)
    settings = Settings(rows=20_000, batch=1024, rounds=3, steps=4) if options.quick else Settings()
    if options.rounds:
        settings = replace(settings, rounds=options.rounds)
    if options.only:
        settings = replace(settings, sections=(options.only,))
    here = machine()
    found = run_ranks(settings)
    sections, bars = {}, []
    for name in settings.sections:
        report = report_exchanges(found[name]) if name == "exchanges" else report_steps(found[name], settings)
        sections[name] = report[0]
        bars += report[1]
    print_bars(bars)
    content = {
        "benchmark": "sync_cpu",
        "command": command_line(arguments),
        "machine": here,
        "versions": versions(PACKAGES),
        "settings": asdict(settings),
        "sections": sections,
        "bars": bars,
    }
    if options.output or not (options.quick or options.only):
        write_result(options.output or result_path("sync_cpu"), content)


if __name__ == "__main__":
    main(sys.argv[1:])
