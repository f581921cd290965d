"""The processes of sync/test_kills.py: ranks of a trainer that push, and servers that follow them.

A folder holds checkpoint/ and export/. The trainer resumes from the checkpoint, pushes continuously and saves
from time to time; "finish" ends it: everything is pushed, then saved to final/. Both report their progress
through a pipe, and end when its other end is closed.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from megalith import checkpoint
from megalith.models import Model
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import ServerConfig
from megalith.serving.sync.publisher import Publisher
from tests.serving.sync_support import Trainer, make_model

LIMIT = 90.0
NUM_IDS = 500


@dataclass(frozen=True)
class RankPlace:
    """A rank of a trainer: where it meets the others, and the session in which they push."""

    rank: int
    count: int
    store: Path
    session: str
    number: int


def train(pipe: Connection, folder: Path, seed: int, place: RankPlace, url: str) -> None:
    """Trains as one of the ranks, each of which pushes its own rows."""
    dist.init_process_group(
        "gloo", init_method=f"file://{place.store}", rank=place.rank, world_size=place.count
    )
    model = make_model()
    tip = checkpoint.read_manifest(folder / "checkpoint").tip
    checkpoint.load(model, folder / "checkpoint")
    trainer = RankTrainer(model, seed, place.rank)
    finish = threading.Event()
    threading.Thread(target=_listen, args=(pipe, finish), daemon=True).start()
    with Publisher(
        model,
        url,
        model_name="movies",
        interval=0.05,
        base=tip,
        timeout=2.0,
        max_backlog=2000,
        session=place.session,
        session_number=place.number,
        index=place.rank,
        count=place.count,
    ) as publisher:
        pipe.send("training")
        steps = 0
        while not _all(finish.is_set()):
            trainer.step()
            publisher.step()
            steps += 1
            if steps % 20 == 0:
                save = checkpoint.save if steps % 80 == 0 else checkpoint.save_delta
                publisher.checkpoint_taken(save(model, folder / "checkpoint").tip)
                pipe.send(f"saved {steps}")
        # A server may need the rows of other ranks before it applies ours.
        done = any(_all(publisher.flush(2.0)) for _ in range(60))
        checkpoint.save(model, folder / "final")
        checkpoint.save(model, folder / "checkpoint")
        pipe.send(f"finished {done} {publisher.report()}")


def _all(value: bool) -> bool:
    """Whether all ranks have a value."""
    flag = torch.tensor([int(value)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


class RankTrainer(Trainer):
    """One of several ranks: each has ids of its own, and all have the same dense weights."""

    def __init__(self, model: Model, seed: int, rank: int) -> None:
        super().__init__(model, seed, NUM_IDS)
        self._torch.manual_seed(1000 * seed + rank)  # rows are removed on all ranks or on none

    def reduce_gradients(self) -> None:
        for weight in self.model.parameters():
            if weight.grad is not None:
                dist.all_reduce(weight.grad)
                weight.grad /= dist.get_world_size()


def serve(pipe: Connection, folder: Path, port: int, discovery: str | None = None) -> None:
    with ModelServer(
        folder / "export",
        ServerConfig(
            port=port,
            allow_writes=True,
            checkpoint=folder / "checkpoint",
            poll_seconds=0.2,
            discovery=discovery,
            trial="never",
        ),
    ) as server:
        pipe.send(f"serving on {server.address}")
        _listen(pipe, threading.Event())


def _listen(pipe: Connection, finish: threading.Event) -> None:
    try:
        pipe.recv()
    except EOFError:
        os._exit(1)  # the parent process has ended
    finish.set()


def _run(role: Callable[..., None], pipe: Connection, args: tuple[object, ...], seconds: int) -> None:
    signal.alarm(seconds)
    torch.set_num_threads(1)
    role(pipe, *args)


class Process:
    """A process with one of these roles, its reports, and its end."""

    def __init__(self, role: Callable[..., None], *args: object, seconds: int) -> None:
        # One process imports everything and is forked for each of these, which is fast.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_run, args=(role, far, args, seconds))
        self._process.start()
        far.close()
        self._reports: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                self._reports.put(self._pipe.recv())
        except (EOFError, OSError):
            self._reports.put("ended")

    def until(self, beginning: str) -> str:
        """Waits for a report that starts with `beginning`."""
        while True:
            report = self._reports.get(timeout=LIMIT)
            if report.startswith(beginning):
                return report
            assert report != "ended", f"ended before {beginning!r}"

    def finish(self) -> None:
        self._pipe.send("finish")

    def kill(self) -> None:
        self._process.kill()
        self._process.join(LIMIT)
