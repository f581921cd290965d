"""What the tests of parameter sync share: a small model in training, its exports, a server with faults."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith import Adagrad, checkpoint
from megalith.errors import InputError, SequenceError
from megalith.models import EmbeddingConfig, Model, build_model
from megalith.serving.discovery import StaticDiscovery
from megalith.serving.export.exporter import Provenance, export_model
from megalith.serving.export.servable import Servable
from megalith.serving.proto.tf_tensors import (
    Strings,
)
from megalith.serving.sync.publisher import Publisher
from megalith.serving.sync.subscriber import Subscriber
from tests.serving.plain_server import LIMIT, Refused, Seen, plain_server

HOUR = 3600.0
"""An interval that no test waits for: they call `publish` and `flush`."""
NAMES = ["user", "item"]
SESSION = "0123456789abcdef0123456789abcdef"


def make_model(seed: int = 0, hidden: tuple[int, ...] = (8,), **options: Any) -> Model:
    torch.manual_seed(seed)
    config = EmbeddingConfig(NAMES, dim=4, optimizer=Adagrad(0.1), **options)
    return build_model("deepfm", config, hidden=hidden)


class Trainer:
    """Trains a model a step at a time on random ids, some of which it removes again."""

    def __init__(self, model: Model, seed: int = 0, num_ids: int = 500) -> None:
        self.model = model
        self.num_ids = num_ids
        self._random = random.Random(seed)
        self._torch = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(self, count: int = 1, *, dense: bool = True) -> None:
        for _ in range(count):
            ids = torch.randint(0, self.num_ids, (len(NAMES), 32), generator=self._torch)
            self._optimizer.zero_grad()
            self.model({name: ids[k] for k, name in enumerate(NAMES)}).square().mean().backward()
            self.reduce_gradients()
            if dense:
                self._optimizer.step()
            if self._random.random() < 0.3:
                gone = torch.randint(0, self.num_ids, (5,), generator=self._torch)
                self.model.embeddings.shards.remove({"user": gone})

    def reduce_gradients(self) -> None:
        """Nothing to do for one rank."""


def export_version(model: Model, out: Path, *, base: str, version: int = 1, **options: Any) -> list[Servable]:
    """Exports a model; what is served of it, part by part."""
    source = Provenance(base, model.embeddings.global_step)
    export_model(model, out, name="movies", version=version, source=source, **options)
    if (out / str(version)).exists():
        return [Servable(out / str(version))]
    fetch = lambda ids: {name: torch.zeros(x.numel(), 5) for name, x in ids.items()}  # noqa: E731
    parts = sorted(path for path in out.iterdir() if (path / str(version)).exists())
    return [Servable(part / str(version), fetch=fetch if part.name == "entry" else None) for part in parts]


def make_start(root: Path, **options: Any) -> Path:
    """A trained model's checkpoint, the export of it, and the id of its save, below root."""
    model = make_model(**options)
    Trainer(model, seed=9).step(5)
    tip = checkpoint.save(model, root / "checkpoint").tip
    export_version(model, root / "export", base=tip)
    (root / "tip").write_text(tip)
    return root


def load_start(start: Path, **options: Any) -> Model:
    """A model with the rows and weights of the start's checkpoint."""
    model = make_model(**options)
    checkpoint.load(model, start / "checkpoint")
    return model


def rows_of(model: Model, table: str, ids: Tensor) -> Tensor:
    """The rows of a table, zeros for ids without a row: what a server should answer."""
    own = model.embeddings.shards.local[table]
    rows = own.lookup(ids)
    rows[own.find(ids) < 0] = 0
    return rows


def assert_equal(servable: Servable, model: Model, num_ids: int = 500) -> None:
    """Every id, with a row or without, reads alike; dense weights too."""
    ids = torch.arange(-5, num_ids + 5)
    if servable.signature.part != "entry":
        for table in NAMES:
            mine = ids
            if servable.signature.shard is not None:
                owner = servable.signature.tables[table].router().owner(ids)
                mine = ids[owner == servable.signature.shard]
            assert torch.equal(servable.lookup(table, mine), rows_of(model, table, mine)), table
    for name, weight in servable.dense_weights.items():
        assert torch.equal(weight, model.state_dict()[name]), name


