"""The connections of one worker to its servers: calls, retries, reconnects, membership.

    class          what it is
    PendingCall    a call in progress, which can be made again; PendingRead also has the memory for the rows
    ServerLink     the connection to one server
    LinkGroup      the connections to all servers, and the membership of the worker
    PushWindow     the updates in progress, and their errors

Lookups and pushes go over a socket (`ServerChannel`), all other calls through Ray. A ServerLink numbers
writes and keeps them until they are answered. If the connection is lost, it opens a new one and sends again
what was not answered. If the server exits and is started again, it opens the tables there and joins under
the same number before that:

    unanswered    on the new server
    read          sent again, for rows in other memory; also if the server was only out of reach for a while
    write         sent again; a write that the server has in its log is not applied twice
    function      raises ServerLostError: what it kept on the server is lost
"""

from __future__ import annotations

import logging
import threading
import time as clock
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from megalith.errors import RankTimeoutError, ServerLostError, ServerRestartedError, UsageError
from megalith.ps.channel_client import ChannelLostError, ChannelReply, ServerChannel, open_channel
from megalith.ps.channel_messages import ChannelAddress
from megalith.ps.launch import ray_module
from megalith.ps.messages import Array, Failure, Joined, ServerWrite, SpaceSpec, array_of
from megalith.ps.recovery import Recovery
from megalith.ps.shared_memory import SegmentPool
from megalith.shards.preparer import RoutedIds


class PendingCall:
    def __init__(
        self,
        send: Callable[[], Any],
        what: str,
        number: int = 0,
        *,
        repeatable: bool = True,
        limited: bool = True,
    ) -> None:
        self._send = send
        self.what = what
        self.number = number
        self.repeatable = repeatable
        self.limited = limited
        self.generation = 0
        self.reference = send()

    def send_again(self, generation: int) -> None:
        self.generation = generation
        self.reference = self._send()


class PendingRead(PendingCall):
    def __init__(self, send: Callable[[Tensor], Any], out: Tensor, pool: SegmentPool) -> None:
        self.out = out
        self.moved = False
        self._pool = pool
        self._send_to = send
        super().__init__(partial(send, out), "read")

    def send_again(self, generation: int) -> None:
        self.out, self.moved = self._pool.new(self.out.numel()), True
        self._send = partial(self._send_to, self.out)
        super().send_again(generation)


_Call = TypeVar("_Call", bound=PendingCall)
logger = logging.getLogger(__name__)

GRACE = 30.0  # Seconds that an answer may take beyond the time for which a server waits for other workers
_PAUSE = 0.1


