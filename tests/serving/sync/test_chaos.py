"""Training and serving at once, in processes that are killed at any moment: replicas end equal."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from megalith import checkpoint
from megalith.models import Model
from megalith.serving.client.channels import Connection
from megalith.serving.proto.tf_tensors import from_tensor_protos
from megalith.serving.sync.push_messages import encode_request
from tests.serving.sync_processes import LIMIT, NUM_IDS, Process, serve, train
from tests.serving.sync_support import NAMES, Trainer, export_version, make_model, rows_of
from tests.serving.zookeeper import free_port


class World:
    """A trainer and two servers."""

    def __init__(self, folder: Path, stack: ExitStack, seed: int) -> None:
        self.folder, self._stack = folder, stack
        self._seeds = iter(range(seed * 1000, seed * 1000 + 1000))
        self.ports = [free_port(), free_port()]
        self.servers = [self._start(serve, folder, port) for port in self.ports]
        self.trainer = self._start_trainer()

    def _start(self, role: Callable[..., None], *args: object) -> Process:
        process = Process(role, *args)
        self._stack.callback(process.kill)
        return process

    def _start_trainer(self) -> Process:
        addresses = [f"127.0.0.1:{port}" for port in self.ports]
        return self._start(train, self.folder, next(self._seeds), addresses)

    def restart_trainer(self) -> None:
        self.trainer.kill()
        self.trainer = self._start_trainer()

    def restart_server(self, number: int) -> None:
        self.servers[number].kill()
        self.servers[number] = self._start(serve, self.folder, self.ports[number])

    def new_version(self) -> None:
        """Exports the checkpoint there is, which servers pick up while rows are pushed."""
        model = make_model()
        checkpoint.load(model, self.folder / "checkpoint")
        tip = checkpoint.read_manifest(self.folder / "checkpoint").tip
        version = 1 + max(int(path.name) for path in (self.folder / "export").iterdir())
        export_version(model, self.folder / "export", base=tip, version=version)


def ask(address: str, signature: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with Connection(address) as connection:
        answer = connection.predict(encode_request("movies", signature, inputs), timeout=LIMIT)
    return from_tensor_protos(answer.outputs)  # type: ignore[return-value]


def assert_served(address: str, model: Model) -> None:
    """The rows of all ids, bit for bit, and scores, which need the dense weights."""
    ids = torch.arange(-5, NUM_IDS + 5)
    rows = ask(address, "lookup", dict.fromkeys(NAMES, ids))
    for table in NAMES:
        assert torch.equal(rows[table], rows_of(model, table, ids)), (address, table)
    known = {
        table: torch.cat([chunk.ids for chunk in model.embeddings.shards.scan(table)])[:100]
        for table in NAMES
    }
    model.eval()
    with torch.no_grad():
        expected = model(known)
    scores = ask(address, "serving_default", known)["logits"]
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", [1])
def test_killed_and_restarted_at_random_all_end_equal(tmp_path: Path, stack: ExitStack, seed: int) -> None:
    model = make_model()
    Trainer(model, seed=seed).step(10)
    tip = checkpoint.save(model, tmp_path / "checkpoint").tip
    export_version(model, tmp_path / "export", base=tip)
    world = World(tmp_path, stack, seed)
    chance = random.Random(seed)
    events = ["trainer", "server 0", "server 1", "both", "version"]
    chance.shuffle(events)
    for process in (*world.servers, world.trainer):
        process.until("serving" if process is not world.trainer else "training")

    for event in events:
        world.trainer.until("saved")
        if event in ("trainer", "both"):
            world.restart_trainer()
        if event in ("server 0", "both"):
            world.restart_server(0)
        if event == "server 1":
            world.restart_server(1)
        if event == "version":
            world.new_version()
    world.trainer.until("saved")
    world.trainer.finish()

    assert world.trainer.until("finished").startswith("finished True")
    final = make_model()
    checkpoint.load(final, tmp_path / "final")
    for port in world.ports:
        assert_served(f"127.0.0.1:{port}", final)
