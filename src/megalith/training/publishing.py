"""Publishing: a run pushes what it trains to the servers of its model.

Every rank pushes its own rows; they share a session, so that servers know the ranks of one run from those of
another. What is pushed, and how, is for `megalith.serving.sync.publisher` to say.
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
"""How long a run waits at its end for servers to get everything."""
_ROUND_SECONDS = 2.0


@dataclass(frozen=True)
class Pushed:
    """What a run has pushed, on all ranks together."""

    rows: int
    """Rows that servers acknowledged; one that changed twice counts twice, and so for each server."""
    servers: int
    lagging: tuple[str, ...]
    """Servers that did not get everything in time, each in a sentence."""


class Publishing:
    """The publisher of a run on this rank, until it is left.

    base: the id of the save that the model's rows are of now. session: what the ranks agreed on. Raises
    InputError, DiscoveryError, or MissingDependencyError without the extra `serve`.
    """

    def __init__(
        self, model: nn.Module, config: RunConfig, ranks: RunRanks, *, base: str, session: str
    ) -> None:
        # Not at the top: training needs none of serving's packages otherwise.
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
            session=session,
            index=ranks.rank,
            count=ranks.size,
        )

    @classmethod
    def begin(cls, model: nn.Module, config: RunConfig, ranks: RunRanks, *, base: str) -> Publishing:
        """One on every rank, or an error on every rank. A collective call."""
        session = ranks.gather(uuid.uuid4().hex)[0]
        return ranks.in_turn(lambda: cls(model, config, ranks, base=base, session=session))

    def step(self) -> None:
        """After every training step."""
        self._publisher.step()

    def saved(self, id: str) -> None:
        """Right after a save was taken."""
        self._publisher.checkpoint_taken(id)

    def finish(self) -> Pushed:
        """Pushes everything and waits for servers, not for long. A collective call."""
        deadline = clock.monotonic() + FINISH_SECONDS
        while True:
            left = deadline - clock.monotonic()
            # In rounds where there are ranks: one may need others to push before its own rows show.
            done = self._publisher.flush(left if self._ranks.size == 1 else min(_ROUND_SECONDS, left))
            everywhere = self._ranks.gather((done, clock.monotonic() > deadline))
            if all(done for done, _ in everywhere) or any(late for _, late in everywhere):
                break
        lagging = [
            f"{target.model} at {target.address}: {target.error or f'{target.backlog} rows wait'}"
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
    """Raises InputError if a run's discovery makes no sense, before the run has written anything."""
    if config.train.publish:
        from megalith.serving.discovery import open_discovery

        open_discovery(config.train.publish).stop()
