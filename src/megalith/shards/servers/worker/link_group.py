"""LinkGroup: the connections of one worker to all servers: calls of all of them, and its membership."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from megalith.shards.preparer import RoutedIds
from megalith.shards.servers.channel.shared_segments import SegmentPool
from megalith.shards.servers.server_messages import ServerWrite, array_of
from megalith.shards.servers.worker.pending_calls import PendingCall
from megalith.shards.servers.worker.server_link import ServerLink

Calls = Sequence[tuple[ServerLink, PendingCall]]


class LinkGroup:
    """See the module."""

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
        """Remove this worker, after its writes."""
        self.everywhere(ServerLink.leave)

    def remove(self, worker: int) -> None:
        """Remove a worker, whatever it does."""
        self.everywhere(lambda link: link.remove(worker))

    def close(self, *, moved: bool = False) -> None:
        """Drop the tables on all servers."""
        self.everywhere(lambda link: link.close(moved=moved))

    def disconnect(self) -> None:
        """Close the sockets; `join` opens others."""
        for link in self._links:
            link.disconnect()

    # ---- calls

    def everywhere(self, call: Callable[[ServerLink], PendingCall]) -> list[Any]:
        """Make a call of every server."""
        return self.results([(link, call(link)) for link in self._links])

    def ask(self, function: Callable[..., Any]) -> list[Any]:
        """Run a function that only reads on every server; on one that was started again, once more."""
        return self.everywhere(lambda link: link.run(function, background=False, repeatable=True))

    def write_everywhere(self, kind: str, header: dict[str, Any]) -> list[Any]:
        """Send a write to every server."""
        write = ServerWrite(kind, header)
        return self.everywhere(lambda link: link.write(write))

    def write_ids(
        self,
        kind: str,
        header: dict[str, Any],
        routed: RoutedIds,
        arrays: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> list[Any]:
        """Send a write of ids to their owners."""
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
