"""A simulated run: peers with seeded updates and faults in a directory, and ranks that gather them.

What peers send and what goes wrong with them depends on the seed alone, and deadlines are far above the
latency: the weights are equal for any number of ranks. A `FaultyStore`, a directory as an object
store, injects latency and faults.
`python -m megalith.gather.simulation FILE` is one rank; `megalith gather simulate` starts them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.distributed.elastic_ranks import ElasticRanks
from megalith.errors import InputError
from megalith.gather.compress import compress
from megalith.gather.fetch import RankOptions
from megalith.gather.payload import Label
from megalith.gather.payload_schema import PayloadSchema
from megalith.gather.plan import GatherConfig, GatherPlan, OverlapConfig, UpdateConfig, payload_key
from megalith.gather.update import OuterUpdate
from megalith.gather.window import WindowReport, metrics, run_window
from megalith.ops import checks
from megalith.storage.object_store import ObjectInfo, ObjectStore, RequestFailure, StoreRequestError


class FaultyStore(ObjectStore):
    """A directory with latency and faults."""

    def __init__(
        self, directory: Path, *, latency: float = 0.0, faults: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(directory.absolute().as_uri())
        self._latency = latency
        self._faults = dict(faults or {})
        self.downloads: Counter[str] = Counter()

    async def head(self, key: str, *, timeout: float) -> ObjectInfo:
        await self._answer(key, "flaky", timeout)
        return await super().head(key, timeout=timeout)

    async def get(
        self, key: str, sink: Callable[[memoryview], None], *, etag: str | None = None, timeout: float
    ) -> ObjectInfo:
        await self._answer(key, "cut", timeout)
        info = await super().get(key, sink, etag=etag, timeout=timeout)
        self.downloads[key] += 1
        return info

    async def _answer(self, key: str, once: str, timeout: float) -> None:
        await asyncio.sleep(min(self._latency, timeout))
        fault = self._faults.get(key)
        if fault == once:
            del self._faults[key]
        if fault in (once, "down") or self._latency > timeout:
            failure = RequestFailure.TIMEOUT if self._latency > timeout else RequestFailure.STORE_ERROR
            raise StoreRequestError(failure, f"request of {key!r}: injected fault {fault}")


RUN = "simulation"
OPENS = datetime(2026, 1, 1, tzinfo=UTC)
CLOSES = OPENS + timedelta(minutes=10)
SHAPES = {"layer1.weight": (128, 96), "layer1.bias": (128,), "layer2.weight": (64, 128), "layer2.bias": (64,)}
FAULTS = {
    "missing": "there is no object",
    "early": "written before the window opened",
    "late": "written after the window closed",
    "corrupt": "a byte is wrong",
    "copy": "the positions of another peer",
    "flaky": "one 503, then it works",
    "cut": "the connection ends within the body, once",
    "down": "always 500",
}
"""What can go wrong with a peer."""
DEFAULT_FAULTS = dict.fromkeys(FAULTS, 0.05)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A run of some windows."""

    peers: int = 16
    """Peers of each window; one in `reserve_share` is a reserve."""
    seed: int = 0
    """Determines updates and faults."""
    windows: int = 1
    """The number of windows."""
    latency: float = 0.05
    """Seconds before each answer of the store."""
    in_flight: int = 4
    """Downloads at once on a rank."""
    deadline: float = 120.0
    """Seconds for the downloads of a window."""
    timeout: float = 120.0
    """Seconds that an exchange between ranks may take."""
    faults: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_FAULTS))
    """The share of peers with each fault, by the names of FAULTS."""
    reserve_share: int = 5
    """See `peers`."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.faults) - set(FAULTS))
        if unknown:
            raise InputError(f"unknown fault {unknown[0]!r} (known: {', '.join(FAULTS)})")
        if any(rate < 0 for rate in self.faults.values()) or sum(self.faults.values()) > 1:
            raise InputError(
                f"shares of faults must be 0 or more and at most 1 together, got {dict(self.faults)}"
            )
        checks.integer(self.peers, "simulation: peers")
        checks.integer(self.windows, "simulation: windows")
        if self.deadline < 20 * self.latency:
            raise InputError("simulation: the deadline must be at least 20 latencies")

    def faults_of(self, window: int) -> dict[int, str]:
        drawn: dict[int, str] = {}
        for uid in range(self.peers):
            value = random.Random(f"{self.seed * 1_000_003 + window}/{uid}").random()
            for name, rate in sorted(self.faults.items()):
                if value < rate:
                    drawn[uid] = name
                    break
                value -= rate
        return drawn

    def fill(self, directory: Path) -> None:
        """Write the payloads of all peers and windows."""
        for window in range(self.windows):
            faults = self.faults_of(window)
            for uid in range(self.peers):
                self._publish(directory, window, uid, faults.get(uid))

    def _publish(self, directory: Path, window: int, uid: int, fault: str | None) -> None:
        if fault == "missing":
            return
        author = (uid + 1) % self.peers if fault == "copy" else uid
        make = torch.Generator().manual_seed((self.seed * 1009 + window) * 1_000_003 + author)
        update = {
            name: 0.01 * torch.randn(shape, generator=make, device="cpu") for name, shape in SHAPES.items()
        }
        label = Label(RUN, window, uid, global_step=window)
        data = bytearray(compress(update, _schema()).to_bytes(label))
        if fault == "corrupt":
            data[-1] ^= 1
        written = {"early": OPENS - timedelta(seconds=1), "late": CLOSES + timedelta(seconds=1)}.get(
            fault or "", OPENS + timedelta(seconds=300 if fault == "copy" else uid % 60)
        )
        path = directory / payload_key(RUN, window, uid)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (written.timestamp(), written.timestamp()))


def _plan(simulation: Simulation, window: int) -> GatherPlan:
    """The plan of a window: the last peers are reserves."""
    wanted = simulation.peers - simulation.peers // simulation.reserve_share
    return GatherPlan(
        run=RUN,
        window=window,
        schema=_schema(),
        primary=tuple(range(wanted)),
        reserve=tuple(range(wanted, simulation.peers)),
        time_min=OPENS,
        time_max=CLOSES,
        gather=GatherConfig(
            grace=0.0, deadline=simulation.deadline, max_object_bytes=1 << 24, memory_budget=32 << 20
        ),
        update=UpdateConfig(lr=0.7, optimizer="nesterov"),
        overlap=OverlapConfig(exclude="max"),
    )


def _store(simulation: Simulation, directory: Path) -> FaultyStore:
    """A directory that `fill` has filled, with the latency and the faults of the simulation."""
    faults = {
        payload_key(RUN, window, uid): fault
        for window in range(simulation.windows)
        for uid, fault in simulation.faults_of(window).items()
    }
    return FaultyStore(directory, latency=simulation.latency, faults=faults)


def _schema() -> PayloadSchema:
    return PayloadSchema.of(_weights(), chunk=32, keep=32)


def _weights() -> dict[str, Tensor]:
    """The initial weights, equal everywhere."""
    make = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=make, device="cpu") for name, shape in SHAPES.items()}


def run_rank(simulation: Simulation, directory: Path, ranks: ElasticRanks | None, report: Path | None) -> str:
    """Do one rank's part of all windows."""
    weights, update, store = _weights(), OuterUpdate(_schema()), _store(simulation, directory)
    options = RankOptions(in_flight=simulation.in_flight, snapshot="host")
    leads = ranks is None or ranks.leads
    for window in range(simulation.windows):
        plan, stores = _plan(simulation, window) if leads else None, {"default": store}
        done = run_window(plan, weights, update, stores, ranks=ranks, options=options)
        if report is not None and leads:
            (report / f"window-{window}.json").write_text(json.dumps(_numbers(done)))
    found = update.fingerprint(weights).hash
    if report is not None:
        rank = 0 if ranks is None else ranks.rank
        (report / f"downloads-{rank}.json").write_text(json.dumps(store.downloads))
        if leads:
            (report / "weights").write_text(found)
    return found


