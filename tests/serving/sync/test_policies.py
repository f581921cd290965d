"""Tables with eviction policies: rows that training evicts disappear from servers and delta checkpoints."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalith import TTL, Capacity, checkpoint
from megalith.models import Model
from megalith.serving.export.servable import Servable
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import ServerConfig
from megalith.table import Eviction
from tests.serving.sync_support import LIMIT, NAMES, assert_equal, export_version, make_model, publisher_to

NUM_IDS = 600
POLICIES: dict[str, list[Eviction]] = {
    "ttl": [TTL(200)],
    "capacity": [Capacity(120, score="lru")],
    "both": [TTL(250), Capacity(150, score="lfu")],
}


class DriftingTrainer:
    """Trains on a window of ids that moves on, ten seconds per step. Eviction passes run along."""

    def __init__(self, eviction: list[Eviction]) -> None:
        self.model = make_model(eviction=eviction, evict_every=1)
        self._optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self._generator = torch.Generator().manual_seed(0)
        self._steps = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            first = 5 * self._steps
            ids = first + torch.randint(0, 80, (len(NAMES), 32), generator=self._generator)
            self._optimizer.zero_grad()
            features = {name: ids[k] for k, name in enumerate(NAMES)}
            self.model(features, time=1000.0 + 10 * self._steps).square().mean().backward()
            self._optimizer.step()
            self._steps += 1

    def evict(self) -> None:
        """Complete a pass: that of the last steps is still in progress."""
        self.model.embeddings.shards.evict(1000.0 + 10 * self._steps)


def rows_by_id(model: Model, table: str) -> dict[int, list[float]]:
    rows: dict[int, list[float]] = {}
    for chunk in model.embeddings.tables[table].scan():
        rows.update(zip(chunk.ids.tolist(), chunk.rows.tolist(), strict=True))
    return rows


def served_ids(servable: Servable, table: str, ids: Tensor) -> list[int]:
    return ids[servable.lookup(table, ids).any(1)].tolist()


@pytest.mark.parametrize("name", POLICIES)
def test_a_server_ends_with_the_rows_that_training_kept(name: str, stack: ExitStack, tmp_path: Path) -> None:
    trainer = DriftingTrainer(POLICIES[name])
    model = trainer.model
    trainer.train(20)
    export_version(model, tmp_path / "exports" / "movies", base="one")
    server = stack.enter_context(ModelServer(tmp_path / "exports", ServerConfig(allow_writes=True)))
    publisher = publisher_to(stack, model, [server])
    exported = {table: set(rows_by_id(model, table)) for table in NAMES}
    published = {table: set(ids) for table, ids in exported.items()}
    for _ in range(8):
        trainer.train(10)
        assert publisher.flush(LIMIT), publisher.report()
        for table in NAMES:
            published[table] |= set(rows_by_id(model, table))
    trainer.evict()
    assert publisher.flush(LIMIT), publisher.report()

    (served,) = server.models
    assert served.subscriber is not None
    servable = served.subscriber.servable
    assert isinstance(servable, Servable)
    assert_equal(servable, model, NUM_IDS)
    ids = torch.arange(NUM_IDS)
    for table in NAMES:
        alive = set(rows_by_id(model, table))
        assert served_ids(servable, table, ids) == sorted(alive)
        assert not exported[table] & alive, "the rows of the export were all evicted"
        assert len(published[table] - alive) > 100, "as were rows that arrived later"
        counters = model.embeddings.tables[table].stats().counters
        assert counters.evicted == counters.created - len(alive)
    assert served.subscriber.counters.removed > 0


@pytest.mark.parametrize("name", POLICIES)
def test_delta_checkpoints_end_with_the_rows_that_training_kept(name: str, tmp_path: Path) -> None:
    trainer = DriftingTrainer(POLICIES[name])
    trainer.train(20)
    checkpoint.save(trainer.model, tmp_path)
    saved = {table: set(rows_by_id(trainer.model, table)) for table in NAMES}
    for _ in range(4):
        trainer.train(20)
        trainer.evict()
        checkpoint.save_delta(trainer.model, tmp_path)
    loaded = DriftingTrainer(POLICIES[name]).model

    checkpoint.load(loaded, tmp_path)

    for table in NAMES:
        expected = rows_by_id(trainer.model, table)
        assert rows_by_id(loaded, table) == expected
        assert not saved[table] & set(expected)
    assert not checkpoint.verify(tmp_path).problems
