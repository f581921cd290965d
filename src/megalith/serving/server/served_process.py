"""One process of a ServerProcesses: a model server that its parent starts and stops.

Run as a program by the parent, with a ChildTask on its standard input; server_processes.py has the protocol.
It serves until SIGTERM, or until its parent ends.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import sys
import threading
from typing import IO, Any

from megalith.errors import MegalithError
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_processes import ChildTask


def main() -> int:
    """Serve what the parent asks for."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print must not reach the parent's pipe
    source = os.fdopen(os.dup(0), "rb", buffering=0)  # no buffer: a thread reads it until the process ends
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and stops its children
    task: ChildTask = pickle.loads(_read(source, int.from_bytes(_read(source, 8), "big")))  # of the parent
    _prepare(task)

    def reply(**content: Any) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    server = ModelServer(task.directory, task.config, reuse_port=True, shared_port=task.shared_port)
    try:
        server.start()
    except (MegalithError, OSError) as error:
        reply(error=str(error))
        return 1
    try:
        reply(
            ready=[(model.name, model.newest.number) for model in server.models if model.newest is not None]
        )
        threading.Thread(target=_answer, args=(source, reply, server, stop), daemon=True).start()
        stop.wait()
    finally:
        server.stop()
    return 0


def _read(source: IO[bytes], size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = source.read(size - len(data))
        if not more:
            sys.exit("the parent ended")
        data += more
    return data


def _prepare(task: ChildTask) -> None:
    import torch

    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s %(levelname)s process {task.number}: %(message)s"
    )
    logging.getLogger("kazoo").setLevel(logging.WARNING)
    if task.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, task.cores)
    if task.config.batching.threads is not None:
        torch.set_num_threads(task.config.batching.threads)


def _answer(source: IO[bytes], reply: Any, server: ModelServer, stop: threading.Event) -> None:
    """Answer the parent; its end is the end of its pipe."""
    while received := source.read(4096):
        for _ in range(received.count(b"metrics\n")):  # the parent waits for each reply
            reply(metrics=server.metrics.text().decode())
    stop.set()


if __name__ == "__main__":
    sys.exit(main())
