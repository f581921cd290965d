"""ServerProcesses: several server processes on one port, each with its own cores.

A Python process computes on little more than one core. The kernel divides connections among processes that
listen on one port (SO_REUSEPORT). Mapped rows are in memory once for all of them. The parent process serves
nothing: it starts the others, starts one that exited again, and stops them.

    parent                                           child (`run_child`)
    binds the ports, without listening         ->
    writes the directory and the options       ->    opens the models, listens
                                               <-    `ready` with its models, or `error`
    waits; restarts back off exponentially
    SIGTERM, or its own exit (end of the pipe) ->    NOT_SERVING, lame duck, drain, exit

A child that takes pushes, or registers with a discovery, also has a port of its own: a push through the
shared port would reach one process only, so that port takes none. The bound sockets keep the numbers of all
ports while a child restarts. The metrics of each child are on a port of its own.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from megalith.errors import InputError, MegalithError, RemoteError, UsageError
from megalith.ops import checks
from megalith.serving.server.model_server import ModelServer, bracketed
from megalith.serving.server.server_config import ServerConfig

logger = logging.getLogger(__name__)

START_SECONDS = 600.0
"""Seconds in which a process must have opened its models."""
MARGIN_SECONDS = 10.0
"""Seconds beyond the lame-duck period and the drain after which a process is killed."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before a process that ended is started again; doubled each time unless it has run for longer."""


@dataclass(frozen=True)
class ChildTask:
    """What a child process gets from its parent, over a pipe."""

    number: int
    directory: Path
    config: ServerConfig
    shared_port: int | None
    """Port of gRPC without writes, if the config's port is the child's own."""
    cores: tuple[int, ...]
    """The cores that it runs on; empty: any."""