class ServerLink:
    def __init__(
        self,
        actor: Any,
        index: int,
        name: str,
        worker: int,
        spec: SpaceSpec,
        pool: SegmentPool,
        *,
        observer: bool = False,
    ) -> None:
        self._actor = actor
        self._pool = pool
        self._channel: ServerChannel | None = None
        self._observer = observer
        self._index = index
        self._name = name
        self._worker = worker
        self._spec = spec
        self._timeout = spec.timeout + GRACE
        self._session = self._token = uuid.uuid4().hex
        self._number = 0
        self._pending: deque[PendingCall] = deque()
        self._lock = threading.RLock()  # a save runs in another thread
        self.lost = 0
        self.restarts = 0

    def open(self) -> PendingCall:
        return self._call("open", self._spec)

    @property
    def written(self) -> int:
        return self._number

    def join(self, written: int | None = None) -> Joined:
        first = None if written is None else written + 1
        joined: Joined = self.result(self._call("join", self._worker, self._session, first, self._observer))
        self._number = joined.accepted if written is None else written
        if self._number > joined.accepted:
            self._count_lost(self._number - joined.accepted)
        self._token = f"{self._session}@{joined.incarnation}"
        with self._lock:
            if self._channel is None or self._channel.lost:
                self._open_channel(clock.monotonic() + self._timeout)
        return joined

    def end_move(self, recovery: Recovery | None) -> None:
        """Use another recovery from now on: the tables have moved, and the server holds them."""
        self._spec = replace(self._spec, recovery=recovery)

    def leave(self) -> PendingCall:
        """Remove this worker from those of the tables, after its writes."""
        remote, number = self._actor.leave, self._number
        return self._started(
            PendingCall(lambda: remote.remote(self._name, self._worker, self._token, number), "leave")
        )

    def remove(self, worker: int) -> PendingCall:
        return self._call("remove", worker)

    def close(self, *, moved: bool) -> PendingCall:
        return self._call("close", moved=moved)

    def describe(self) -> PendingCall:
        return self._call("describe")

    def run(
        self, function: Callable[..., Any], *args: Any, background: bool, repeatable: bool = False
    ) -> PendingCall:
        remote, name, number = self._actor.run, self._name, self._number

        def send() -> Any:
            return remote.remote(
                name, self._worker, self._token, number, function, *args, background=background
            )

        # A save or load in the background takes its time, as long as the server answers other calls.
        return self._started(
            PendingCall(send, function.__name__, repeatable=repeatable, limited=not background)
        )

    def _call(self, method: str, *args: Any, **options: Any) -> PendingCall:
        remote = getattr(self._actor, method)
        return self._started(PendingCall(lambda: remote.remote(self._name, *args, **options), method))

    def _started(self, pending: _Call) -> _Call:
        pending.generation = self.restarts
        return pending

    def read(self, ids: Array, counts: Sequence[int], step: int | None, out: Tensor) -> PendingRead:
        text = {"after": self._number, "counts": list(counts), "step": step}
        return self._started(
            PendingRead(lambda place: self._open.read(self._signed(text), ids, place), out, self._pool)
        )

    def write(self, write: ServerWrite) -> PendingCall:
        with self._lock:
            number = self._number + 1
            pending = PendingCall(lambda: self._send_write(number, write), write.kind, number)
            self._number = number  # only now: the server waits for each number
            self._pending.append(self._started(pending))
        return pending

    def _send_write(self, number: int, write: ServerWrite) -> Any:
        if write.kind == "push":
            return self._open.push(self._signed({"number": number, "header": write.header}), write.arrays)
        return self._actor.write.remote(self._name, self._worker, self._token, number, write)

    def _signed(self, text: dict[str, Any]) -> dict[str, Any]:
        return {"name": self._name, "worker": self._worker, "session": self._token, **text}

    @property
    def _open(self) -> ServerChannel:
        if self._channel is None:
            raise UsageError(f"worker {self._worker} has not joined server {self._index}: call join")
        return self._channel

    def is_done(self, pending: PendingCall) -> bool:
        if isinstance(pending.reference, ChannelReply):
            return pending.reference.channel.poll(pending.reference)
        done, _ = ray_module().wait([pending.reference], timeout=0)
        return bool(done)

    def result(self, pending: PendingCall) -> Any:
        """Wait for the result of a call; if the server is started again, for the result there."""
        ray = ray_module()
        deadline = clock.monotonic() + self._timeout
        while True:
            try:
                left = max(0.0, deadline - clock.monotonic()) if pending.limited else self._timeout
                result = self._wait(pending.reference, left)
                if not isinstance(result, Failure) or not isinstance(result.error, ServerRestartedError):
                    break
                self._reconnect(pending, deadline, result.error)
            except ray.exceptions.GetTimeoutError:
                if not pending.limited and self._is_alive():
                    continue
                raise RankTimeoutError(
                    f"server {self._index} did not answer {pending.what} of worker {self._worker} within "
                    f"{self._timeout:g} s: its process may hang or be stopped. Ray's logs of that process "
                    "(session_latest/logs) show more; set the timeout higher if it needs more time"
                ) from None
            except ChannelLostError:
                self._connect_again(pending, deadline)
            except ray.exceptions.ActorUnavailableError as error:
                self._repeat(pending, deadline, error)
            except ray.exceptions.RayActorError as error:
                self._reconnect(pending, deadline, error)
        with self._lock:
            while self._pending and self._pending[0].number <= pending.number:
                self._pending.popleft()
        if isinstance(result, Failure):
            raise result.error
        return result

    def _is_alive(self) -> bool:
        """Return whether the server answers, or has ended, which the call in progress then reports."""
        ray = ray_module()
        try:
            ray.get(self._actor.describe_all.remote(), timeout=self._timeout)
        except ray.exceptions.GetTimeoutError:
            return False
        except ray.exceptions.RayActorError:
            pass
        return True

    def _wait(self, reference: Any, timeout: float) -> Any:
        ray = ray_module()
        if not isinstance(reference, ChannelReply):
            return ray.get(reference, timeout=timeout)
        if not reference.channel.wait(reference, timeout):
            raise ray.exceptions.GetTimeoutError
        if reference.lost:
            raise ChannelLostError
        return reference.result

    def _connect_again(self, pending: PendingCall, deadline: float) -> None:
        """Open a new channel and send what the old one has not answered."""
        if clock.monotonic() > deadline:
            raise RankTimeoutError(
                f"server {self._index} closes the connection at {pending.what} of worker {self._worker}: its "
                "log has the reason"
            )
        with self._lock:
            if self._channel is None or self._channel.lost:
                try:
                    self._open_channel(deadline)
                except ray_module().exceptions.RayActorError as error:
                    return self._reconnect(pending, deadline, error)
            for call in (*self._pending, pending):
                if isinstance(call.reference, ChannelReply) and call.reference.lost:
                    call.send_again(self.restarts)

    def _open_channel(self, deadline: float) -> None:
        """Connect to the server, which runs as far as Ray knows; raise RayActorError if it has ended."""
        self.disconnect()  # what it has not answered is lost
        ray = ray_module()
        node = ray.get_runtime_context().get_node_id()

        def ask(node: str) -> ChannelAddress:
            address: ChannelAddress = self._answer(self._actor.channel.remote(node), deadline)
            return address

        while True:
            try:
                self._channel = open_channel(ask, node, self._pool, self._timeout)
                return
            except (
                ChannelLostError,
                ray.exceptions.ActorUnavailableError,
                ray.exceptions.GetTimeoutError,
            ) as error:
                if clock.monotonic() > deadline:
                    raise RankTimeoutError(
                        f"server {self._index} cannot be reached by worker {self._worker}; its rows are not "
                        f"lost: make the call again ({_first_line(error)})"
                    ) from None
                clock.sleep(_PAUSE)

    def disconnect(self) -> None:
        """Close the socket; `join` opens another one."""
        if self._channel is not None:
            self._channel.close()

    def _repeat(self, pending: PendingCall, deadline: float, error: Exception) -> None:
        """Make a call again after the connection was interrupted: the server has not ended."""
        # Ray reports a server that is being started again in the same way. What it kept is lost then, so a
        # call that depends on it is not made again.
        if not pending.repeatable and self._spec.recovery is not None:
            self._reconnect(pending, deadline, error)
        late = clock.monotonic() > deadline and pending.limited
        if late or not pending.repeatable:
            raise RankTimeoutError(
                f"server {self._index} cannot be reached during {pending.what} of worker {self._worker}; its "
                f"rows are not lost: make the call again ({_first_line(error)})"
            ) from None
        clock.sleep(_PAUSE)
        with self._lock:
            pending.send_again(self.restarts)

    def _reconnect(self, pending: PendingCall, deadline: float, error: Exception) -> None:
        """Wait until the server runs again, and send what was not answered."""
        if self._spec.recovery is None:
            raise ServerLostError(
                f"server {self._index} has ended before it answered {pending.what} of worker {self._worker}, "
                f"and its rows are lost: load the last checkpoint into new servers ({_first_line(error)})"
            ) from None
        if not pending.limited:
            deadline = clock.monotonic() + self._timeout
        with self._lock:
            if pending.generation == self.restarts:
                self._join_again(deadline)
            if not pending.repeatable:
                raise ServerLostError(
                    f"server {self._index} has ended during {pending.what} and was started again, or was out "
                    "of reach: make the call again"
                ) from None
            if pending.generation != self.restarts:
                pending.send_again(self.restarts)

    def _answer(self, reference: Any, deadline: float) -> Any:
        answer = ray_module().get(reference, timeout=max(0.1, deadline - clock.monotonic()))
        if isinstance(answer, Failure):
            raise answer.error
        return answer

    def _join_again(self, deadline: float) -> None:
        unanswered = self._pending[0].number if self._pending else self._number + 1
        ray = ray_module()
        while True:
            try:
                self._answer(self._actor.open.remote(self._name, self._spec), deadline)
                found = self._answer(
                    self._actor.join.remote(
                        self._name, self._worker, self._session, unanswered, self._observer
                    ),
                    deadline,
                )
                self._open_channel(deadline)
                break
            except (
                ray.exceptions.RayActorError,
                ray.exceptions.GetTimeoutError,
                ServerLostError,
                RankTimeoutError,
            ) as error:
                if clock.monotonic() > deadline:
                    raise ServerLostError(
                        f"server {self._index} has ended and does not run again after {self._timeout:g} s: "
                        f"{_first_line(error)}"
                    ) from None
                clock.sleep(_PAUSE)
        assert isinstance(found, Joined)
        self.restarts += 1
        self._token = f"{self._session}@{found.incarnation}"
        if found.accepted < unanswered - 1:
            self._count_lost(unanswered - 1 - found.accepted)
        for call in self._pending:
            call.send_again(self.restarts)

    def _count_lost(self, writes: int) -> None:
        self.lost += writes
        logger.warning("server %d has lost %d writes of this worker", self._index, writes)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


