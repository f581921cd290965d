"""Publishing: a run pushes changed rows to the servers of its model.

Every rank pushes its own rows. The ranks share a session id, by which servers distinguish the ranks of one
run from those of another. The protocol is in `megalith.serving.sync.publisher`.
"""

from __future__ import annotations

import time as clock
import uuid
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from torch import nn

from megalith.training.run_config import RunConfig
from megalith.training.run_ranks import RunRanks

FINISH_SECONDS = 30.0
"""Seconds that a run waits at its end for the servers to receive everything."""
_ROUND_SECONDS = 2.0


@dataclass(frozen=True)
class Pushed:
    """The pushes of a run on all ranks together."""

    rows: int
    """Rows that servers acknowledged. A row counts once per push and server."""
    servers: int
    """Number of servers that acknowledged rows."""
    lagging: tuple[str, ...]
    """A sentence about each server that did not receive everything in time."""


class Publishing:
    """The publisher of a run on this rank, as a context manager.

    Args:
        model: The model in training.
        config: The config of the run.
        ranks: The ranks of the run.
        base: Id of the save that holds the current rows of the model.
        session: The id and the number of the session, the same on all ranks.

    Raises:
        InputError: The config of the publisher is wrong.
        DiscoveryError: The discovery cannot be opened.
        MissingDependencyError: The extra `serve` is not installed.
    """

    def __init__(
        self, model: nn.Module, config: RunConfig, ranks: RunRanks, *, base: str, session: tuple[str, int]
    ) -> None:
        # Not at the top: other runs do not need the packages of serving.
        from megalith.serving.client.credentials import Credentials
        from megalith.serving.sync.publisher import Publisher

        train = config.train
        assert train.publish
        self._ranks = ranks
        self._publisher = Publisher(
            model,
            train.publish,
            model_name=train.publish_name or config.model.name,
            interval=train.publish_interval,
            base=base,
            credentials=Credentials.from_files(
                token=train.publish_token_file, root_certificates=train.publish_ca_file
            ),
            session=session[0],
            session_number=session[1],
            index=ranks.rank,
            count=ranks.size,
        )

    @classmethod
    def begin(
        cls, model: nn.Module, config: RunConfig, ranks: RunRanks, *, base: str, number: int | None
    ) -> Publishing:
        """Creates the publisher on every rank, or raises on every rank. A collective call.

        Args:
            model: The model in training.
            config: The config of the run; `train.publish` names the discovery.
            ranks: The ranks of the run, one publisher each.
            base: Id of the save that the rows of the model are equal to now.
            number: The number of the session, above those of earlier ones; only that of rank 0 is used.

        Returns:
            The publisher of this rank.

        Raises:
            InputError: The discovery or a credential is malformed.
            DiscoveryError: The discovery cannot be started.
        """
        session = ranks.gather((uuid.uuid4().hex, number))[0]
        return ranks.rank_0_first(lambda: cls(model, config, ranks, base=base, session=session))

    def step(self) -> None:
        """To be called after every training step."""
        self._publisher.step()

    def saved(self, id: str) -> None:
        """To be called after a save with its id.

        Args:
            id: Id of the save, as the manifest has it.
        """
        self._publisher.checkpoint_taken(id)

    def finish(self) -> Pushed:
        """Pushes everything and waits up to FINISH_SECONDS for the servers. A collective call."""
        deadline = clock.monotonic() + FINISH_SECONDS
        while True:
            left = deadline - clock.monotonic()
            # In rounds with several ranks: a server may need the rows of other ranks before it applies ours.
            done = self._publisher.flush(left if self._ranks.size == 1 else min(_ROUND_SECONDS, left))
            everywhere = self._ranks.gather((done, clock.monotonic() > deadline))
            if all(done for done, _ in everywhere) or any(late for _, late in everywhere):
                break
        lagging = [
            f"{target.model} at {target.address}: {target.error or f'{target.backlog} rows are pending'}"
            for target in self._publisher.lagging()
        ]
        reports = [each for each in self._publisher.report() if each.acknowledged_at is not None]
        own = sum(each.rows for each in reports), {each.address for each in reports}, lagging
        found = self._ranks.gather(own)
        return Pushed(
            rows=sum(rows for rows, _, _ in found),
            servers=len(set().union(*(addresses for _, addresses, _ in found))),
            lagging=tuple(sorted({text for _, _, texts in found for text in texts})),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._publisher.close()


def check_publishing(config: RunConfig) -> None:
    """Checks the discovery of a config before the run writes anything.

    Args:
        config: The config; nothing is checked if it does not publish.

    Raises:
        InputError: The URL of the discovery is malformed.
    """
    if config.train.publish:
        from megalith.serving.discovery import open_discovery

        open_discovery(config.train.publish).stop()
