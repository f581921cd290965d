"""ServerProcesses: several server processes on one port, each with its own cores.

A Python process computes on little more than one core. The kernel divides connections among processes that
listen on one port (SO_REUSEPORT). Mapped rows are in memory once for all of them. The parent process serves
nothing but the metrics; `run_child` is the program of a child process:

    parent                                           child
    binds the ports, without listening         ->
    writes the directory and the options       ->    opens the models, listens
                                               <-    `ready` with its address and models, or `error`
    restarts a child that exited; restarts
    back off exponentially
    `metrics`, when they are requested         ->    the text of its metrics
    SIGTERM, or its own exit (end of the pipe) ->    NOT_SERVING, lame duck, drain, exit

A child that takes pushes, or registers with a discovery, also has a port of its own: a push through the
shared port would reach one process only, so that port takes none. The bound sockets keep the numbers of all
ports while a child restarts.
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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Self

from megalith.errors import InputError, MegalithError, RemoteError, UsageError
from megalith.ops import checks
from megalith.serving.server.model_server import ModelServer, bracketed
from megalith.serving.server.server_config import ServerConfig
from megalith.serving.server.server_metrics import MetricsServer, prometheus

logger = logging.getLogger(__name__)

CHILD = "megalith.serving.server.server_processes"
START_SECONDS = 600.0
"""Seconds in which a process must have opened its models."""
MARGIN_SECONDS = 10.0
"""Seconds beyond the lame-duck period and the drain after which a process is killed."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before a process that ended is started again; the wait doubles while it keeps ending."""
METRICS_SECONDS = 5.0
"""Seconds to wait for a process that another question is asked of, or that starts."""
HANG_SECONDS = 60.0
"""Seconds after which a process that does not answer is killed; its late reply would be taken for another."""


