"""Ranks of a trainer, servers and ZooKeeper are killed at any moment: no row is wrong at the end.

`make test` kills a trainer of one rank and its two servers, and exports a new version meanwhile.

`make soak` makes ten rounds of KILLS kills each. In a round, a trainer of two ranks pushes to two servers
that it finds in ZooKeeper. A kill ends a rank, both ranks, a server, both servers or ZooKeeper with SIGKILL,
and what was killed starts again from its files. Where rank 0 was killed, rank 1 lives on for a while, and
must not overwrite what its successors push; rank 0, which commits checkpoints, is ended with rank 1, as a
launcher does. At the end of a round every row of both servers is compared with the trainer's final
checkpoint, bit for bit. MEGALITH_KILLS sets another number of kills.
"""

from __future__ import annotations

import os
import random
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from megalith import checkpoint
from megalith.models import Model
from tests.serving.exports import ServerClient
from tests.serving.sync_processes import LIMIT, NUM_IDS, Process, RankPlace, serve, train
from tests.serving.sync_support import NAMES, Trainer, export_version, make_model, rows_of
from tests.serving.zookeeper import ZooKeeper, free_port, root, zookeeper

__all__ = ["root", "zookeeper"]
ROUNDS = 10
KILLS = int(os.environ.get("MEGALITH_KILLS", "20"))
"""Kills in a round."""
RANKS = 2
SECONDS = 3000
"""After which a process ends by itself."""
VICTIMS = ["rank 0", "rank 1", "ranks", "server 0", "server 1", "servers", "zookeeper"]


class World:
    """A trainer and two servers. Without ZooKeeper it has one rank, which is given their addresses."""

    def __init__(
        self, folder: Path, stack: ExitStack, seed: int, zookeeper: ZooKeeper | None = None, root: str = ""
    ) -> None:
        model = make_model()
        Trainer(model, seed=seed).step(10)
        tip = checkpoint.save(model, folder / "checkpoint").tip
        export_version(model, folder / "export", base=tip)
        self._folder, self._stack, self._zookeeper = folder, stack, zookeeper
        self._count = 1 if zookeeper is None else RANKS
        self._starts = seed * 1000
        self._survivors: list[Process] = []
        self.kills: Counter[str] = Counter()
        self.ports = [free_port(), free_port()]
        addresses = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        self._url = f"static:{addresses}" if zookeeper is None else f"zk://{zookeeper.hosts}/{root}"
        self.servers = [self._serve(port) for port in self.ports]
        self.ranks = self._start_ranks()

    def _start(self, role: Callable[..., None], *args: object) -> Process:
        process = Process(role, *args, seconds=SECONDS)
        self._stack.callback(process.kill)
        return process

    def _serve(self, port: int) -> Process:
        return self._start(serve, self._folder, port, None if self._zookeeper is None else self._url)

    def _start_ranks(self) -> list[Process]:
        self._starts += 1
        session = uuid.uuid4().hex
        places = [
            RankPlace(rank, self._count, self._folder / f"store-{self._starts}", session, self._starts)
            for rank in range(self._count)
        ]
        return [self._start(train, self._folder, self._starts, place, self._url) for place in places]

    def kill(self, victim: str) -> None:
        """Kills, and starts again what was killed."""
        kind, _, number = victim.partition(" ")
        if self._zookeeper is not None and kind == "zookeeper":
            self._zookeeper.kill()
            self._zookeeper.start()
            self.kills["zookeeper"] += 1
        elif kind in ("rank", "ranks"):
            for survivor in self._survivors:  # of the time before
                survivor.kill()
            chosen = range(self._count) if kind == "ranks" else [int(number)]
            for rank in chosen:
                self.ranks[rank].kill()
                self.kills["rank"] += 1
            self._survivors = self.ranks[1:] if chosen == [0] else []
            if not self._survivors:
                self.ranks[0].kill()
            self.ranks = self._start_ranks()
        else:
            chosen = range(len(self.servers)) if kind == "servers" else [int(number)]
            for server in chosen:
                self.servers[server].kill()
                self.kills["server"] += 1
            for server in chosen:
                self.servers[server] = self._serve(self.ports[server])

    def export(self) -> None:
        """Exports the checkpoint there is, which servers pick up while rows are pushed."""
        model = make_model()
        checkpoint.load(model, self._folder / "checkpoint")
        tip = checkpoint.read_manifest(self._folder / "checkpoint").tip
        version = 1 + max(int(path.name) for path in (self._folder / "export").iterdir())
        export_version(model, self._folder / "export", base=tip, version=version)

    def finish(self) -> None:
        """Ends the training, once everything is pushed, and compares the servers with its last checkpoint."""
        for server in self.servers:
            server.until("serving")
        for rank in self.ranks:
            rank.finish()
        for rank in self.ranks:
            report = rank.until("finished")
            assert report.startswith("finished True"), report
        final = make_model()
        checkpoint.load(final, self._folder / "final")
        for port in self.ports:
            assert_served(f"127.0.0.1:{port}", final)


def assert_served(address: str, model: Model) -> None:
    """The rows of all ids, bit for bit, and scores, which need the dense weights."""
    ids = torch.arange(-5, NUM_IDS + 5)
    with ServerClient(address) as ask:
        rows = ask(dict.fromkeys(NAMES, ids), signature="lookup", timeout=LIMIT)
    for table in NAMES:
        assert torch.equal(rows[table], rows_of(model, table, ids)), (address, table)
    scans = {table: model.embeddings.shards.scan(table) for table in NAMES}
    known = {table: torch.cat([chunk.ids for chunk in scan])[:100] for table, scan in scans.items()}
    with torch.no_grad():
        expected = model.eval()(known)
    with ServerClient(address) as ask:
        scores = ask(known, timeout=LIMIT)["logits"]
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-6)


def test_killed_and_restarted_at_random_all_end_equal(tmp_path: Path, stack: ExitStack) -> None:
    world = World(tmp_path, stack, seed=1)
    events = [["rank 0"], ["server 0"], ["server 1"], ["rank 0", "server 0"], []]
    random.Random(1).shuffle(events)

    for victims in events:
        world.ranks[0].until("saved")
        if not victims:
            world.export()
        for victim in victims:
            world.kill(victim)
    world.ranks[0].until("saved")

    world.finish()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, ROUNDS + 1))
def test_no_row_is_wrong_after_kills(
    tmp_path: Path, stack: ExitStack, zookeeper: ZooKeeper, root: str, seed: int
) -> None:
    world = World(tmp_path, stack, seed, zookeeper, root)
    chance = random.Random(seed)

    while world.kills.total() < KILLS:
        for _ in range(chance.randrange(3)):  # 0: while something still starts
            world.ranks[0].until("saved")
        world.kill(chance.choice(VICTIMS))
    world.ranks[0].until("saved")
    world.finish()
    print(f"round {seed}: {dict(world.kills)}, every row equal")
