"""ZooKeeperSession: reconnects to ZooKeeper and maintains ephemeral nodes and views.

A thread synchronises ZooKeeper with this process: it writes the held nodes and computes the views whenever a
watch fires, the connection returns, or the poll interval ends. Each round starts from the current state of
ZooKeeper and not from the content of an event, so a lost event is corrected in the next round. Values seen
last stay valid while ZooKeeper is unavailable. A connection that stays lost is replaced by a new one.

A `SessionTask` holds the state of one node or view between two rounds. It runs when it is due: first, after
an event, and at each poll.

States of a held node, as found in each round:

    node in ZooKeeper                   | action of the thread
    ------------------------------------+------------------------------------------------------------
    absent                              | create it (ephemeral, with parents)
    owned by the current session        | set its value if the value or the version differs
    owned by an earlier session of ours | delete it, create it
    owned by another process            | first round: delete it, create it; later: log and leave it
    released by `release`               | delete it if one of our sessions owns it

Invariants: after `stop` no node of ours is written; of two processes that hold one path, the one that came
later has it; a task that fails does not keep the others from running.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from megalith.errors import DiscoveryError, InputError, UsageError
from megalith.library import import_extra
from megalith.serving.discovery.contract import call_back

T = TypeVar("T")

_READ_TRIES = 5


def kazoo(module: str) -> Any:
    return import_extra(f"kazoo.{module}", "ZooKeeper needs kazoo", "discovery")


class ZooKeeperUnavailable(DiscoveryError):
    """ZooKeeper cannot be reached now; the thread retries."""


class SessionTask:
    """Work for the thread, repeated whenever it is marked due."""

    def __init__(self, name: str, wake: threading.Event) -> None:
        self.name = name
        self._wake = wake
        self.is_due = True
        self.done = threading.Event()
        self.problem: str | None = None

    def mark_due(self, event: object = None) -> None:
        """Run the task again. A bound method, so that kazoo keeps one watch per node."""
        self.is_due = True
        self._wake.set()


class HeldNode(SessionTask):
    """An ephemeral node that this session keeps in ZooKeeper."""

    def __init__(self, path: str, value: bytes, wake: threading.Event) -> None:
        super().__init__(path, wake)
        self.value = value
        self.was_owned = False
        """Whether we have owned the node; until then, the node of another session is replaced."""
        self.written: tuple[int | None, int, bytes] | None = None
        """Session, version and value of our last write."""


class NodeView(SessionTask, Generic[T]):
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
    """Reads nodes for a view and sets a watch on each of them."""

    def __init__(self, session: ZooKeeperSession, mark_due: Callable[[object], None]) -> None:
        self._session = session
        self._mark_due = mark_due
        self._missing: type[Exception] = kazoo("exceptions").NoNodeError

    def children(self, path: str) -> list[str]:
        return sorted(self._answer(self._ask("get_children", path), "get_children", path) or ())

    def data(self, paths: Iterable[str]) -> dict[str, bytes]:
        """Read nodes. The requests are sent together."""
        asked = {path: self._ask("get", path) for path in paths}
        answers = {path: self._answer(answer, "get", path) for path, answer in asked.items()}
        return {path: bytes(answer[0]) for path, answer in answers.items() if answer is not None}

    def _ask(self, call: str, path: str) -> Any:
        return self._session.send(call, path, watch=self._mark_due)

    def _answer(self, asked: Any, call: str, path: str) -> Any:
        for _ in range(_READ_TRIES):
            try:
                return self._session.result(asked, path)
            except self._missing:
                # Only `exists` can watch for the creation of a node.
                if self._session.result(self._ask("exists", path), path) is None:
                    return None
                asked = self._ask(call, path)
        raise ZooKeeperUnavailable(f"{path} is created and deleted repeatedly")


logger = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0
"""How long `stop` waits for a connected server to close the session."""
_RETRY_SECONDS = 0.5


class ZooKeeperSession:
    """A connection to ZooKeeper; see the module. Safe to share between threads."""

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
        self._held: dict[str, HeldNode] = {}
        self._released: dict[str, SessionTask] = {}
        self._views: list[NodeView[Any]] = []
        self._sessions: set[int] = set()
        self._unavailable_since: float | None = None
        self._client = self._new_client()
        self._thread: threading.Thread | None = None

    # ---- start and stop

    def start(self, timeout: float = 15.0) -> None:
        if self._stopping.is_set():
            raise UsageError(f"ZooKeeper {self.hosts}: a stopped session cannot restart: create a new one")
        if self._thread is not None:
            return
        connected = self._client.start_async()
        self._thread = threading.Thread(target=self._run, name=f"zookeeper {self.hosts}", daemon=True)
        self._thread.start()
        if timeout and not connected.wait(timeout):
            self.stop()
            raise DiscoveryError(f"ZooKeeper {self.hosts} did not answer within {timeout:g} seconds")

    def stop(self) -> None:
        """End the session, which deletes our nodes, if ZooKeeper is connected; does not block otherwise."""
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
        return bool(self._client.connected)

    @property
    def session_id(self) -> int | None:
        """The number of the session; None if there is none."""
        known = self._client.client_id
        return None if known is None else int(known[0])

    # ---- nodes of our own

    def hold(self, path: str, value: bytes) -> SessionTask:
        """Keep an ephemeral node, also in later sessions, until `release` or `stop`; does not block."""
        with self._lock:
            held = self._held.get(path)
            if held is None:
                held = self._held[path] = HeldNode(path, value, self._wake)
            held.value, held.is_due, held.problem = value, True, None
            held.done.clear()
            self._released.pop(path, None)
        self._wake.set()
        return held

    def release(self, path: str) -> SessionTask:
        """Delete a held node; does not block."""
        released = SessionTask(path, self._wake)
        with self._lock:
            if self._held.pop(path, None) is None:
                released.done.set()
            else:
                self._released[path] = released
        self._wake.set()
        return released

    def wait(self, *tasks: SessionTask) -> None:
        """Wait until nodes are written or deleted and views computed; does not wait without a connection."""
        # Unfinished tasks run when ZooKeeper is available again.
        # The thread cannot wait for itself.
        if self.is_connected and threading.current_thread() is not self._thread:
            deadline = time.monotonic() + self._request_seconds
            for task in tasks:
                task.done.wait(max(0.0, deadline - time.monotonic()))
        refused = [task for task in tasks if isinstance(task, HeldNode) and task.problem]
        if refused:
            with self._lock:
                for task in refused:
                    if self._held.get(task.name) is task:
                        del self._held[task.name]
            raise DiscoveryError(f"ZooKeeper {self.hosts}: {refused[0].problem}")

    # ---- views

    def view(
        self, name: str, read: Callable[[NodeReader], T], on_change: Callable[[T], object]
    ) -> NodeView[T]:
        """Compute a value now and after every change of a node that it was computed from."""
        view = NodeView(name, read, on_change, self._wake)
        with self._lock:
            self._views.append(view)
        self._wake.set()
        return view

    def drop(self, view: NodeView[Any]) -> None:
        with self._lock:
            if view in self._views:
                self._views.remove(view)

    # ---- single requests

    def put(self, path: str, value: bytes) -> None:
        """Create a persistent node with its parents, or set its value."""
        try:
            self._ask("create", path, value, makepath=True)
        except kazoo("exceptions").NodeExistsError:
            self._ask("set", path, value)

    def remove(self, path: str) -> None:
        try:
            self._ask("delete", path)
        except kazoo("exceptions").NoNodeError:
            return

    def get(self, path: str) -> bytes | None:
        try:
            return bytes(self._ask("get", path)[0])
        except kazoo("exceptions").NoNodeError:
            return None

    def _ask(self, call: str, path: str, *args: Any, **options: Any) -> Any:
        errors = kazoo("exceptions")
        if self._thread is None or self._stopping.is_set():
            raise UsageError(f"ZooKeeper {self.hosts}: not started, or stopped")
        try:
            return self._request(call, path, *args, **options)
        except (errors.NoNodeError, errors.NodeExistsError):
            raise
        except errors.KazooException as error:
            raise DiscoveryError(f"ZooKeeper {self.hosts}: {path}: {_describe(error)}") from None

    def _request(self, call: str, path: str, *args: Any, **options: Any) -> Any:
        return self.result(self.send(call, path, *args, **options), path)

    def send(self, call: str, path: str, *args: Any, **options: Any) -> Any:
        client = self._client
        if not client.connected:
            # kazoo would queue the request, and might execute it long after the caller got an error.
            raise ZooKeeperUnavailable(f"ZooKeeper {self.hosts} is unavailable")
        return getattr(client, f"{call}_async")(path, *args, **options)

    def result(self, sent: Any, path: str) -> Any:
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
            raise ZooKeeperUnavailable(f"ZooKeeper {self.hosts}: {path}: {_describe(error)}") from None

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
                self._mark_all_due()
                next_poll = time.monotonic() + self._poll_seconds
            pause = min(_RETRY_SECONDS, self._poll_seconds)
            try:
                self._check_connection()
                self._run_due_tasks()
                pause = max(0.0, next_poll - time.monotonic())
            except ZooKeeperUnavailable as error:
                logger.debug("%s", error)
            except Exception:
                # Unexpected; but held nodes must survive it.
                logger.exception("ZooKeeper %s: unexpected error, retrying", self.hosts)

    def _check_connection(self) -> None:
        """Raise ZooKeeperUnavailable without a connection; replaces one that has been lost for long."""
        if self._client.connected:
            self._unavailable_since = None
            return
        if self._unavailable_since is None:
            self._unavailable_since = time.monotonic()
        # By then the session has expired on the server too. kazoo alone would retry forever with a session
        # that a ZooKeeper without data refuses, and does not survive errors in its own thread.
        if time.monotonic() - self._unavailable_since > 2 * self._session_seconds:
            logger.warning("ZooKeeper %s has been unavailable for long: opening a new connection", self.hosts)
            _close(self._client)
            self._client = self._new_client()
            self._client.start_async()
            self._unavailable_since = None
            if self._stopping.is_set():  # `stop` may have closed the previous client
                _close(self._client)
        raise ZooKeeperUnavailable(f"ZooKeeper {self.hosts} is unavailable")

    def _run_due_tasks(self) -> None:
        with self._lock:
            released = list(self._released.values())
            tasks: list[HeldNode | NodeView[Any]] = [*self._held.values(), *self._views]
        for gone in released:
            self._delete(gone)
        failed = None
        for task in tasks:
            if not task.is_due:
                continue
            task.is_due = False
            try:
                if isinstance(task, HeldNode):
                    self._write(task)
                else:
                    self._compute(task)
            except ZooKeeperUnavailable:
                task.is_due = True
                raise
            except Exception as error:
                # A bad node or function must not keep the others from being written and read.
                task.is_due = True
                failed = f"{task.name}: {_describe(error)}"
                if task.problem != failed:
                    task.problem = failed
                    logger.warning("ZooKeeper %s: %s", self.hosts, failed, exc_info=error)
                task.done.set()
        if failed:
            raise ZooKeeperUnavailable(failed)

    def _write(self, held: HeldNode) -> None:
        """Take ownership of a node and set its value."""
        errors = kazoo("exceptions")
        path, value = held.name, held.value
        try:
            session, stat = self.session_id, self._request("exists", path, watch=held.mark_due)
            if stat is not None and stat.ephemeralOwner == session:
                if held.written != (session, stat.version, value):
                    stat = self._request("set", path, value)
                    held.written = (session, stat.version, value)
            elif stat is None or not held.was_owned or stat.ephemeralOwner in self._sessions:
                if stat is not None:
                    self._request("delete", path, version=stat.version)
                self._request("create", path, value, ephemeral=True, makepath=True)
                held.written = (session, 0, value)
            else:
                logger.warning("ZooKeeper %s: another session holds %s now", self.hosts, path)
        except (errors.NodeExistsError, errors.NoNodeError, errors.BadVersionError):
            held.mark_due()  # another session changed it in the meantime; check again
            return
        held.was_owned, held.problem = True, None
        held.done.set()

    def _delete(self, released: SessionTask) -> None:
        try:
            stat = self._request("exists", released.name)
            if stat is not None and stat.ephemeralOwner in self._sessions:
                self._request("delete", released.name)
        except kazoo("exceptions").NoNodeError:
            pass
        with self._lock:
            if self._released.get(released.name) is released:
                del self._released[released.name]
        released.done.set()

    def _compute(self, view: NodeView[Any]) -> None:
        value = view.read(NodeReader(self, view.mark_due))
        view.problem = None
        if not view.done.is_set() or value != view.value:
            view.value = value
            call_back(view.on_change, value, view.name)
        view.done.set()

    def _mark_all_due(self) -> None:
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
                self._mark_all_due()
            self._wake.set()

        client.add_listener(on_state)
        return client


def _close(client: Any) -> threading.Thread:
    """Close a client in the background: kazoo may wait seconds for its own threads."""

    def close() -> None:
        try:
            client.stop()
            client.close()
        except Exception as error:
            logger.debug("error while closing a connection to ZooKeeper: %s", error)

    thread = threading.Thread(target=close, name="close zookeeper", daemon=True)
    thread.start()
    return thread


def _describe(error: BaseException) -> str:
    """Name an exception; those of kazoo often have no text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