Calls = Sequence[tuple[ServerLink, PendingCall]]


class LinkGroup:
    def __init__(self, links: Sequence[ServerLink], pool: SegmentPool) -> None:
        self._links = list(links)
        self.pool = pool

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[ServerLink]:
        return iter(self._links)

    def __getitem__(self, server: int) -> ServerLink:
        return self._links[server]

    # ---- membership

    def join(self, written: Sequence[int] | None = None) -> int:
        """Open the tables and join their workers. If a server refuses, leave those that were joined."""
        steps: list[int] = []
        try:
            self.everywhere(ServerLink.open)
            for server, link in enumerate(self._links):
                steps.append(link.join(None if written is None else written[server]).step)
        except BaseException:
            # The server whose answer is missing leaves too, but nobody waits for it.
            with suppress(Exception):
                calls = [(link, link.leave()) for link in self._links[: len(steps) + 1]]
                self.results(calls[: len(steps)])
            raise
        return max(steps)

    def leave(self) -> None:
        self.everywhere(ServerLink.leave)

    def remove(self, worker: int) -> None:
        self.everywhere(lambda link: link.remove(worker))

    def close(self, *, moved: bool = False) -> None:
        self.everywhere(lambda link: link.close(moved=moved))

    def disconnect(self) -> None:
        """Close the sockets; `join` opens others."""
        for link in self._links:
            link.disconnect()

    # ---- calls

    def everywhere(self, call: Callable[[ServerLink], PendingCall]) -> list[Any]:
        return self.results([(link, call(link)) for link in self._links])

    def ask(self, function: Callable[..., Any]) -> list[Any]:
        """Run a function that only reads on every server; on one that was started again, once more."""
        return self.everywhere(lambda link: link.run(function, background=False, repeatable=True))

    def write_everywhere(self, kind: str, header: dict[str, Any]) -> list[Any]:
        write = ServerWrite(kind, header)
        return self.everywhere(lambda link: link.write(write))

    def write_ids(
        self,
        kind: str,
        header: dict[str, Any],
        routed: RoutedIds,
        arrays: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> list[Any]:
        counts = routed.deduped.counts
        pieces = routed.deduped.ids.split_with_sizes(counts.sum(1).tolist())
        calls: list[tuple[ServerLink, PendingCall]] = []
        for server, ids in enumerate(pieces):
            if ids.numel():
                own = {name: array_of(parts[server]) for name, parts in (arrays or {}).items()}
                header = header | {"counts": counts[server].tolist()}
                write = ServerWrite(kind, header, {"ids": array_of(ids), **own})
                calls.append((self._links[server], self._links[server].write(write)))
        results = iter(self.results(calls))
        return [next(results) if ids.numel() else None for ids in pieces]

    def results(self, calls: Calls) -> list[Any]:
        """Wait for all calls, then raise the first error."""
        results: list[Any] = []
        errors: list[Exception] = []
        for link, call in calls:
            try:
                results.append(link.result(call))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return results


def run_all(*calls: Callable[[], object]) -> None:
    """Make all calls, then raise the first error."""
    errors: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


class PushWindow:
    """An error is raised once, by the first call that finds the update finished."""

    def __init__(self, links: LinkGroup, size: int, *, sync: bool) -> None:
        self._links = links
        self._size = size
        self._sync = sync
        self._pushed: deque[list[tuple[ServerLink, PendingCall]]] = deque()

    def send(self, writes: Sequence[ServerWrite | None]) -> None:
        """Send an update, then wait for the oldest if there are too many."""
        # If the write of a server cannot be sent, those before it are in progress all the same.
        sent: list[tuple[ServerLink, PendingCall]] = []
        self._pushed.append(sent)
        for server, (link, write) in enumerate(zip(self._links, writes, strict=True)):
            try:
                if write is not None:
                    sent.append((link, link.write(write)))
            except Exception as error:
                self.report_failure(error, first=server)
                raise
        while len(self._pushed) > self._size:
            self._links.results(self._pushed.popleft())

    def raise_errors(self) -> None:
        """Take the results of the oldest updates that have ended, and raise their errors."""
        while self._pushed and all(link.is_done(call) for link, call in self._pushed[0]):
            self._links.results(self._pushed.popleft())

    def flush(self) -> None:
        pushed, self._pushed = self._pushed, deque()
        self._links.results([call for calls in pushed for call in calls])

    def report_failure(self, error: Exception, first: int = 0) -> None:
        """With mode="sync", make the other workers raise RankFailedError in the step that waits."""
        # If that fails too, it is logged: the caller raises `error`.
        if not self._sync:
            return
        write = ServerWrite("fail", {"error": f"{type(error).__name__}: {error}"})
        try:
            self._links.results([(link, link.write(write)) for link in list(self._links)[first:]])
        except Exception as failed:
            logger.warning("the other workers may not know of %r: %s", error, failed)
