"""ServerLink: the connection of one worker to one server. It numbers writes and keeps them until they are
answered."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from megalith.errors import RankTimeoutError, ServerLostError
from megalith.shards.servers.ray_servers import ray_module
from megalith.shards.servers.server_messages import Array, Failure, Joined, ServerWrite

GRACE = 30.0
"""Seconds that an answer may take beyond the time for which a server waits for other workers."""


class PendingCall:
    """A call in progress.

    Args:
        send: Makes the call and returns Ray's reference to its result.
        what: The call, for messages.
        number: The number of a write; 0: a read.

    Attributes:
        reference: Ray's reference.
    """

    def __init__(self, send: Callable[[], Any], what: str, number: int = 0) -> None:
        self._send = send
        self.what = what
        self.number = number
        self.reference = send()

    def send_again(self) -> None:
        """Make the call again, after the connection was lost."""
        self.reference = self._send()


class ServerLink:
    """See the module.

    Args:
        actor: The server.
        index: Its number.
        name: The name of the tables.
        worker: The number of this worker.
        timeout: Seconds that an answer may take.
    """

    def __init__(self, actor: Any, index: int, name: str, worker: int, timeout: float) -> None:
        self._actor = actor
        self._index = index
        self._name = name
        self._worker = worker
        self._timeout = timeout + GRACE
        self._session = uuid.uuid4().hex
        self._number = 0
        self._pending: deque[PendingCall] = deque()

    def join(self) -> Joined:
        """Join the workers of the tables.

        Returns:
            What the server knows of this worker; the numbers of its writes continue there.
        """
        joined: Joined = self.result(
            PendingCall(
                lambda: self._actor.join.remote(self._name, self._worker, self._session, None), "join"
            )
        )
        self._number = joined.accepted
        return joined

    def call(self, method: str, *args: Any, **kwargs: Any) -> PendingCall:
        """Call a method of the server that is not numbered.

        Args:
            method: Its name.
            args: Its arguments after the name of the tables.
            kwargs: Further arguments.

        Returns:
            The call in progress.
        """
        remote = getattr(self._actor, method)
        return PendingCall(lambda: remote.remote(self._name, *args, **kwargs), method)

    def read(self, ids: Array, counts: Sequence[int], step: int | None) -> PendingCall:
        """Read rows; see `TableSpace.read`.

        Args:
            ids: int64, the ids of all tables concatenated.
            counts: The number of ids of each table.
            step: See `Lookup.step`.

        Returns:
            The call in progress.
        """
        return self.call("read", self._worker, self._session, self._number, ids, counts, step)

    def write(self, write: ServerWrite) -> PendingCall:
        """Send a write.

        Args:
            write: The write.

        Returns:
            The call in progress.
        """
        self._number += 1
        number, remote = self._number, self._actor.write
        pending = PendingCall(
            lambda: remote.remote(self._name, self._worker, self._session, number, write), write.kind, number
        )
        self._pending.append(pending)
        return pending

    def is_done(self, pending: PendingCall) -> bool:
        """Return whether a call has ended, without waiting.

        Args:
            pending: The call.

        Returns:
            Whether `result` returns at once.
        """
        done, _ = ray_module().wait([pending.reference], timeout=0)
        return bool(done)

    def result(self, pending: PendingCall) -> Any:
        """Wait for the result of a call.

        Args:
            pending: The call.

        Returns:
            What the server returned.

        Raises:
            MegalithError: The error of the call.
            RankTimeoutError: There was no answer in time.
            ServerLostError: The server has ended.
        """
        ray = ray_module()
        try:
            result = ray.get(pending.reference, timeout=self._timeout)
        except ray.exceptions.GetTimeoutError:
            raise RankTimeoutError(
                f"server {self._index} did not answer {pending.what} of worker {self._worker} within "
                f"{self._timeout:g} s"
            ) from None
        except ray.exceptions.RayActorError as error:
            raise ServerLostError(
                f"server {self._index} has ended during {pending.what} of worker {self._worker} and "
                f"its rows are lost: load the last checkpoint into new servers ({_first_line(error)})"
            ) from None
        while self._pending and self._pending[0].number <= pending.number:
            self._pending.popleft()
        if isinstance(result, Failure):
            raise result.error
        return result


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
