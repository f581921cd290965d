"""Parameter servers: lookups and pushes of ServerShards, against the bytes alone, torch's RPC and ranks.

    python benchmarks/servers.py [--quick] [--only SECTION,...] [--output PATH]

One worker, servers on the same host, one thread each. A round is a lookup of one batch and the push of its
gradients, which is waited for. Variants take turns; ratios are medians of the ratios of the rounds, of wall
time, because most work is done by other processes.

    variant                 what it does
    megalith, N servers     dedup, routing, one call per server; tables that grow, Adagrad
    Ray, the bytes          the same arrays through plain calls of as many Ray actors, which do nothing
    torch RPC               nn.EmbeddingBag shards of a fixed size on two processes, sparse Adagrad; ids are
                            routed and deduplicated by the same code as ours
    SyncShards, 2 ranks     this process and another, each with half of the batch; the same tables

    section    variants
    peers      2 servers, and everything above
    scaling    1 server and 2 servers, and the bytes alone for each
    phases     where the time of a step goes: ids, waiting for rows, rows and gradients, waiting for the push

A full run saves results/servers-DATE.json.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.rpc as rpc
from harness import Run, Timings, interleave, print_table, progress, run_sections
from torch import Tensor

from megalith import Adagrad, Router, Servers, ServerShards, Shards, SyncShards, TableConfig
from megalith.ps.launch import ray_module, start_ray, stop_ray
from megalith.shards.preparer import RoutingPreparer

PACKAGES = ("megalith", "torch", "ray", "numpy")
TABLES = 4
DIM = 16
BYTES, RPC, RANKS = "Ray, the bytes", "torch RPC", "SyncShards, 2 ranks"
Variant = Callable[[dict[str, Tensor]], None]


@dataclass(frozen=True)
class Settings:
    """Sizes of a run: ids per table and batch, ids that occur at all, and rounds."""

    batch: int = 8192
    vocabulary: int = 200_000
    batches: int = 12
    rounds: int = 30


def configs() -> list[TableConfig]:
    return [TableConfig(f"t{number}", dim=DIM, optimizer=Adagrad(0.05)) for number in range(TABLES)]


def make_batches(settings: Settings) -> list[dict[str, Tensor]]:
    """Ids with a few frequent ones, as in a log of clicks."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(settings.batches):
        uniform = torch.rand(TABLES, settings.batch, generator=generator)
        ids = (uniform**3 * settings.vocabulary).long()
        found.append({config.name: ids[number] for number, config in enumerate(configs())})
    return found


def trainer(shards: Shards) -> Variant:
    def step(ids: dict[str, Tensor]) -> None:
        lookup = shards.lookup(ids)
        rows = {name: lookup.rows[name] for name in ids}
        shards.apply_gradients(lookup, rows, step=0, time=1.0)
        shards.flush()

    return step


# ---- the bytes alone


class Sink:
    """An actor that sends and takes arrays and does nothing else."""

    async def read(self, ids: Any, floats: int) -> Any:
        return np.empty(floats, np.float32)

    async def write(self, ids: Any, grads: Any) -> None:
        return


class BareRay:
    """Sends what ServerShards sends, routed in advance."""

    def __init__(self, batches: Sequence[dict[str, Tensor]], servers: int) -> None:
        prepare = RoutingPreparer(
            {config.name: config for config in configs()},
            {config.name: Router("roundrobin", servers) for config in configs()},
        )
        self._sent: dict[int, list[tuple[Any, int]]] = {}
        for ids in batches:
            deduped = prepare(ids).deduped
            parts = deduped.ids.split_with_sizes(deduped.counts.sum(1).tolist())
            self._sent[id(ids)] = [(part.numpy(), part.numel() * DIM) for part in parts]
        ray = ray_module()
        remote = ray.remote(Sink).options(num_cpus=0, max_concurrency=1000)
        self._actors = [remote.remote() for _ in range(servers)]

    def __call__(self, ids: dict[str, Tensor]) -> None:
        ray = ray_module()
        pairs = list(zip(self._actors, self._sent[id(ids)], strict=True))
        rows = ray.get([actor.read.remote(own, floats) for actor, (own, floats) in pairs])
        ray.get([actor.write.remote(own, grad) for (actor, (own, _)), grad in zip(pairs, rows, strict=True)])


# ---- torch RPC