class SyncServer:
    """Hands everything that a plain server receives to subscribers by model name.

    before, after: called with (model, signature, metadata) around a message, may raise or block; `after`
    raising loses the acknowledgement. requests: what was handed on.
    """

    def __init__(self, subscribers: dict[str, Subscriber]) -> None:
        self.subscribers = subscribers
        self.before: Callable[[str, str, dict[str, str]], None] = lambda *_: None
        self.after: Callable[[str, str, dict[str, str]], None] = lambda *_: None
        self.requests: list[tuple[str, str, Any, dict[str, str]]] = []
        self.address = ""
        self.stop: Callable[[], None] = lambda: None

    def answer(self, seen: Seen) -> Mapping[str, Tensor | Strings]:
        spec, metadata = seen.message.model_spec, {key: str(value) for key, value in seen.metadata.items()}
        call = (spec.name, spec.signature_name, metadata)
        if spec.name not in self.subscribers:
            raise Refused("NOT_FOUND")
        try:
            self.before(*call)
            self.requests.append((spec.name, spec.signature_name, seen.inputs, metadata))
            outputs = self.subscribers[spec.name].handle(spec.signature_name, seen.inputs, metadata)
            self.after(*call)
        except InputError as error:
            raise Refused("INVALID_ARGUMENT", str(error)) from None
        except SequenceError as error:
            raise Refused("FAILED_PRECONDITION", str(error)) from None
        except TimeoutError as error:
            raise Refused("UNAVAILABLE", str(error)) from None
        return outputs


@contextmanager
def sync_server(subscribers: dict[str, Subscriber], port: int = 0) -> Iterator[SyncServer]:
    server = SyncServer(subscribers)
    with plain_server(server.answer, port=port) as running:
        server.address, server.stop = running.address, running.stop
        yield server


class Gate:
    """Lets messages through, or holds them."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self.open.wait(LIMIT)


class Replica:
    """A served model, and its server, which may be restarted at its address."""

    def __init__(self, start: Path, stack: ExitStack, **options: Any) -> None:
        self._start, self._stack, self._options = start, stack, options
        self.port = 0
        self.restart()

    def restart(self) -> None:
        if self.port:
            self.server.stop()
        self.servable = Servable(self._start / "export" / "1")
        self.subscriber = Subscriber(self.servable, **self._options)
        self.server: SyncServer = self._stack.enter_context(
            sync_server({"movies": self.subscriber}, self.port)
        )
        self.port = int(self.address.rpartition(":")[2])

    @property
    def address(self) -> str:
        return self.server.address


def publisher_of(model: Model, replicas: Any, stack: ExitStack, start: Path, **options: Any) -> Publisher:
    options = {"base": (start / "tip").read_text(), "timeout": 5.0, **options}
    return publisher_to(stack, model, replicas, **options)


def serve(stack: ExitStack, servable: Servable) -> SyncServer:
    """A server of one version, under the name by which publishers call it."""
    name = "movies" if servable.signature.part == "entry" else servable.signature.name
    return stack.enter_context(sync_server({name: Subscriber(servable)}))


def publisher_to(stack: ExitStack, model: Any, targets: Any, **options: Any) -> Publisher:
    """A publisher to a discovery, or to some servers, of a model at the save "one"."""
    if isinstance(targets, list):
        targets = StaticDiscovery([server.address for server in targets])
    options = {"model_name": "movies", "interval": HOUR, "base": "one", **options}
    return stack.enter_context(Publisher(model, targets, **options))


class Online:
    """A model in training from the start's checkpoint, and the servers and publishers of a test."""

    def __init__(self, start: Path, stack: ExitStack, **options: Any) -> None:
        self._start, self._stack = start, stack
        self.model = load_start(start, **options)
        self.trainer = Trainer(self.model)

    def replica(self, **options: Any) -> Replica:
        return Replica(self._start, self._stack, **options)

    def publisher(self, replicas: list[Replica] | StaticDiscovery, **options: Any) -> Publisher:
        return publisher_of(self.model, replicas, self._stack, self._start, **options)

    def hold(self, replica: Replica) -> Gate:
        """Holds the messages to a replica until the gate is opened."""
        replica.server.before = gate = Gate()
        gate.open.clear()
        self._stack.callback(gate.open.set)
        return gate

    def assert_arrives(self, publisher: Publisher, *served: Replica | Servable) -> None:
        """Everything trained is acknowledged, and reads alike from each server."""
        assert publisher.flush(LIMIT), publisher.report()
        for each in served:
            assert_equal(each.servable if isinstance(each, Replica) else each, self.model)
