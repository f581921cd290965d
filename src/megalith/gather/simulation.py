"""A simulated run: peers with seeded updates and faults on a fault server, and ranks that gather them.

What peers send and what goes wrong with them follows from the seed alone, and deadlines are far above the
latency: the weights are the same for any number of ranks. `python -m megalith.gather.simulation FILE` is one
rank; `simulate` in the command line starts them.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.gather.compress import compress
from megalith.gather.faultserver import FaultServer, ServerFault, seeded_faults
from megalith.gather.fetch import FetchOptions
from megalith.gather.metrics import metrics
from megalith.gather.payload import Label
from megalith.gather.plan import Plan, payload_key
from megalith.gather.ranks import Ranks
from megalith.gather.schema import Schema
from megalith.gather.settings import OverlapConfig, UpdateConfig
from megalith.gather.store import s3_store
from megalith.gather.update import OuterUpdate
from megalith.gather.window import run_window

RUN = "simulation"
OPENS = datetime(2026, 1, 1, tzinfo=UTC)
CLOSES = OPENS + timedelta(minutes=10)
SHAPES = {"layer1.weight": (128, 96), "layer1.bias": (128,), "layer2.weight": (64, 128), "layer2.bias": (64,)}
FAULTS = {
    "missing": "nothing is there",
    "early": "written before the window opened",
    "late": "written after the window closed",
    "corrupt": "a byte is wrong",
    "copy": "the positions of another peer",
    "flaky": "one 503, then well",
    "cut": "the connection ends amid the body, once",
    "down": "500, always",
}
"""What can go wrong with a peer."""
DEFAULT_FAULTS = dict.fromkeys(FAULTS, 0.05)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A run of some windows. faults: share of peers by name."""

    peers: int = 16
    """Of each window; one in `reserve_share` is a reserve."""
    seed: int = 0
    windows: int = 1
    latency: float = 0.05
    in_flight: int = 4
    deadline: float = 120.0
    timeout: float = 120.0
    faults: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_FAULTS))
    reserve_share: int = 5

    def __post_init__(self) -> None:
        unknown = sorted(set(self.faults) - set(FAULTS))
        if unknown:
            raise InputError(f"unknown fault {unknown[0]!r} (known: {', '.join(FAULTS)})")
        if any(rate < 0 for rate in self.faults.values()) or sum(self.faults.values()) > 1:
            raise InputError(
                f"shares of faults must be 0 or more and 1 in all at most, got {dict(self.faults)}"
            )
        if self.peers < 1 or self.windows < 1 or self.deadline < 20 * self.latency:
            raise InputError("a simulation needs peers, windows, and a deadline of 20 latencies or more")

    def plan(self, window: int) -> Plan:
        """The plan of a window: the last peers are reserves."""
        wanted = self.peers - self.peers // self.reserve_share
        return Plan(
            run=RUN,
            window=window,
            schema=schema().digest,
            primary=tuple(range(wanted)),
            reserve=tuple(range(wanted, self.peers)),
            time_min=OPENS,
            time_max=CLOSES,
            grace=0.0,
            deadline=self.deadline,
            max_object_bytes=1 << 24,
            memory_budget=32 << 20,
            update=UpdateConfig(lr=0.7, optimizer="nesterov"),
            overlap=OverlapConfig(exclude="max"),
        )

    def fault_of(self, window: int) -> dict[int, str]:
        """Which peers get which fault, by seed, window and uid alone."""
        return seeded_faults(self.seed * 1_000_003 + window, range(self.peers), self.faults)

    def fill(self, server: FaultServer) -> None:
        """Lets all peers of all windows publish, and orders the faults."""
        for window in range(self.windows):
            faults = self.fault_of(window)
            for uid in range(self.peers):
                self._publish(server, window, uid, faults.get(uid))

    def _publish(self, server: FaultServer, window: int, uid: int, fault: str | None) -> None:
        key = payload_key(RUN, window, uid)
        author = (uid + 1) % self.peers if fault == "copy" else uid
        make = torch.Generator().manual_seed((self.seed * 1009 + window) * 1_000_003 + author)
        update = {name: 0.01 * torch.randn(shape, generator=make) for name, shape in SHAPES.items()}
        data = bytearray(compress(update, schema()).to_bytes(Label(RUN, window, uid, global_step=window)))
        if fault == "corrupt":
            data[-1] ^= 1
        when = {"early": OPENS - timedelta(seconds=1), "late": CLOSES + timedelta(seconds=1)}.get(
            fault or "", OPENS + timedelta(seconds=300 if fault == "copy" else uid % 60)
        )
        if fault != "missing":
            server.put(key, bytes(data), when)
        ordered = {
            "flaky": ServerFault("status", "HEAD", code=503),
            "cut": ServerFault("truncate"),
            "down": ServerFault("status", "*", times=1 << 30, code=500),
        }.get(fault or "")
        if ordered is not None:
            server.fail(key, ordered)


def schema() -> Schema:
    """Of the simulated model."""
    return Schema.of(initial_weights(), chunk=32, keep=32)


def initial_weights() -> dict[str, Tensor]:
    """Of the simulated model, the same everywhere."""
    make = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=make) for name, shape in SHAPES.items()}


def run_rank(simulation: Simulation, endpoint: str, ranks: Ranks | None, report: Path | None) -> str:
    """One rank's part of all windows; the hash of its weights. report: where each window's numbers go."""
    weights, update = initial_weights(), OuterUpdate(schema())
    stores = {"default": s3_store(FaultServer.bucket, endpoint=endpoint)}
    options = FetchOptions(in_flight=simulation.in_flight)
    for window in range(simulation.windows):
        done = run_window(
            simulation.plan(window) if ranks is None or ranks.leads else None,
            weights,
            update,
            stores,
            ranks=ranks,
            options=options,
            snapshot="host",
        )
        if report is not None and (ranks is None or ranks.leads):
            numbers: dict[str, Any] = {
                "reason": done.decision.reason.name,
                "uids": list(done.result.uids),
                "statuses": {str(u): str(r.status) for u, r in sorted(done.result.records.items())},
                "excluded": [] if done.update is None else list(done.update.excluded),
                "metrics": metrics(done.result, overlap=done.overlap),
            }
            (report / f"window-{window}.json").write_text(json.dumps(numbers))
    found = update.fingerprint(weights).hash
    if report is not None and (ranks is None or ranks.leads):
        (report / "weights").write_text(found)
    return found


class StatusFile(logging.Handler):
    """Writes what becomes of each uid to a file, a line each, for whoever watches."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Takes the lines that fetching logs."""
        if record.msg.startswith("plan %s uid") and isinstance(record.args, tuple):
            with self._path.open("a") as file:
                file.write(f"{record.args[1]} {record.args[2]}\n")


def main(path: Path) -> None:
    """A rank of a simulation, as a process."""
    torch.set_num_threads(1)
    given = json.loads(path.read_text())
    simulation = Simulation(**given["simulation"])
    folder = path.parent
    ranks = Ranks.join(timeout=simulation.timeout)
    log = logging.getLogger("megalith.gather")
    log.setLevel(logging.INFO)
    log.addHandler(StatusFile(folder / f"statuses-{ranks.rank}"))
    log.propagate = False
    run_rank(simulation, given["endpoint"], ranks, folder)


def write_job(folder: Path, simulation: Simulation, endpoint: str) -> Path:
    """The file that tells ranks what to do."""
    path = folder / "job.json"
    path.write_text(json.dumps({"simulation": asdict(simulation), "endpoint": endpoint}))
    return path


if __name__ == "__main__":
    main(Path(sys.argv[1]))