class BagShards:
    """The tables of one RPC server."""

    def __init__(self, rows: int) -> None:
        self.bags = [torch.nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True) for _ in range(TABLES)]
        self.optimizer = torch.optim.Adagrad([bag.weight for bag in self.bags], lr=0.05)
        self.outputs: list[Tensor] = []


_SHARDS: dict[str, BagShards] = {}


def bag_read(ids: list[Tensor]) -> list[Tensor]:
    shards = _SHARDS["own"]
    shards.outputs = [bag(own, torch.arange(own.numel())) for bag, own in zip(shards.bags, ids, strict=True)]
    return [output.detach() for output in shards.outputs]


def bag_write(grads: list[Tensor]) -> None:
    shards = _SHARDS["own"]
    torch.autograd.backward(shards.outputs, grads)
    shards.optimizer.step()
    shards.optimizer.zero_grad()


def rpc_server(number: int, store: str, rows: int) -> None:
    torch.set_num_threads(1)
    _SHARDS["own"] = BagShards(rows)
    _init_rpc(f"server{number}", number + 1, store)
    rpc.shutdown()


def _init_rpc(name: str, rank: int, store: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{store}", num_worker_threads=2, rpc_timeout=120
    )
    rpc.init_rpc(name, rank=rank, world_size=3, rpc_backend_options=options)


