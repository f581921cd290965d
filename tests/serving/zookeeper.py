"""A real ZooKeeper on loopback for tests, a cable to it that can be cut, and helpers to watch nodes."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from kazoo.client import KazooClient  # type: ignore[import-untyped]
from kazoo.handlers.threading import KazooTimeoutError  # type: ignore[import-untyped]

from megalith.serving.discovery import ZooKeeperDiscovery

D = TypeVar("D", bound=ZooKeeperDiscovery)

LIMIT = 30.0
"""Seconds after which a wait of a test has failed."""
JARS = Path("/usr/share/java")
READY_SECONDS = 30.0
LIFE_SECONDS = 900
CONFIG = """\
dataDir={data}
clientPort={port}
clientPortAddress=127.0.0.1
admin.enableServer=false
tickTime=500
minSessionTimeout=1000
"""


def free_port() -> int:
    """A port that stays free: the system and Ray give others, so no socket of another process takes it."""
    choose = random.SystemRandom()
    for _ in range(100):
        port = choose.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port between 20000 and 32000")


class ZooKeeper:
    """One server with a folder of its own. kill and start may alternate; the port stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def hosts(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it serves; the port opens before that."""
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        config = self.folder / "zoo.cfg"
        config.write_text(CONFIG.format(data=data, port=self.port))
        jars = ":".join(map(str, (self.folder, JARS / "zookeeper.jar", JARS / "slf4j-nop.jar")))
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        # Ends after a while in case the tests are killed before they can end it.
        command = f"timeout {LIFE_SECONDS} java -Xmx128m -XX:+UseSerialGC -cp {jars} {main} {config}".split()
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )
        try:
            with self.client():
                pass
        except KazooTimeoutError:
            pytest.fail(f"ZooKeeper did not come up:\n{(self.folder / 'log').read_text()[-2000:]}")

    def kill(self) -> None:
        """As if the machine had lost power."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait(10)
            self._process = None

    def empty(self) -> None:
        """Forgets everything; only while it is not running."""
        shutil.rmtree(self.folder / "data")

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Connections stay open, but nothing is answered."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        """A plain kazoo client, to look and to meddle."""
        client = KazooClient(self.hosts, connection_retry={"max_tries": -1, "delay": 0.05, "max_delay": 0.2})
        try:
            client.start(READY_SECONDS)
            yield client
        finally:
            client.stop()
            client.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)


class Cable:
    """A port that leads to another, until it is cut; what was connected then is disconnected."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._is_cut = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def hosts(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        with self._lock:
            self._is_cut = True
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def repair(self) -> None:
        with self._lock:
            self._is_cut = False

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with self._lock:
                    if self._is_cut:
                        near.close()
                        continue
                    try:
                        far = socket.create_connection(("127.0.0.1", self._to), timeout=5)
                    except OSError:
                        near.close()
                        continue
                    far.settimeout(None)
                    self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeper]:
    """A running server, shared by the tests of a file; each test works below a root of its own."""
    if shutil.which("java") is None or not (JARS / "zookeeper.jar").exists():
        pytest.fail("these tests need ZooKeeper: apt-get install -y --no-install-recommends zookeeper")
    server = ZooKeeper(tmp_path_factory.mktemp("zookeeper"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def root() -> str:
    """A root of the test's own."""
    return f"test-{uuid.uuid4().hex[:8]}"


class Changes:
    """The values a watch was called with, in order."""

    def __init__(self) -> None:
        self.values: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def __call__(self, value: Any) -> None:
        self.values.put(value)

    def until(self, wanted: Callable[[Any], bool]) -> Any:
        """Reads values until one is wanted; returns it."""
        last = None
        while True:
            try:
                last = self.values.get(timeout=LIMIT)
            except queue.Empty:
                raise AssertionError(f"not within {LIMIT} s; the last was {last}") from None
            if wanted(last):
                return last

    def until_addresses(self, *addresses: str) -> None:
        self.until(lambda replicas: [replica.address for replica in replicas] == list(addresses))


def node_changes(client: Any, path: str) -> Changes:
    """Records each state of a node, None while it does not exist."""
    changes = Changes()
    client.DataWatch(path, lambda data, stat: changes((data, stat) if stat else None))
    return changes


def within_limit(action: Callable[[], object]) -> None:
    """Runs an action that must not hang; the polls last a minute."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive()


@contextlib.contextmanager
def opening(kind: Callable[..., D], **defaults: Any) -> Iterator[Callable[..., D]]:
    """Yields a function that makes and starts a discovery; stops all of them at the end."""
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> D:
            discovery = kind(**{"session_seconds": 2.0, **defaults, **options})
            stack.callback(discovery.stop)
            discovery.start(LIMIT)
            return discovery

        yield make
