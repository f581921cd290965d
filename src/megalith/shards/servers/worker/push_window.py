"""PushWindow: the updates of a worker that are in progress, and their errors."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from megalith.shards.servers.server_messages import ServerWrite
from megalith.shards.servers.worker.link_group import LinkGroup
from megalith.shards.servers.worker.pending_calls import PendingCall
from megalith.shards.servers.worker.server_link import ServerLink

logger = logging.getLogger(__name__)


class PushWindow:
    """See the module. An error is raised once, by the first call that finds the update finished."""

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
        """Wait for all updates, and raise the first error."""
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