class TorchRpc:
    """A worker of two RPC servers. Ids are rows: id // 2 on server id % 2."""

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = tempfile.mktemp(prefix="megalith-rpc-")
        rows = settings.vocabulary // 2 + 1
        self.processes: list[BaseProcess] = [
            context.Process(target=rpc_server, args=(number, self._store, rows)) for number in range(2)
        ]
        for process in self.processes:
            process.start()
        _init_rpc("worker", 0, self._store)
        self._prepare = RoutingPreparer(
            {config.name: config for config in configs()},
            {config.name: Router("roundrobin", 2) for config in configs()},
        )

    def __call__(self, ids: dict[str, Tensor]) -> None:
        deduped = self._prepare(ids).deduped
        counts = deduped.counts.reshape(-1).tolist()
        parts = [part // 2 for part in deduped.ids.split_with_sizes(counts)]
        reads = [
            rpc.rpc_async(f"server{n}", bag_read, (parts[n * TABLES : (n + 1) * TABLES],)) for n in (0, 1)
        ]
        rows = [read.wait() for read in reads]
        flat = torch.cat([row.view(-1) for own in rows for row in own])
        offsets = deduped.offsets
        assert offsets is not None
        torch.index_select(flat.view(-1, DIM), 0, offsets // DIM)  # the row of each occurrence
        writes = [rpc.rpc_async(f"server{n}", bag_write, (rows[n],)) for n in (0, 1)]
        for write in writes:
            write.wait()

    def close(self) -> None:
        rpc.shutdown()
        for process in self.processes:
            process.join(30)
        Path(self._store).unlink(missing_ok=True)


# ---- ranks


def rank(number: int, store: str, settings: Settings, orders: Connection | None) -> Variant | None:
    """A rank of SyncShards. With orders it makes the steps that they name, until None."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    step = trainer(SyncShards(configs()))
    halves = [{name: ids.chunk(2)[number] for name, ids in batch.items()} for batch in make_batches(settings)]
    if orders is None:
        return lambda batch: step({name: ids.chunk(2)[number] for name, ids in batch.items()})
    while (order := orders.recv()) is not None:
        step(halves[order])
    torch.distributed.destroy_process_group()
    return None


class TwoRanks:
    """This process and another as ranks, each with half of the batch."""

    def __init__(self, batches: Sequence[dict[str, Tensor]], settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = tempfile.mktemp(prefix="megalith-ranks-")
        self._orders, other = context.Pipe()
        self._process = context.Process(target=rank, args=(1, self._store, settings, other))
        self._process.start()
        self._numbers = {id(batch): number for number, batch in enumerate(batches)}
        step = rank(0, self._store, settings, None)
        assert step is not None
        self._step = step

    def __call__(self, ids: dict[str, Tensor]) -> None:
        self._orders.send(self._numbers[id(ids)])
        self._step(ids)

    def close(self) -> None:
        self._orders.send(None)
        torch.distributed.destroy_process_group()
        self._process.join(30)
        Path(self._store).unlink(missing_ok=True)


# ---- the run


class ServersRun(Run):
    """The batches, and the results so far."""

    def __init__(self, quick: bool) -> None:
        super().__init__(quick)
        torch.set_num_threads(1)
        self.settings = Settings(batch=2048, batches=4, rounds=4) if quick else Settings()
        self.batches = make_batches(self.settings)

    def facts(self) -> dict[str, Any]:
        return {"settings": asdict(self.settings)}

    def on_servers(self, counts: Sequence[int]) -> tuple[dict[str, Variant], list[Servers]]:
        """ServerShards and the bytes alone, for numbers of servers."""
        start_ray()
        variants: dict[str, Variant] = {}
        groups = [Servers(count) for count in counts]
        for count, servers in zip(counts, groups, strict=True):
            variants[ours(count)] = trainer(ServerShards(configs(), servers=servers))
            variants[bare(count)] = BareRay(self.batches, count)
        return variants, groups

    def measure(self, section: str, variants: dict[str, Variant]) -> Timings:
        for name, call in variants.items():
            progress(f"warming up: {name}")
            for batch in self.batches:
                call(batch)
        times = interleave(variants, self.batches, self.settings.rounds, clock=time.perf_counter)
        rows = TABLES * self.settings.batch
        cells = [
            [name, f"{times.median(name) * 1e3:.1f}", f"{rows / times.median(name):,.0f}"]
            for name in variants
        ]
        print_table(f"A lookup and a push: {section}", ("variant", "ms", "occurrences/s"), cells)
        self.sections[section] = {"seconds": dict(times.seconds)}
        return times


def ours(servers: int) -> str:
    return f"megalith, {servers} servers"


def bare(servers: int) -> str:
    return f"{BYTES}, {servers} servers"


def peers(run: ServersRun) -> None:
    rpc_peer = TorchRpc(run.settings)
    ranks = TwoRanks(run.batches, run.settings)
    variants, groups = run.on_servers([2])
    try:
        times = run.measure("peers", variants | {RPC: rpc_peer, RANKS: ranks})
    finally:
        for servers in groups:
            servers.close()
        stop_ray()
        ranks.close()
        rpc_peer.close()
    two = ours(2)
    limit = times.ratio(bare(2), two).median
    run.bar("speed of the bytes alone", limit, 0.8, note="2 servers; 1 would be no cost of our own")
    run.bar("torch RPC with EmbeddingBags / ours", times.ratio(RPC, two).median, 2.0, note="2 servers")
    run.bar("torch RPC / Ray, the bytes", times.ratio(RPC, bare(2)).median, note="limit of Ray's calls")
    run.bar("SyncShards at 2 ranks / ours", times.ratio(RANKS, two).median, note="2 servers")


def scaling(run: ServersRun) -> None:
    variants, groups = run.on_servers([1, 2])
    try:
        times = run.measure("scaling", variants)
    finally:
        for servers in groups:
            servers.close()
        stop_ray()
    run.bar("1 server / 2 servers", times.ratio(ours(1), ours(2)).median, note="time of a step")


def phases(run: ServersRun) -> None:
    start_ray()
    found: dict[str, list[float]] = {}
    with Servers(2) as servers:
        shards = ServerShards(configs(), servers=servers)
        for number in range(2 * run.settings.rounds):
            ids = run.batches[number % len(run.batches)]
            marks = [time.perf_counter()]
            prepared = shards.prepare(ids)
            marks.append(time.perf_counter())
            lookup = shards.lookup(prepared)
            lookup.wait()
            marks.append(time.perf_counter())
            rows = {name: lookup.rows[name] for name in ids}
            marks.append(time.perf_counter())
            shards.apply_gradients(lookup, rows, step=0, time=1.0)
            marks.append(time.perf_counter())
            shards.flush()
            marks.append(time.perf_counter())
            for name, (a, b) in zip(PHASES, pairwise(marks), strict=True):
                found.setdefault(name, []).append(b - a)
    stop_ray()
    times = Timings({name: each[run.settings.rounds :] for name, each in found.items()})
    cells = [[name, f"{times.median(name) * 1e3:.2f}"] for name in PHASES]
    print_table("Phases of a step, 2 servers", ("phase", "ms"), cells)
    run.sections["phases"] = {"seconds": dict(times.seconds)}


PHASES = (
    "dedup and routing",
    "waiting for rows",
    "rows of occurrences",
    "sums, and sending",
    "waiting for the push",
)
SECTIONS = {"peers": peers, "scaling": scaling, "phases": phases}


def main(arguments: Sequence[str]) -> None:
    run_sections("servers", arguments, ServersRun, SECTIONS, PACKAGES)


if __name__ == "__main__":
    main(sys.argv[1:])
