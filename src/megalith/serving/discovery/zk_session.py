"""ZooKeeperSession: a connection to ZooKeeper that mends itself, nodes it keeps there, views it keeps fresh.

A thread brings ZooKeeper and this process into line: it writes the nodes that are held here and reads the
views that are watched here, whenever a watch fires, the connection comes back, or the poll interval is over.
Each round starts from what is there, not from what an event said, so no lost event does lasting harm. What
was seen last stays valid while ZooKeeper is away. A connection that stays away is replaced by a new one.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from megalith.errors import DiscoveryError, InputError, MissingDependencyError, UsageError
from megalith.serving.discovery.contract import call_back, log

T = TypeVar("T")

CLOSE_SECONDS = 1.0
"""How long `stop` waits for a server that is connected to take leave of."""
_RETRY_SECONDS = 0.5
_READ_TRIES = 5


def kazoo(module: str) -> Any:
    """A module of kazoo; raises MissingDependencyError if it is not installed."""
    try:
        return importlib.import_module(f"kazoo.{module}")
    except ImportError as error:
        raise MissingDependencyError("ZooKeeper needs kazoo: pip install megalith[discovery]") from error


class Away(DiscoveryError):
    """ZooKeeper cannot be reached now; the thread will try again."""


class Task:
    """Something the thread has to do, again whenever it is `touched`. name: a path."""

    def __init__(self, name: str, wake: threading.Event) -> None:
        self.name = name
        self._wake = wake
        self.is_due = True
        self.settled = threading.Event()
        self.problem: str | None = None

    def touched(self, _: object = None) -> None:
        """Says that ZooKeeper may have changed. A bound method, so that kazoo sees one watch for a node."""
        self.is_due = True
        self._wake.set()


class Held(Task):
    """An ephemeral node that this session keeps in ZooKeeper."""

    def __init__(self, path: str, value: bytes, wake: threading.Event) -> None:
        super().__init__(path, wake)
        self.value = value
        self.is_taken = False
        """Whether the node has been ours once; before that, one left by another session is replaced."""
        self.written: tuple[int | None, int, bytes] | None = None
        """Session, version and value as we wrote them last."""


class View(Task, Generic[T]):
    """A value computed from nodes, and computed again whenever one of them changes."""

    def __init__(
        self,
        name: str,
        read: Callable[[NodeReader], T],
        on_change: Callable[[T], object],
        wake: threading.Event,
    ) -> None:
        super().__init__(name, wake)
        self.read = read
        self.on_change = on_change
        self.value: T | None = None


class NodeReader:
    """Reads nodes for a view, and leaves a watch on each of them."""

    def __init__(self, session: ZooKeeperSession, touched: Callable[[object], None]) -> None:
        self._session = session
        self._touched = touched
        self._missing: type[Exception] = kazoo("exceptions").NoNodeError

    def children(self, path: str) -> list[str]:
        """The names below a node, sorted; none if there is no such node."""
        return sorted(self._answer(self._ask("get_children", path), "get_children", path) or ())

    def data(self, paths: Iterable[str]) -> dict[str, bytes]:
        """The bytes of those nodes that are there, asked for all at once."""
        asked = {path: self._ask("get", path) for path in paths}
        answers = {path: self._answer(answer, "get", path) for path, answer in asked.items()}
        return {path: bytes(answer[0]) for path, answer in answers.items() if answer is not None}

    def _ask(self, call: str, path: str) -> Any:
        return self._session.send(call, path, watch=self._touched)

    def _answer(self, asked: Any, call: str, path: str) -> Any:
        for _ in range(_READ_TRIES):
            try:
                return self._session.answer(asked, path)
            except self._missing:
                # Only `exists` can watch for a node to come.
                if self._session.answer(self._ask("exists", path), path) is None:
                    return None
                asked = self._ask(call, path)
        raise Away(f"{path} comes and goes")


class ZooKeeperSession:
    """See the module. Its methods may be called from any thread.

    hosts: "host:port,host:port". session_seconds: after how much silence ZooKeeper drops our nodes.
    poll_seconds: how often everything is compared even if nothing was heard.
    request_seconds: how long one answer is waited for.
    client_options: more of KazooClient's arguments, for example for TLS (use_ssl, ca, certfile, keyfile) and
    access control (auth_data, default_acl). Raises InputError for bad hosts or times.
    """

    def __init__(
        self,
        hosts: str,
        *,
        session_seconds: float = 10.0,
        poll_seconds: float = 60.0,
        request_seconds: float = 10.0,
        client_options: Mapping[str, Any] | None = None,
    ) -> None:
        times = {"session": session_seconds, "poll": poll_seconds, "request": request_seconds}
        for name, seconds in times.items():
            if not 0 < seconds <= 3600:
                raise InputError(f"{name}_seconds must be above 0 and at most 3600, got {seconds}")
        self.hosts = hosts
        self._session_seconds = session_seconds
        self._poll_seconds = poll_seconds
        self._request_seconds = request_seconds
        self._client_options = dict(client_options or {})
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._held: dict[str, Held] = {}
        self._released: dict[str, Task] = {}
        self._views: list[View[Any]] = []
        self._sessions: set[int] = set()
        self._away_since: float | None = None
        self._client = self._new_client()
        self._thread: threading.Thread | None = None

    # ---- life

    def start(self, timeout: float = 15.0) -> None:
        """Connects; with a timeout of 0 in the background. Raises DiscoveryError after `timeout` seconds."""
        if self._stopping.is_set():
            raise UsageError(f"ZooKeeper {self.hosts}: a stopped session is not started again: make another")
        if self._thread is not None:
            return
        connected = self._client.start_async()
        self._thread = threading.Thread(target=self._run, name=f"zookeeper {self.hosts}", daemon=True)
        self._thread.start()
        if timeout and not connected.wait(timeout):
            self.stop()
            raise DiscoveryError(f"ZooKeeper {self.hosts} did not answer within {timeout:g} seconds")

    def stop(self) -> None:
        """Ends the session, and with it our nodes, if ZooKeeper can be reached; returns at once if not."""
        self._stopping.set()
        self._wake.set()
        was_connected = self.is_connected
        closer = _close(self._client)
        if was_connected:
            closer.join(CLOSE_SECONDS)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    @property
    def is_connected(self) -> bool:
        """Whether ZooKeeper answers now."""
        return bool(self._client.connected)

    @property
    def session_id(self) -> int | None:
        """The number of the session; None while there is none."""
        known = self._client.client_id
        return None if known is None else int(known[0])

    # ---- nodes of our own

    def hold(self, path: str, value: bytes) -> Task:
        """Keeps an ephemeral node with this value, through lost sessions, until `release` or `stop`.

        Of two sessions that hold one path the later has it. Returns at once; see `wait`.
        """
        with self._lock:
            held = self._held.get(path)
            if held is None:
                held = self._held[path] = Held(path, value, self._wake)
            held.value, held.is_due, held.problem = value, True, None
            held.settled.clear()
            self._released.pop(path, None)
        self._wake.set()
        return held

    def release(self, path: str) -> Task:
        """Takes a held node away again. Returns at once; see `wait`."""
        gone = Task(path, self._wake)
        with self._lock:
            if self._held.pop(path, None) is None:
                gone.settled.set()
            else:
                self._released[path] = gone
        self._wake.set()
        return gone

    def wait(self, *tasks: Task) -> None:
        """Returns when nodes are written or gone and views were computed once; at once if ZooKeeper is away.

        What is not done by then is done as soon as ZooKeeper is back. Raises DiscoveryError if it refuses to
        write a node, which is then no longer held.
        """
        # The thread cannot wait for itself.
        if self.is_connected and threading.current_thread() is not self._thread:
            deadline = time.monotonic() + self._request_seconds
            for task in tasks:
                task.settled.wait(max(0.0, deadline - time.monotonic()))
        refused = [task for task in tasks if isinstance(task, Held) and task.problem]
        if refused:
            with self._lock:
                for task in refused:
                    if self._held.get(task.name) is task:
                        del self._held[task.name]
            raise DiscoveryError(f"ZooKeeper {self.hosts}: {refused[0].problem}")

    # ---- views

    def view(self, name: str, read: Callable[[NodeReader], T], on_change: Callable[[T], object]) -> View[T]:
        """Computes `read` soon and after every change of what it read; calls back when the value is new."""
        view = View(name, read, on_change, self._wake)
        with self._lock:
            self._views.append(view)
        self._wake.set()
        return view

    def drop(self, view: View[Any]) -> None:
        """Ends a view."""
        with self._lock:
            if view in self._views:
                self._views.remove(view)

    # ---- single requests

    def put(self, path: str, value: bytes) -> None:
        """Creates a lasting node with its parents, or sets its value. Raises DiscoveryError."""
        try:
            self._ask("create", path, value, makepath=True)
        except kazoo("exceptions").NodeExistsError:
            self._ask("set", path, value)

    def remove(self, path: str) -> None:
        """Deletes a node; harmless if it is not there. Raises DiscoveryError."""
        try:
            self._ask("delete", path)
        except kazoo("exceptions").NoNodeError:
            return

    def get(self, path: str) -> bytes | None:
        """A node's bytes, None if it is not there. Raises DiscoveryError."""
        try:
            return bytes(self._ask("get", path)[0])
        except kazoo("exceptions").NoNodeError:
            return None

    def children(self, path: str) -> list[str]:
        """The names below a node, sorted, none if it is not there. Raises DiscoveryError."""
        try:
            return sorted(self._ask("get_children", path))
        except kazoo("exceptions").NoNodeError:
            return []

    def _ask(self, call: str, path: str, *args: Any, **options: Any) -> Any:
        errors = kazoo("exceptions")
        if self._thread is None or self._stopping.is_set():
            raise UsageError(f"ZooKeeper {self.hosts}: not started, or stopped")
        try:
            return self._request(call, path, *args, **options)
        except (errors.NoNodeError, errors.NodeExistsError):
            raise
        except errors.KazooException as error:
            raise DiscoveryError(f"ZooKeeper {self.hosts}: {path}: {_name(error)}") from None

    def _request(self, call: str, path: str, *args: Any, **options: Any) -> Any:
        return self.answer(self.send(call, path, *args, **options), path)

    def send(self, call: str, path: str, *args: Any, **options: Any) -> Any:
        """Begins a request: one of kazoo's calls. Raises Away without a connection."""
        client = self._client
        if not client.connected:
            # kazoo would queue it, and might write it long after the caller was told that it failed.
            raise Away(f"ZooKeeper {self.hosts} is away")
        return getattr(client, f"{call}_async")(path, *args, **options)

    def answer(self, sent: Any, path: str) -> Any:
        """The answer to a request; raises Away if none comes, else what kazoo raises."""
        errors = kazoo("exceptions")
        try:
            return sent.get(timeout=self._request_seconds)
        except (
            errors.ConnectionLoss,
            errors.ConnectionClosedError,
            errors.SessionExpiredError,
            errors.OperationTimeoutError,
            kazoo("handlers.threading").KazooTimeoutError,
        ) as error:
            raise Away(f"ZooKeeper {self.hosts}: {path}: {_name(error)}") from None

    # ---- the thread

    def _run(self) -> None:
        pause = 0.0
        next_poll = time.monotonic() + self._poll_seconds
        while True:
            self._wake.wait(pause)
            self._wake.clear()
            if self._stopping.is_set():
                return
            if time.monotonic() >= next_poll:
                self._everything_is_due()
                next_poll = time.monotonic() + self._poll_seconds
            pause = min(_RETRY_SECONDS, self._poll_seconds)
            try:
                self._mend_connection()
                self._settle()
                pause = max(0.0, next_poll - time.monotonic())
            except Away as error:
                log.debug("%s", error)
            except Exception:
                # Not foreseen; but what is held here must outlive it.
                log.exception("ZooKeeper %s: will be tried again", self.hosts)

    def _mend_connection(self) -> None:
        """Raises Away without a connection; makes a new one of a connection that has been away for long."""
        if self._client.connected:
            self._away_since = None
            return
        if self._away_since is None:
            self._away_since = time.monotonic()
        # By then the session is over on the server too. kazoo alone would try for ever with a session that an
        # emptied ZooKeeper refuses, and does not survive errors in its own thread.
        if time.monotonic() - self._away_since > 2 * self._session_seconds:
            log.warning("ZooKeeper %s has been away for long: connecting anew", self.hosts)
            _close(self._client)
            self._client = self._new_client()
            self._client.start_async()
            self._away_since = None
            if self._stopping.is_set():  # `stop` may have closed the one before
                _close(self._client)
        raise Away(f"ZooKeeper {self.hosts} is away")

    def _settle(self) -> None:
        with self._lock:
            released = list(self._released.values())
            tasks: list[Held | View[Any]] = [*self._held.values(), *self._views]
        for gone in released:
            self._delete(gone)
        failed = None
        for task in tasks:
            if not task.is_due:
                continue
            task.is_due = False
            try:
                if isinstance(task, Held):
                    self._write(task)
                else:
                    self._compute(task)
            except Away:
                task.is_due = True
                raise
            except Exception as error:
                # One bad node or function must not keep the others from being written and read.
                task.is_due = True
                failed = f"{task.name}: {_name(error)}"
                if task.problem != failed:
                    task.problem = failed
                    log.warning("ZooKeeper %s: %s", self.hosts, failed, exc_info=error)
                task.settled.set()
        if failed:
            raise Away(failed)

    def _write(self, held: Held) -> None:
        """Makes the node ours and gives it its value."""
        errors = kazoo("exceptions")
        path, value = held.name, held.value
        try:
            session, stat = self.session_id, self._request("exists", path, watch=held.touched)
            if stat is not None and stat.ephemeralOwner == session:
                if held.written != (session, stat.version, value):
                    stat = self._request("set", path, value)
                    held.written = (session, stat.version, value)
            elif stat is None or not held.is_taken or stat.ephemeralOwner in self._sessions:
                if stat is not None:
                    self._request("delete", path, version=stat.version)
                self._request("create", path, value, ephemeral=True, makepath=True)
                held.written = (session, 0, value)
            else:
                log.warning("ZooKeeper %s: %s is held by another session now", self.hosts, path)
        except (errors.NodeExistsError, errors.NoNodeError, errors.BadVersionError):
            held.touched()  # somebody else was at it in between; look again
            return
        held.is_taken, held.problem = True, None
        held.settled.set()

    def _delete(self, gone: Task) -> None:
        try:
            stat = self._request("exists", gone.name)
            if stat is not None and stat.ephemeralOwner in self._sessions:
                self._request("delete", gone.name)
        except kazoo("exceptions").NoNodeError:
            pass
        with self._lock:
            if self._released.get(gone.name) is gone:
                del self._released[gone.name]
        gone.settled.set()

    def _compute(self, view: View[Any]) -> None:
        value = view.read(NodeReader(self, view.touched))
        view.problem = None
        if not view.settled.is_set() or value != view.value:
            view.value = value
            call_back(view.on_change, value, view.name)
        view.settled.set()

    def _everything_is_due(self) -> None:
        with self._lock:
            for task in (*self._held.values(), *self._views):
                task.is_due = True

    def _new_client(self) -> Any:
        options = {
            "timeout": self._session_seconds,
            "connection_retry": {"max_tries": -1, "delay": 0.1, "max_delay": 2.0},
            **self._client_options,
        }
        try:
            client = kazoo("client").KazooClient(self.hosts, **options)
        except (ValueError, TypeError, kazoo("exceptions").ConfigurationError) as error:
            raise InputError(f"ZooKeeper {self.hosts!r}: {error}") from None

        def on_state(_: object) -> None:
            known = client.client_id
            if known is not None and client is self._client:
                self._sessions.add(known[0])
                self._everything_is_due()
            self._wake.set()

        client.add_listener(on_state)
        return client


def _close(client: Any) -> threading.Thread:
    """Closes a client in the background: kazoo waits for its own threads, perhaps for seconds."""

    def close() -> None:
        try:
            client.stop()
            client.close()
        except Exception as error:
            log.debug("closing a connection to ZooKeeper: %s", error)

    thread = threading.Thread(target=close, name="close zookeeper", daemon=True)
    thread.start()
    return thread


def _name(error: BaseException) -> str:
    """kazoo's exceptions often have no text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