@dataclass(frozen=True)
class ChildTask:
    """What a child process gets from its parent, over a pipe."""

    directory: Path
    config: ServerConfig
    shared_port: int | None
    """Port of gRPC without writes, if the config's port is the child's own."""
    cores: tuple[int, ...]
    """The cores that it runs on; empty: any."""
    number: int


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
        self._stopping = threading.Event()
        self._metrics_server: Any = None
        self._port = self._http_port = 0
        self._state = "new"

    def start(self) -> Self:
        """Start the processes, and wait until all of them serve."""
        if self._state != "new":
            raise UsageError("a group can be started only once; create another one")
        self._state = "started"
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        config = self._config
        self._port = self._reserve(config.host, config.port)
        if config.http_port is not None:
            self._http_port = self._reserve(config.host, config.http_port)
        cores = divide_cores(config.processes) if config.pin_processes else [()] * config.processes
        for number in range(config.processes):
            self._children.append(_Child(self._task(number, cores[number]), self._stopping))
        for child in self._children:
            child.begin()
        for child in self._children:
            child.wait_ready()
        for child in self._children:
            child.watch()
        if config.metrics_port is not None:
            self._metrics_server = MetricsServer(
                GroupMetrics(self._children), config.security, config.metrics_host, config.metrics_port
            )
            self._metrics_server.start()

    def _task(self, number: int, cores: tuple[int, ...]) -> ChildTask:
        config = self._config
        alone = config.allow_writes or config.discovery is not None
        port = self._port
        if alone:
            first = config.process_port
            port = self._reserve(config.host, first + number if first else 0)
        advertise = config.advertise
        if alone and advertise is not None:
            advertise = f"{advertise.rpartition(':')[0]}:{port}"
        own = replace(
            config,
            processes=1,
            port=port,
            http_port=None if config.http_port is None else self._http_port,
            metrics_port=None,
            advertise=advertise,
        )
        return ChildTask(self._directory, own, self._port if alone else None, cores, number)

    def _reserve(self, host: str, port: int) -> int:
        """Bind a port that the children share with this process, which never listens."""
        host = host.strip("[]")
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
    def metrics_address(self) -> str | None:
        """host:port of the metrics of all processes; None without them."""
        server = self._metrics_server
        return None if server is None else f"{bracketed(self._config.metrics_host)}:{server.port}"

    @property
    def process_addresses(self) -> list[str]:
        """host:port of each process alone, to which training pushes; empty if they have none."""
        tasks = [child.task for child in self._children]
        return [self._address(task.config.port) for task in tasks if task.shared_port is not None]

    @property
    def models(self) -> list[tuple[str, int]]:
        return [(name, number) for name, number in self._children[0].models]

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
        self._stopping.set()
        for child in self._children:
            child.terminate()
        end = time.monotonic() + self._config.lame_duck_seconds + self._config.drain_seconds + MARGIN_SECONDS
        for child in self._children:
            child.end(max(0.0, end - time.monotonic()))
        if self._metrics_server is not None:
            self._metrics_server.stop(1.0)
        for each in self._sockets:
            each.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Child:
    """One process, which is started again when it ends by itself."""

    def __init__(self, task: ChildTask, stopping: threading.Event) -> None:
        self.task = task
        self.number = task.number
        self.restarts = 0
        self.up = False
        self.models: list[list[Any]] = []
        self._stopping = stopping
        self._changing = threading.Lock()
        self._asking = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher = threading.Thread(
            target=self._watch, name=f"megalith-process-{task.number}", daemon=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def begin(self) -> None:
        path = os.pathsep.join(each for each in sys.path if each)
        environment = {**os.environ, "PYTHONPATH": path}
        threads = self.task.config.batching.threads
        if threads is not None:
            environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        command = [sys.executable, "-P", "-m", CHILD]  # -P: no modules of the working directory
        with self._changing:
            if self._stopping.is_set():
                return
            process = self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        assert process.stdin is not None
        data = pickle.dumps(self.task)  # read by a process that this one starts, over its pipe
        with suppress(BrokenPipeError):  # `wait_ready` reports why it ended
            process.stdin.write(len(data).to_bytes(8, "big") + data)
            process.stdin.flush()

    def wait_ready(self) -> None:
        """Wait until the process serves; raise RemoteError if it cannot."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        timer = threading.Timer(START_SECONDS, process.kill)
        timer.start()
        try:
            line = process.stdout.readline()
        finally:
            timer.cancel()
        found: dict[str, Any] = json.loads(line) if line else {"error": "it ended; see its messages above"}
        if "error" in found:
            raise RemoteError(f"server process {self.number}: {found['error']}", code="UNAVAILABLE")
        self.models = found["ready"]
        self.up = True

    def watch(self) -> None:
        self._watcher.start()

    def _watch(self) -> None:
        wait = FIRST_WAIT
        while not self._stopping.is_set():
            assert self._process is not None
            began = time.monotonic()
            status = self._process.wait()
            self.up = False
            if self._stopping.is_set():
                return
            if time.monotonic() - began > LONGEST_WAIT:
                wait = FIRST_WAIT
            logger.error("server process %d ended with status %d; it is started again", self.number, status)
            if self._stopping.wait(wait):
                return
            wait = min(2 * wait, LONGEST_WAIT)
            self.restarts += 1
            try:
                with self._asking:
                    self.begin()
                    if not self._stopping.is_set():
                        self.wait_ready()
            except (RemoteError, OSError, ValueError) as error:  # ValueError: it ended within a line
                logger.error("%s", error)

    def metrics(self) -> str | None:
        """Return the text of its metrics; None if it does not answer."""
        if not self.up or not self._asking.acquire(timeout=METRICS_SECONDS):
            return None
        try:
            process = self._process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(HANG_SECONDS, process.kill)
            timer.start()
            try:
                process.stdin.write(b"metrics\n")
                process.stdin.flush()
                line = process.stdout.readline()
            finally:
                timer.cancel()
            return str(json.loads(line)["metrics"]) if line else None
        except (OSError, ValueError):
            return None
        finally:
            self._asking.release()

    def terminate(self) -> None:
        """Ask the process to stop."""
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
            logger.error("server process %d did not stop and is killed", self.number)
            process.kill()
            process.wait()
        if self._watcher.ident is not None:
            self._watcher.join(MARGIN_SECONDS)
            if self._watcher.is_alive():
                logger.error(
                    "server process %d: its watcher has not ended %g s after it", self.number, MARGIN_SECONDS
                )
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


class GroupMetrics:
    """The metrics of all processes."""

    def __init__(self, processes: Sequence[_Child]) -> None:
        self._processes = processes

    def text(self) -> bytes:
        registry = prometheus().CollectorRegistry()
        registry.register(self)
        data: bytes = prometheus().generate_latest(registry)
        return data

    def describe(self) -> list[Any]:
        """Return no names, which are known only when the processes answer."""
        return []

    def collect(self) -> Iterator[Any]:
        core, parser = prometheus("prometheus_client.core"), prometheus("prometheus_client.parser")
        up = core.GaugeMetricFamily("megalith_process_up", "Whether a process serves.", labels=["process"])
        restarts = core.CounterMetricFamily(
            "megalith_process_restarts", "How often a process was started again.", labels=["process"]
        )
        families: dict[str, Any] = {}
        for process in self._processes:
            label = str(process.number)
            text = process.metrics()
            up.add_metric([label], float(text is not None))
            restarts.add_metric([label], float(process.restarts))
            for family in parser.text_string_to_metric_families(text or ""):
                known = families.setdefault(
                    family.name, core.Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    known.samples.append(sample._replace(labels={**sample.labels, "process": label}))
        yield from (up, restarts, *families.values())


def divide_cores(processes: int, cores: Sequence[int] | None = None) -> list[tuple[int, ...]]:
    if cores is None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    each = len(cores) // processes
    return [tuple(cores[k * each : (k + 1) * each]) for k in range(processes)]


def run_child() -> int:
    """Serve what the parent asks for."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print must not reach the parent's pipe
    source = os.fdopen(os.dup(0), "rb", buffering=0)  # no buffer: a thread reads it until the process ends
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and stops its children
    task: ChildTask = pickle.loads(
        _read_exactly(source, int.from_bytes(_read_exactly(source, 8), "big"))
    )  # of the parent
    _prepare_child(task)

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
        threading.Thread(target=_answer_parent, args=(source, reply, server, stop), daemon=True).start()
        stop.wait()
    finally:
        server.stop()
    return 0


def _read_exactly(source: IO[bytes], size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = source.read(size - len(data))
        if not more:
            sys.exit("the parent ended")
        data += more
    return data


def _prepare_child(task: ChildTask) -> None:
    import torch

    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s %(levelname)s process {task.number}: %(message)s"
    )
    logging.getLogger("kazoo").setLevel(logging.WARNING)
    if task.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, task.cores)
    if task.config.batching.threads is not None:
        torch.set_num_threads(task.config.batching.threads)


def _answer_parent(source: IO[bytes], reply: Any, server: ModelServer, stop: threading.Event) -> None:
    """Answer the parent; its end is the end of its pipe."""
    while received := source.read(4096):
        for _ in range(received.count(b"metrics\n")):  # the parent waits for each reply
            reply(metrics=server.metrics.text().decode())
    stop.set()


if __name__ == "__main__":
    sys.exit(run_child())
