"""Many ranks in one process: a thread each, tables spread by a router, and meetings to exchange facts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from megalith import Adagrad, EmbeddingCollection, Feature, LocalShards, TableConfig
from megalith.distributed.ranks import RankGroup
from megalith.routing import Router
from megalith.table import Table

T = TypeVar("T")
SECONDS = 60


class Meeting:
    """Where the ranks of one run meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=SECONDS)
        self._said: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._said[rank] = value
        self._barrier.wait()
        said = list(self._said)
        self._barrier.wait()
        return said


class LogicalRanks(RankGroup):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]

    def gather(self, value: Any) -> list[Any]:
        return self._meeting.exchange(self.rank, value)


class LogicalShards(LocalShards):
    """The tables of one rank of many."""

    def __init__(self, configs: Sequence[TableConfig], ranks: RankGroup, router: Router) -> None:
        super().__init__(configs)
        self.ranks = ranks
        self._router = router

    def router(self, table: str) -> Router:
        self.check_name(table)
        return self._router


class RankModel(nn.Module):
    """What one rank holds: its part of a table, and a weight that all have."""

    def __init__(self, ranks: RankGroup, router: Router) -> None:
        super().__init__()
        config = TableConfig("t", dim=2, optimizer=Adagrad(0.1))
        self.ranks, self.router = ranks, router
        self.embeddings = EmbeddingCollection(LogicalShards([config], ranks, router), [Feature("f", "t")])
        self.weight = nn.Parameter(torch.zeros(2))

    @property
    def table(self) -> Table:
        return self.embeddings.shards.local["t"]

    def own(self, ids: torch.Tensor) -> torch.Tensor:
        """Those of the ids that this rank owns."""
        return ids[self.router.owner(ids) == self.ranks.rank]


def new_models(router: Router) -> list[RankModel]:
    """The models of all ranks of a run."""
    meeting = Meeting(router.num_shards)
    return [RankModel(LogicalRanks(rank, meeting), router) for rank in range(meeting.size)]


def on_all(models: Sequence[RankModel], work: Callable[[RankModel], T]) -> list[T]:
    """Some work of all ranks at the same time; what each gives. Raises the first rank's error."""
    outcomes = outcomes_on_all(models, work)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[return-value]


def outcomes_on_all(models: Sequence[RankModel], work: Callable[[RankModel], T]) -> list[T | BaseException]:
    """What the work gives on each rank, or the error it raises there."""
    outcomes: list[Any] = [TimeoutError("the rank did not end")] * len(models)

    def run(model: RankModel) -> None:
        try:
            outcomes[model.ranks.rank] = work(model)
        except BaseException as error:
            outcomes[model.ranks.rank] = error

    threads = [threading.Thread(target=run, args=(model,), daemon=True) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return outcomes
