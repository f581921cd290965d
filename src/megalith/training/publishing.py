"""Publishing: a run pushes changed rows to the servers of its model.

Every rank pushes its own rows. The ranks share a session id, by which servers distinguish the ranks of one
run from those of another. The protocol is in `megalith.serving.sync.publisher`. If the rows are on parameter
servers, each of them pushes its own. One that is started again has no publisher, so all begin a new session,
which sends everything.
"""

from __future__ import annotations

import logging
import time as clock
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from megalith.distributed.ranks import Ranks
from megalith.errors import ServerLostError
from megalith.models import Model
from megalith.training.config import RunConfig
from megalith.training.ps import RunServers

FINISH_SECONDS = 30.0
"""Seconds that a run waits at its end for the servers to receive everything."""
_ROUND_SECONDS = 2.0
_ATTEMPTS = 5
"""How often a call is made if parameter servers end during it."""
T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pushed:
    rows: int
    """Rows that servers acknowledged. A row counts once per push and server."""
    servers: int
    """Number of servers that acknowledged rows."""
    lagging: tuple[str, ...]
    """A sentence about each server that did not receive everything in time."""


class Publishing:
    """The publisher of a run on this rank, as a context manager."""

    def __init__(
        self,
        model: Model,
        config: RunConfig,
        ranks: Ranks,
        *,
        base: str,
        session: tuple[str, int],
        servers: RunServers | None,
        next_session: Callable[[], int] | None,
    ) -> None:
        # Not at the top: other runs do not need the packages of serving.
        from megalith.serving.client.credentials import Credentials
        from megalith.serving.sync.publisher import Publisher, ServerPublisher

        train = config.train
        assert train.publish
        self._ranks = ranks
        self._next_session = next_session
        common: dict[str, Any] = {
            "model_name": train.publish_name or config.model.name,
            "interval": train.publish_interval,
            "credentials": Credentials.from_files(
                token=train.publish_token_file, root_certificates=train.publish_ca_file
            ),
        }
        url = train.publish

        def publisher(session: tuple[str, int], base: str | None) -> Publisher:
            id, number = session
            if servers is not None:
                return ServerPublisher(
                    model, url, refresh=servers.read_dense, base=base, session_number=number, **common
                )
            place: dict[str, Any] = {"session": id, "index": ranks.rank, "count": ranks.size}
            return Publisher(model, url, base=base, session_number=number, **place, **common)

        self._make = publisher
        self._lost = False  # whether a parameter server has lost its publisher
        self._publisher = publisher(session, base)

    @classmethod
    def begin(
        cls,
        model: Model,
        config: RunConfig,
        ranks: Ranks,
        *,
        base: str,
        next_session: Callable[[], int] | None,
        servers: RunServers | None = None,
    ) -> Publishing:
        """Create the publisher on every rank, or raise on every rank. A collective call."""
        number = None if next_session is None else next_session()
        session = ranks.broadcast((uuid.uuid4().hex, number))

        def make() -> Publishing:
            return cls(
                model, config, ranks, base=base, session=session, servers=servers, next_session=next_session
            )

        # Rank 0 first: if it cannot reach the discovery, the others need not try.
        first = ranks.agree(make if ranks.rank == 0 else lambda: None)
        return ranks.agree(lambda: make() if first is None else first)

    def _repeated(self, call: Callable[[], T], base: str | None = None) -> T:
        """Make a call; if a parameter server has ended, begin a new session and make it again."""
        for left in reversed(range(_ATTEMPTS)):
            try:
                if self._lost:
                    self._begin_again(base)
                return call()
            except ServerLostError as error:
                if not left:
                    raise
                self._lost = True
                logger.warning("all rows are pushed again: %s", error)
        raise AssertionError("unreachable")

    def _begin_again(self, base: str | None) -> None:
        assert self._next_session is not None
        self._publisher.close()
        self._publisher = self._make(("", self._next_session()), base)
        self._lost = False

    def step(self) -> None:
        self._repeated(lambda: self._publisher.step())

    def saved(self, id: str) -> None:
        self._repeated(lambda: self._publisher.checkpoint_taken(id), base=id)

    def finish(self) -> Pushed:
        """Push everything and wait up to FINISH_SECONDS for the servers. A collective call."""
        deadline = clock.monotonic() + FINISH_SECONDS
        while True:
            done = self._repeated(lambda: self._flush(deadline))
            everywhere = self._ranks.gather((done, clock.monotonic() > deadline))
            if all(done for done, _ in everywhere) or any(late for _, late in everywhere):
                break
        lagging = [
            f"{target.model} at {target.address}: {target.error or f'{target.backlog} rows are pending'}"
            for target in self._repeated(lambda: self._publisher.lagging())
        ]
        targets = self._repeated(lambda: self._publisher.report())
        reports = [each for each in targets if each.acknowledged_at is not None]
        own = sum(each.rows for each in reports), {each.address for each in reports}, lagging
        found = self._ranks.gather(own)
        return Pushed(
            rows=sum(rows for rows, _, _ in found),
            servers=len(set().union(*(addresses for _, addresses, _ in found))),
            lagging=tuple(sorted({text for _, _, texts in found for text in texts})),
        )

    def _flush(self, deadline: float) -> bool:
        left = max(0.0, deadline - clock.monotonic())
        # In rounds with several ranks: a server may need the rows of other ranks before it applies ours.
        return self._publisher.flush(left if self._ranks.size == 1 else min(_ROUND_SECONDS, left))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._publisher.close()


def check_publishing(config: RunConfig) -> None:
    """Check the discovery of a config before the run writes anything."""
    if config.train.publish:
        from megalith.serving.discovery import open_discovery

        open_discovery(config.train.publish).stop()
