"""ServerPublisher: a publisher of rows on parameter servers. Each of them sends its own rows.

    number in the session    process             sends
    0                        this worker         dense weights
    1 ... servers            a parameter server  the rows that it holds

Otherwise it works like a `Publisher` with several ranks: model servers take the messages of all publishers of
a session, and replace rows together.
"""

from __future__ import annotations

import time as clock
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import nn

from megalith.checkpoint.model_state import collections_of
from megalith.errors import InputError, ServerLostError, UsageError
from megalith.ops import checks
from megalith.ps import ServerShards
from megalith.serving.sync.publisher import CONSUMER, Publisher
from megalith.serving.sync.sender import TargetReport
from megalith.shards import Shards, ShardsPart

_KEY = "publisher"


class ServerPublisher(Publisher):
    """Pushes the rows of parameter servers, and the dense weights of this process, until `close`.

    One worker makes it. A server that is started again has no publisher: the next call raises
    ServerLostError, and a new ServerPublisher sends everything.

    Args:
        model: The model in training, or its `ServerShards`.
        targets: The URL of the discovery of the serving processes; each server opens it.
        model_name: As for `Publisher`.
        interval: As for `Publisher`.
        dense: As for `Publisher`.
        refresh: Called before each push of dense weights; it writes the current ones into the model, for
            instance if they are on servers too. None: the model has them.
        options: Other arguments of `Publisher`, except protocol, session, index and count.

    Raises:
        InputError: An argument is wrong.
        UsageError: The tables are not on one `ServerShards`, or it has a publisher.
    """

    needs_rows = False

    def __init__(
        self,
        model: nn.Module | Shards,
        targets: str,
        *,
        model_name: str,
        interval: float = 10.0,
        dense: bool = True,
        refresh: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        checks.callback(refresh, "ServerPublisher: refresh")
        if not isinstance(targets, str):
            raise InputError(f"targets must be the URL of a discovery, got {type(targets).__name__}")
        own = ("session", "index", "count")
        if given := [name for name in own if name in options]:
            raise InputError(f"ServerPublisher sets {', '.join(given)} itself")
        if options.get("protocol", "megalith") != "megalith":
            raise InputError("ServerPublisher pushes with protocol='megalith' only")
        if isinstance(model, Shards):
            found = [model]
        elif isinstance(model, nn.Module):
            found = list({id(c.shards): c.shards for c in collections_of(model).values()}.values())
        else:
            raise InputError(f"a publisher needs a model or its shards, got {type(model).__name__}")
        if len(found) != 1 or not isinstance(found[0], ServerShards):
            raise UsageError("ServerPublisher needs a model whose tables are on one ServerShards")
        self._tables = found[0]
        self._refresh = refresh
        self._started = False
        number = options.pop("session_number", None)
        session = {
            "session": uuid.uuid4().hex,
            "session_number": clock.time_ns() // 1000
            if number is None
            else number,  # the same on all servers
            "count": len(self._tables.links) + 1,
        }
        common: dict[str, Any] = {"model_name": model_name, "interval": interval, **options, **session}
        self._refresh_dense()
        super().__init__(model, targets, dense=dense, index=0, **common)
        try:
            self._tables.flush()
            self._tables.each_part(_start, targets, common, background=True)
            self._started = True
        except BaseException:
            self.close()
            raise

    def publish(self) -> int:
        # Every server sends its changes.
        if self._started:
            self._tables.each_part(_publish)
        self._refresh_dense()
        return super().publish()

    def _refresh_dense(self) -> None:
        if self._refresh is not None:
            self._refresh()

    def checkpoint_taken(self, save_id: str) -> None:
        super().checkpoint_taken(save_id)
        self._tables.each_part(_checkpoint_taken, save_id)

    def flush(self, timeout: float = 30.0) -> bool:
        # For the changes of all servers.
        self._tables.flush()
        number = self.publish()
        deadline = clock.monotonic() + timeout
        done = self._tables.each_part(_wait, timeout, background=True)
        return self._wait_for(number, max(0.0, deadline - clock.monotonic())) and all(done)

    def report(self) -> list[TargetReport]:
        """Return the progress of each target, for this worker and for each server."""
        parts = self._tables.each_part(_report) if self._started else []
        return super().report() + [each for part in parts for each in part]

    def lagging(self) -> list[TargetReport]:
        """Return the targets that have not acknowledged everything published, by any publisher."""
        parts = self._tables.each_part(_lagging) if self._started else []
        return super().lagging() + [each for part in parts for each in part]

    def close(self) -> None:
        """Stop pushing, also on the servers; unsent changes are dropped. A second call does nothing."""
        super().close()
        if self._started:
            self._started = False
            with suppress(ServerLostError):  # a server that was started again has no publisher
                self._tables.each_part(_close, background=True)


class PartPublisher:
    """The publisher of one server; a `Kept`."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher

    def abandon(self) -> None:
        """Stop pushing: the worker has left."""
        self.publisher.close()


# ---- what runs on servers


def _start(part: ShardsPart, targets: str, options: dict[str, Any]) -> None:
    if _KEY in part.kept:
        raise UsageError(f"server {part.index} has a publisher already: close it first")
    known = dict.fromkeys(name for stats in part.shards.stats().values() for name in stats.consumers)
    for left in known:
        if left.startswith(CONSUMER):  # of a publisher before this server was started again
            part.shards.untrack(left)
    publisher = Publisher(part.shards, targets, dense=False, index=part.index + 1, **options)
    part.kept[_KEY] = PartPublisher(publisher)


def _publisher_of(part: ShardsPart) -> Publisher:
    kept = part.kept.get(_KEY)
    if not isinstance(kept, PartPublisher):
        raise ServerLostError(
            f"server {part.index} has no publisher: it was started again, or the worker has left; make a new "
            "ServerPublisher"
        )
    return kept.publisher


def _publish(part: ShardsPart) -> int:
    return _publisher_of(part).publish()


def _checkpoint_taken(part: ShardsPart, save_id: str) -> None:
    _publisher_of(part).checkpoint_taken(save_id)


def _wait(part: ShardsPart, timeout: float) -> bool:
    publisher = _publisher_of(part)
    return publisher._wait_for(publisher.interval.number, timeout)


def _report(part: ShardsPart) -> list[TargetReport]:
    return _publisher_of(part).report()


def _lagging(part: ShardsPart) -> list[TargetReport]:
    return _publisher_of(part).lagging()


def _close(part: ShardsPart) -> None:
    kept = part.kept.pop(_KEY, None)
    if kept is not None:
        kept.abandon()
