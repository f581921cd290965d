"""The processes of sync/test_chaos.py: a trainer that pushes, and servers that follow it.

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
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from megalith import checkpoint
from megalith.serving.discovery import StaticDiscovery
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import ServerConfig
from megalith.serving.sync.publisher import Publisher
from tests.serving.sync_support import Trainer, make_model

SECONDS = 180
LIMIT = 90.0


def train(pipe: Connection, folder: Path, seed: int, addresses: list[str]) -> None:
    model = make_model()
    tip = checkpoint.read_manifest(folder / "checkpoint").tip
    checkpoint.load(model, folder / "checkpoint")
    trainer = Trainer(model, seed=seed)
    finish = threading.Event()
    threading.Thread(target=_listen, args=(pipe, finish), daemon=True).start()
    with Publisher(
        model,
        StaticDiscovery(addresses),
        model_name="movies",
        interval=0.05,
        base=tip,
        timeout=2.0,
        max_backlog=2000,
    ) as publisher:
        pipe.send("training")
        steps = 0
        while not finish.is_set():
            trainer.step()
            publisher.step()
            steps += 1
            if steps % 20 == 0:
                save = checkpoint.save if steps % 80 == 0 else checkpoint.save_delta
                publisher.checkpoint_taken(save(model, folder / "checkpoint").tip)
                pipe.send(f"saved {steps}")
            finish.wait(0.005)  # leaves some of the processor to the others
        done = publisher.flush(60.0)
        checkpoint.save(model, folder / "final")
        pipe.send(f"finished {done} {publisher.report()}")


def serve(pipe: Connection, folder: Path, port: int) -> None:
    with ModelServer(
        folder / "export",
        ServerConfig(port=port, allow_writes=True, checkpoint=folder / "checkpoint", poll_seconds=0.2),
    ) as server:
        pipe.send(f"serving on {server.address}")
        _listen(pipe, threading.Event())


def _listen(pipe: Connection, finish: threading.Event) -> None:
    try:
        pipe.recv()
    except EOFError:
        os._exit(1)  # the parent process has ended
    finish.set()


def _run(role: Callable[..., None], pipe: Connection, args: tuple[object, ...]) -> None:
    signal.alarm(SECONDS)
    torch.set_num_threads(1)
    role(pipe, *args)


class Process:
    """A process with one of these roles, its reports, and its end."""

    def __init__(self, role: Callable[..., None], *args: object) -> None:
        # One process imports everything and is forked for each of these, which is fast.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_run, args=(role, far, args))
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
