"""Failover: one request, several servers that could answer it, one deadline for all tries together.

Servers are tried in turn. One that fails makes way for the next at once. One that is slow gets company from
the next when half of the time left is gone, and the first answer counts: another try, however it ends, never
costs an answer that would have come in time. So requests must be harmless to repeat: predictions and lookups
are, writes are not. Several requests may run at once, each with servers of its own.
"""

from __future__ import annotations

import itertools
import queue
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megalith.errors import DiscoveryError, RemoteError
from megalith.serving.client.channels import Channels, Connection
from megalith.serving.discovery.contract import Discovery, Replicas
from megalith.serving.proto.message_types import Message

FINAL = frozenset({"INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"})
"""What says something about the request. Whatever else went wrong, another replica may do better."""
NOT_FOUND = "NOT_FOUND"
"""A replica may lack what another one has, and is well otherwise."""
REST_SECONDS = 1.0
"""How long a replica that failed is tried last."""


class Targets:
    """The replicas of a service, in an order that spreads the load. Threads may share one.

    Each call begins one further along, the first at random, so that clients started together do not all ask
    the same replica. Replicas that failed a moment ago come last. The discovery must have been started.
    """

    def __init__(self, discovery: Discovery, service: str, channels: Channels) -> None:
        self.service = service
        self.channels = channels
        self._discovery = discovery
        self._turn = itertools.count(random.randrange(2**32))
        self._failed: dict[str, float] = {}
        self._replicas: Replicas = ()
        self._watch = discovery.watch(service, self._set)

    def in_turn(self) -> list[str]:
        """The addresses of all of them, best first; perhaps none. Raises DiscoveryError."""
        replicas = self._replicas or self._discovery.replicas(self.service)
        start = next(self._turn) % max(len(replicas), 1)
        rested = time.monotonic() - REST_SECONDS
        addresses = [replica.address for replica in (*replicas[start:], *replicas[:start])]
        addresses.sort(key=lambda address: self._failed.get(address, rested) > rested)
        return addresses

    def failed(self, address: str) -> None:
        """Remembers that a replica did not answer."""
        self._failed[address] = time.monotonic()

    def close(self) -> None:
        """Ends the watch; the channels stay open."""
        self._watch.cancel()

    def _set(self, replicas: Replicas) -> None:
        self._replicas = replicas
        known = {replica.address for replica in replicas}
        for address in [address for address in self._failed.copy() if address not in known]:
            self._failed.pop(address, None)


@dataclass(frozen=True)
class Route:
    """A request and who may answer it."""

    targets: Targets
    request: bytes


@dataclass(frozen=True, eq=False)
class Try:
    """A request sent to one server."""

    attempt: Attempt
    address: str


Outcome = Message | RemoteError
Ended = queue.SimpleQueue[tuple[Try, Outcome]]


