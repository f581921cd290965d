"""Trainers of two ranks, servers and ZooKeeper are killed at any moment: no row is wrong at the end.

Ten rounds of KILLS kills each. In a round, a trainer of two ranks pushes to two servers that it finds in
ZooKeeper. A kill ends a rank, both ranks, a server, both servers or ZooKeeper with SIGKILL, and what was
killed starts again from its files. Where rank 0 was killed, rank 1 lives on for a while, and must not
overwrite what its successors push; rank 0, which commits checkpoints, is ended with rank 1, as a launcher
does. At the end of a round every row of both servers is compared with the trainer's final checkpoint, bit for
bit. MEGALITH_KILLS sets another number of kills.
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

from megalith import checkpoint
from tests.serving.sync.test_chaos import assert_served
from tests.serving.sync_processes import Process, RankPlace, serve, train_rank
from tests.serving.sync_support import Trainer, export_version, make_model
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
    """A trainer of two ranks and two servers, which find each other in ZooKeeper."""

    def __init__(self, folder: Path, stack: ExitStack, zookeeper: ZooKeeper, root: str, seed: int) -> None:
        self._folder, self._stack, self._zookeeper = folder, stack, zookeeper
        self._url = f"zk://{zookeeper.hosts}/{root}"
        self._starts = seed * 1000
        self._survivors: list[Process] = []
        self.kills: Counter[str] = Counter()
        self.ports = [free_port(), free_port()]
        self.servers = [self._serve(port) for port in self.ports]
        self.ranks = self._start_ranks()

    def _start(self, role: Callable[..., None], *args: object) -> Process:
        process = Process(role, *args, seconds=SECONDS)
        self._stack.callback(process.kill)
        return process

    def _serve(self, port: int) -> Process:
        return self._start(serve, self._folder, port, self._url)

    def _start_ranks(self) -> list[Process]:
        self._starts += 1
        session = uuid.uuid4().hex
        places = [
            RankPlace(rank, RANKS, self._folder / f"store-{self._starts}", session, self._starts)
            for rank in range(RANKS)
        ]
        return [self._start(train_rank, self._folder, self._starts, place, self._url) for place in places]

    def kill(self, victim: str) -> None:
        """Kills, and starts again what was killed."""
        kind, _, number = victim.partition(" ")
        if kind == "zookeeper":
            self._zookeeper.kill()
            self._zookeeper.start()
            self.kills["zookeeper"] += 1
        elif kind in ("rank", "ranks"):
            for survivor in self._survivors:  # of the time before
                survivor.kill()
            chosen = range(RANKS) if kind == "ranks" else [int(number)]
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

    def finish(self) -> None:
        """Ends the training, once everything is pushed."""
        for server in self.servers:
            server.until("serving")
        for rank in self.ranks:
            rank.finish()
        for rank in self.ranks:
            report = rank.until("finished")
            assert report.startswith("finished True"), report


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, ROUNDS + 1))
def test_no_row_is_wrong_after_kills(
    tmp_path: Path, stack: ExitStack, zookeeper: ZooKeeper, root: str, seed: int
) -> None:
    model = make_model()
    Trainer(model, seed=seed).step(10)
    tip = checkpoint.save(model, tmp_path / "checkpoint").tip
    export_version(model, tmp_path / "export", base=tip)
    world = World(tmp_path, stack, zookeeper, root, seed)
    chance = random.Random(seed)

    while world.kills.total() < KILLS:
        for _ in range(chance.randrange(3)):  # 0: while something still starts
            world.ranks[0].until("saved")
        world.kill(chance.choice(VICTIMS))
    world.ranks[0].until("saved")
    world.finish()

    final = make_model()
    checkpoint.load(final, tmp_path / "final")
    for port in world.ports:
        assert_served(f"127.0.0.1:{port}", final)
    print(f"round {seed}: {dict(world.kills)}, every row equal")
