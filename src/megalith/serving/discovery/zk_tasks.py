"""Tasks of a ZooKeeperSession: nodes to keep, values to compute from nodes, and the reader of those nodes.

The thread of the session (`zk_session.py`) runs a task whenever it is due: first, after an event, and at each
poll. A task holds the state between two runs.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from megalith.errors import DiscoveryError, MissingDependencyError

if TYPE_CHECKING:
    from megalith.serving.discovery.zk_session import ZooKeeperSession

T = TypeVar("T")

_READ_TRIES = 5


def kazoo(module: str) -> Any:
    """Import a module of kazoo."""
    try:
        return importlib.import_module(f"kazoo.{module}")
    except ImportError as error:
        raise MissingDependencyError.of_extra("ZooKeeper needs kazoo", "discovery") from error


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
