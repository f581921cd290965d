"""Parameter servers: lookups and pushes of ServerShards, against the bytes alone and against torch's RPC.

    python benchmarks/servers.py [--quick] [--rounds N] [--output PATH]

One worker, servers on the same host, one thread each. A round is a lookup of one batch and the push of its
gradients, which is waited for. Variants take turns; ratios are medians of the ratios of the rounds, of wall
time, because most work is done by other processes.

    variant                 what it does
    megalith, N servers     dedup, routing, one call per server; tables that grow, Adagrad
    Ray, the bytes          the same arrays through plain calls of as many Ray actors, which do nothing
    torch RPC               nn.EmbeddingBag shards of a fixed size on two processes, sparse Adagrad; ids are
                            routed and deduplicated by the same code as ours

A full run saves results/servers-DATE.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.rpc as rpc
from harness import (
    Bar,
    Timings,
    command_line,
    interleave,
    machine,
    print_bars,
    print_table,
    progress,
    result_path,
    versions,
    write_result,
)
from torch import Tensor

from megalith import Adagrad, Router, Servers, ServerShards, TableConfig
from megalith.shards.preparer import RoutingPreparer
from megalith.shards.servers.ray_servers import ray_module, start_ray, stop_ray

PACKAGES = ("megalith", "torch", "ray", "numpy")
TABLES = 4
DIM = 16
BYTES, RPC = "Ray, the bytes", "torch RPC"


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


def trainer(shards: ServerShards) -> Callable[[dict[str, Tensor]], None]:
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


# ---- the run


def measure(settings: Settings) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    batches = make_batches(settings)
    peer = TorchRpc(settings)
    start_ray()
    groups = {count: Servers(count) for count in (1, 2)}
    variants: dict[str, Callable[[dict[str, Tensor]], None]] = {}
    for count, servers in groups.items():
        variants[f"megalith, {count} servers"] = trainer(ServerShards(configs(), servers=servers))
        variants[f"{BYTES}, {count} servers"] = BareRay(batches, count)
    variants[RPC] = peer
    try:
        for name, call in variants.items():
            progress(f"warming up: {name}")
            for batch in batches:
                call(batch)
        progress("measuring")
        return dict(interleave(variants, batches, settings.rounds, clock=time.perf_counter).seconds)
    finally:
        for servers in groups.values():
            servers.close()
        stop_ray()
        peer.close()


def report(seconds: dict[str, list[float]], settings: Settings) -> list[Bar]:
    times = Timings(seconds)
    rows = TABLES * settings.batch
    cells = [
        [name, f"{times.median(name) * 1e3:.1f}", f"{rows / times.median(name):,.0f}"] for name in seconds
    ]
    print_table("A lookup and a push", ("variant", "ms", "occurrences/s"), cells)
    two = "megalith, 2 servers"
    limit = times.ratio(f"{BYTES}, 2 servers", two)
    return [
        Bar("speed of the bytes alone", limit.median, 0.8, note="2 servers; 1 would be no cost of our own"),
        Bar("torch RPC with EmbeddingBags", times.ratio(RPC, two).median, 2.0, note="2 servers"),
        Bar("1 server / 2 servers", times.ratio("megalith, 1 servers", two).median, note="scaling"),
    ]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rounds; nothing is saved")
    parser.add_argument("--rounds", type=int, help="default 30")
    parser.add_argument("--output", type=Path, help="where to save the result")
    options = parser.parse_args(arguments)
    settings = Settings(batch=2048, batches=4, rounds=4) if options.quick else Settings()
    if options.rounds:
        settings = replace(settings, rounds=options.rounds)
    here = machine()
    seconds = measure(settings)
    bars = report(seconds, settings)
    print_bars(bars)
    content = {
        "benchmark": "servers",
        "command": command_line(arguments),
        "machine": here,
        "versions": versions(PACKAGES),
        "settings": asdict(settings),
        "sections": {"seconds": seconds},
        "bars": bars,
    }
    if options.output or not options.quick:
        write_result(options.output or result_path("servers"), content)


if __name__ == "__main__":
    main(sys.argv[1:])