class ServerProcesses:
    """Serves the models below a directory with several processes; also a context manager."""

    def __init__(self, directory: str | Path, config: ServerConfig) -> None:
        self._directory = checks.path(directory, "directory")
        self._config = checks.instance(config, ServerConfig, "config")
        if config.processes < 2:
            raise InputError("processes must be above 1; use ModelServer for one process")
        if config.access_log == "-":
            raise InputError(
                "several processes cannot write their access log to standard output: give a file"
            )
        if not hasattr(socket, "SO_REUSEPORT"):
            raise InputError("this system cannot share a port: start one process on each of several ports")
        self._sockets: list[socket.socket] = []
        self._children: list[_Child] = []
        self._port = self._http_port = 0
        self._state = "new"

    def start(self) -> Self:
        """Start the processes, and wait until all of them serve."""
        if self._state != "new":
            raise UsageError("a group can be started only once; create another one")
        self._state = "started"
        config = self._config
        try:
            self._port = self._reserve(config.port)
            if config.http_port is not None:
                self._http_port = self._reserve(config.http_port)
            cores = divide_cores(config.processes) if config.pin_processes else [()] * config.processes
            self._children = [_Child(self._task(number, own)) for number, own in enumerate(cores)]
            for child in self._children:
                child.thread.start()
            for child in self._children:
                child.ready.result(START_SECONDS + MARGIN_SECONDS)
        except BaseException:
            self.stop()
            raise
        return self

    def _task(self, number: int, cores: tuple[int, ...]) -> ChildTask:
        config = self._config
        alone = config.allow_writes or config.discovery is not None
        port, advertise = self._port, config.advertise
        if alone:
            port = self._reserve(config.process_port + number if config.process_port else 0)
            advertise = advertise and f"{advertise.rpartition(':')[0]}:{port}"
        own = replace(
            config,
            processes=1,
            port=port,
            http_port=self._http_port or None,
            metrics_port=config.metrics_port + number if config.metrics_port else config.metrics_port,
            advertise=advertise,
        )
        return ChildTask(number, self._directory, own, self._port if alone else None, cores)

    def _reserve(self, port: int) -> int:
        """Bind a port that the children share with this process, which never listens."""
        host = self._config.host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        if port:  # a server of someone else must not share it
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        reserved = socket.socket(family)
        self._sockets.append(reserved)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((host, port))
        found: int = reserved.getsockname()[1]
        return found

    @property
    def address(self) -> str:
        """host:port of gRPC, which all processes share."""
        return self._address(self._port)

    @property
    def http_address(self) -> str | None:
        """host:port of REST; None without it."""
        return self._address(self._http_port) if self._http_port else None

    @property
    def metrics_addresses(self) -> list[str]:
        """host:port of the metrics of each process; empty without them."""
        return [child.metrics for child in self._children if child.metrics]

    @property
    def process_addresses(self) -> list[str]:
        """host:port of each process alone, to which training pushes; empty if they have none."""
        tasks = [child.task for child in self._children]
        return [self._address(task.config.port) for task in tasks if task.shared_port is not None]

    @property
    def models(self) -> list[tuple[str, int]]:
        return [(name, number) for name, number in self._children[0].ready.result(0)]

    def _address(self, port: int) -> str:
        return f"{bracketed(self._config.host)}:{port}"

    @property
    def process_ids(self) -> list[int]:
        return [child.pid for child in self._children]

    def stop(self) -> None:
        """Stop all processes at once, as `ModelServer.stop` does; further calls do nothing."""
        if self._state == "stopped":
            return
        self._state = "stopped"
        for child in self._children:
            child.terminate()
        end = time.monotonic() + self._config.lame_duck_seconds + self._config.drain_seconds + MARGIN_SECONDS
        for child in self._children:
            child.end(max(0.0, end - time.monotonic()))
        for each in self._sockets:
            each.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Child:
    """One process, and the thread that starts it and waits for its end."""

    def __init__(self, task: ChildTask) -> None:
        self.task = task
        self.ready: Future[list[list[Any]]] = Future()
        """The models of the first process, or why it could not start."""
        self.metrics: str | None = None
        self.thread = threading.Thread(target=self._run, name=f"megalith-process-{task.number}", daemon=True)
        self._stopping = threading.Event()
        self._changing = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def _run(self) -> None:
        wait = FIRST_WAIT
        while True:
            began = time.monotonic()
            try:
                models = self._start()
                if not self.ready.done():
                    self.ready.set_result(models)
                assert self._process is not None
                status = self._process.wait()  # no limit: it serves until then
                problem = f"ended with status {status}"
            except Exception as error:
                if not self.ready.done():
                    self.ready.set_exception(error)
                    return
                problem = str(error)
            if self._stopping.is_set():
                return
            wait = FIRST_WAIT if time.monotonic() - began > LONGEST_WAIT else wait
            logger.error("server process %d: %s; it is started again", self.task.number, problem)
            if self._stopping.wait(wait):
                return
            wait = min(2 * wait, LONGEST_WAIT)

    def _start(self) -> list[list[Any]]:
        """Start the process, and wait until it serves; return its models."""
        path = os.pathsep.join(each for each in sys.path if each)
        environment = {**os.environ, "PYTHONPATH": path}
        threads = self.task.config.batching.threads
        if threads is not None:
            environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        command = [sys.executable, "-P", "-m", __name__]  # -P: no modules of the working directory
        with self._changing:
            if self._stopping.is_set():
                raise RemoteError("the group stops", code="CANCELLED")
            process = self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(START_SECONDS, process.kill)
        timer.start()
        try:
            with suppress(BrokenPipeError):  # the reply below says why it ended
                pickle.dump(self.task, process.stdin)  # read by the process that was started above
                process.stdin.flush()
            line = process.stdout.readline()
        finally:
            timer.cancel()
        found: dict[str, Any] = json.loads(line) if line else {"error": "it ended; see its messages above"}
        if "error" in found:
            raise RemoteError(f"server process {self.task.number}: {found['error']}", code="UNAVAILABLE")
        self.metrics = found["metrics"]
        models: list[list[Any]] = found["ready"]
        return models

    def terminate(self) -> None:
        """Ask the process to stop."""
        self._stopping.set()
        with self._changing:
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)

    def end(self, timeout: float) -> None:
        """Wait for the end of the process, and kill it after a time."""
        process = self._process
        if process is None:
            return
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            logger.error("server process %d did not stop and is killed", self.task.number)
            process.kill()
            process.wait()  # no limit: it is killed
        self.thread.join(MARGIN_SECONDS)
        if self.thread.is_alive():
            logger.error(
                "server process %d ended, but the thread that waits for it has not", self.task.number
            )
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def divide_cores(processes: int, cores: Sequence[int] | None = None) -> list[tuple[int, ...]]:
    if cores is None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    each = len(cores) // processes
    return [tuple(cores[k * each : (k + 1) * each]) for k in range(processes)]


def run_child() -> int:
    """Serve what the parent asks for."""
    import torch

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print must not reach the parent's pipe
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and stops its children
    task: ChildTask = pickle.load(sys.stdin.buffer)  # of the parent
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s %(levelname)s process {task.number}: %(message)s"
    )
    logging.getLogger("kazoo").setLevel(logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if task.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, task.cores)
    if task.config.batching.threads is not None:
        torch.set_num_threads(task.config.batching.threads)

    def reply(**content: Any) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    def watch_parent() -> None:
        os.read(0, 1)  # the parent writes no more: its end ends the pipe
        stop.set()

    server = ModelServer(task.directory, task.config, reuse_port=True, shared_port=task.shared_port)
    try:
        server.start()
    except (MegalithError, OSError) as error:
        reply(error=str(error))
        return 1
    try:
        threading.Thread(target=watch_parent, daemon=True).start()
        models = [(model.name, model.newest.number) for model in server.models if model.newest is not None]
        reply(ready=models, metrics=server.metrics_address)
        stop.wait()  # no limit: until a signal
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(run_child())