def _numbers(done: WindowReport) -> dict[str, Any]:
    result = done.result
    skipped = [result.records[uid] for uid in result.skipped_uids]
    return {
        "reason": done.decision.reason.name,
        "uids": list(result.uids),
        "skipped": {str(each.uid): [str(each.status), each.detail] for each in skipped},
        "excluded": [] if done.update is None else list(done.update.excluded),
        "metrics": metrics(result, overlap=done.overlap),
    }


class _StatusFile(logging.FileHandler):
    """Writes the status of each uid, a line each, for whoever watches."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("plan %s uid") and isinstance(record.args, tuple):
            record.msg, record.args = "%s %s", record.args[1:3]
            super().emit(record)


def write_job(folder: Path, simulation: Simulation) -> Path:
    """Fill the store, and write the file that describes the work to ranks."""
    simulation.fill(folder / "store")
    path = folder / "job.json"
    path.write_text(json.dumps(asdict(simulation)))
    return path


def main(path: Path) -> None:
    """Run a rank of a simulation, as a process."""
    torch.set_num_threads(1)
    simulation = Simulation(**json.loads(path.read_text()))
    folder = path.parent
    ranks = ElasticRanks.join(timeout=simulation.timeout)
    log = logging.getLogger("megalith.gather")
    log.setLevel(logging.INFO)
    log.addHandler(_StatusFile(folder / f"statuses-{ranks.rank}"))
    log.propagate = False
    run_rank(simulation, folder / "store", ranks, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
