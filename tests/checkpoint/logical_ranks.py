"""Several ranks in one process: each is a thread, a router distributes tables, a barrier exchanges values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from megalith import Adagrad, EmbeddingCollection, Feature, LocalShards, TableConfig
from megalith.distributed.ranks import Ranks
from megalith.routing import Router
from megalith.table import Table

T = TypeVar("T")
SECONDS = 60


class Exchange:
    """Exchanges values between the ranks of one run."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=SECONDS)
        self._values: list[Any] = [None] * size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


class LogicalRanks(Ranks):
    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.rank, self.size, self._exchange = rank, exchange.size, exchange

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]

    def gather(self, value: Any) -> list[Any]:
        return self._exchange.gather(self.rank, value)


class LogicalShards(LocalShards):
    """The tables of one of several ranks."""

    def __init__(self, configs: Sequence[TableConfig], ranks: Ranks, router: Router) -> None:
        super().__init__(configs)
        self.ranks = ranks
        self._router = router

    def router(self, table: str) -> Router:
        self.check_name(table)
        return self._router


class RankModel(nn.Module):
    """The model of one rank: its part of a table, and a weight that all ranks have."""

    def __init__(self, ranks: Ranks, router: Router) -> None:
        super().__init__()
        config = TableConfig("t", dim=2, optimizer=Adagrad(0.1))
        self.ranks, self.router = ranks, router
        self.embeddings = EmbeddingCollection(LogicalShards([config], ranks, router), [Feature("f", "t")])
        self.weight = nn.Parameter(torch.zeros(2))

    @property
    def table(self) -> Table:
        return self.embeddings.shards.local["t"]

    def own(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the ids that this rank owns."""
        return ids[self.router.owner(ids) == self.ranks.rank]


def new_models(router: Router) -> list[RankModel]:
    """Create the models of all ranks of a run."""
    exchange = Exchange(router.num_shards)
    return [RankModel(LogicalRanks(rank, exchange), router) for rank in range(exchange.size)]


def on_all(models: Sequence[RankModel], work: Callable[[RankModel], T]) -> list[T]:
    """Run a function on all ranks at the same time and return the results. Raises the first rank's error."""
    outcomes = outcomes_on_all(models, work)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[return-value]


def outcomes_on_all(models: Sequence[RankModel], work: Callable[[RankModel], T]) -> list[T | BaseException]:
    """Run a function on all ranks and return the result or the error of each."""
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