class Attempt:
    """A request under way, over its first route; the next one serves if a server of the first lacks the model
    and none of them answers.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self.done = False
        self.wakes_at = 0.0
        """When to call `wake`, if nothing has ended before."""
        self._response: Message = None
        self._error: RemoteError | DiscoveryError | None = None
        self._routes = list(routes)
        self._waiting: list[str] = []
        self._under_way: list[Try] = []
        self._tried: list[str] = []
        self._missed = False
        """Whether a server of this route lacks the model."""
        self._final: RemoteError | None = None
        """Why no other server is asked any more."""

    def result(self) -> Message:
        """The response; raises RemoteError or DiscoveryError."""
        if self._error is not None:
            raise self._error
        return self._response

    def begin(self, end: float, ended: Ended, *, alone: bool) -> None:
        """Sends it to the first server of the first route that has any.

        end: the deadline. ended: where its tries go when they have ended. alone: whether it may block.
        """
        self._end, self._ended, self._alone = end, ended, alone
        self._missed = False
        try:
            while not (waiting := self._routes[0].targets.in_turn()) and len(self._routes) > 1:
                self._routes.pop(0)
        except DiscoveryError as error:
            self._finish(error=error)
            return
        if not waiting:
            self._fail("UNAVAILABLE", "discovery knows no server of it")
            return
        self._waiting = waiting
        self._send()

    def take(self, ended: Try, outcome: Outcome) -> None:
        """A try has ended: with the answer, or with a reason to go on or to give up."""
        if ended not in self._under_way:
            return
        slower = self._under_way[: self._under_way.index(ended)]
        self._under_way.remove(ended)
        if isinstance(outcome, RemoteError):
            self._take_failure(outcome)
            return
        for other in slower:
            self._routes[0].targets.failed(other.address)
        self._finish(response=outcome)

    def wake(self, now: float) -> None:
        """Time has passed: the next server is asked too, or the time is up."""
        if now >= self._end:
            for each in self._under_way:
                self._routes[0].targets.failed(each.address)
            self._give_up("DEADLINE_EXCEEDED", "no answer in time")
        elif now >= self.wakes_at and self._waiting:
            self._send()

    def _send(self) -> None:
        address = self._waiting.pop(0)
        connection = self._routes[0].targets.channels.get(address)
        self._tried.append(address)
        now = time.monotonic()
        left = max(self._end - now, 0.0)
        self.wakes_at = now + left / 2 if self._waiting else self._end
        sent, request, ended = Try(self, address), self._routes[0].request, self._ended
        self._under_way.append(sent)
        if self._alone and not self._waiting and len(self._under_way) == 1:
            self.take(sent, _ask(connection, request, left))
        else:
            self._routes[0].targets.channels.submit(
                lambda: ended.put((sent, _ask(connection, request, left)))
            )

    def _take_failure(self, error: RemoteError) -> None:
        if error.code in FINAL:
            self._final = error
            self._waiting, self.wakes_at = [], self._end
        elif error.code == NOT_FOUND:
            self._missed = True
        else:
            self._routes[0].targets.failed(error.targets[0])
        if self._under_way:
            return
        in_time = time.monotonic() < self._end
        if self._waiting and in_time:
            self._send()
        elif self._missed and len(self._routes) > 1 and self._final is None and in_time:
            self._routes.pop(0)
            self.begin(self._end, self._ended, alone=self._alone)
        else:
            self._give_up(error.code, str(error))

    def _give_up(self, code: str, details: str) -> None:
        if self._final is not None:
            code, details = self._final.code, str(self._final)
        self._fail(code, details)

    def _fail(self, code: str, details: str) -> None:
        tried = f" (tried {', '.join(self._tried)})" if len(self._tried) > 1 else ""
        message = f"{self._routes[0].targets.service}: {details}{tried}"
        self._finish(error=RemoteError(message, code=code, targets=tuple(self._tried)))

    def _finish(self, *, response: Message = None, error: RemoteError | DiscoveryError | None = None) -> None:
        # What is still under way ends by itself, at the deadline at the latest.
        self._under_way = []
        self._response, self._error, self.done = response, error, True


def run(attempts: Sequence[Attempt], seconds: float) -> None:
    """Runs all of them at once, until each has a response or an error; at most for `seconds`."""
    end = time.monotonic() + seconds
    ended: Ended = queue.SimpleQueue()
    for attempt in attempts:
        attempt.begin(end, ended, alone=len(attempts) == 1)
    while unfinished := [attempt for attempt in attempts if not attempt.done]:
        wait = min(attempt.wakes_at for attempt in unfinished) - time.monotonic()
        try:
            sent, outcome = ended.get(timeout=max(wait, 0.0))
        except queue.Empty:
            now = time.monotonic()
            for attempt in unfinished:
                attempt.wake(now)
        else:
            sent.attempt.take(sent, outcome)


def _ask(connection: Connection, request: bytes, seconds: float) -> Outcome:
    try:
        return connection.predict(request, timeout=seconds)
    except RemoteError as error:
        return error
