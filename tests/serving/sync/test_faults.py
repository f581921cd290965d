"""Parameter sync when things go wrong: servers and discoveries that misbehave, versions that come and go."""

from __future__ import annotations

import json
import random
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith import checkpoint
from megalith.errors import InputError, SequenceError, UsageError
from megalith.models import Model
from megalith.serving.discovery import Replica as Found
from megalith.serving.discovery import StaticDiscovery, SyncBackend
from megalith.serving.discovery.contract import SyncTargets
from megalith.serving.export.servable import Servable
from megalith.serving.proto.tf_tensors import Strings
from megalith.serving.sync.changed_ids import Interval
from megalith.serving.sync.parameter_source import ParameterSource
from megalith.serving.sync.protocol import MAX_PARTS, ModelLayout, Position, string_array
from megalith.serving.sync.publisher import Publisher
from megalith.serving.sync.sender import Sender
from tests.serving.sync_support import (
    HOUR,
    LIMIT,
    Gate,
    Online,
    Replica,
    Trainer,
    assert_equal,
    export_version,
    load_start,
    make_model,
    publisher_of,
)

SERVICE = "movies:standalone"


# ---- servers


def test_a_server_that_cannot_go_back_to_its_base_is_sent_everything(online: Online) -> None:
    replica = online.replica()
    refusals = iter([SequenceError("those rows cannot be read any more")])

    def refuse_once(name: str, signature: str, metadata: dict[str, str]) -> None:
        if signature == "sync_begin":
            for error in refusals:
                raise error

    replica.server.before = refuse_once
    publisher = online.publisher([replica])
    online.trainer.step()

    online.assert_arrives(publisher, replica)
    assert replica.subscriber.counters.replacements == 1


def test_a_server_that_never_takes_the_last_message_is_left_alone_for_longer_and_longer(
    start: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its dense weights have another shape: rows arrive, the end of the interval does not."""
    model = make_model(hidden=(16,))
    replica = Replica(start, stack)
    pauses: list[tuple[int, str | None]] = []
    monkeypatch.setattr(Sender, "_pause", lambda self, failures: pauses.append((failures, self.report.error)))
    monkeypatch.setattr("megalith.serving.sync.sender.MAX_CONTENT_BYTES", 100)
    publisher = publisher_of(model, [replica], stack, start)
    model.embeddings.shards.assign({"user": (torch.arange(20), torch.ones(20, 5))})

    while len(pauses) < 4:
        publisher.flush(0.01)

    assert [failures for failures, _ in pauses[:4]] == [1, 2, 3, 4]
    assert publisher.report()[0].rows > 0
    assert all("dense weight" in (error or "") for _, error in pauses[:4])


def test_a_server_that_only_says_that_it_has_begun_is_not_believed(online: Online) -> None:
    """Two trainers use the same session, and the first one is far ahead."""
    replica = online.replica()
    session = "ab" * 16
    for _ in range(2):
        publisher = online.publisher([replica], session=session)
        for _ in range(3):
            online.trainer.step()
            assert publisher.flush(LIMIT), publisher.report()
        publisher.close()

    assert_equal(replica.servable, online.model)


def answer(**changes: Any) -> dict[str, torch.Tensor | Strings]:
    return {**Position("", "one", 0, 0, ModelLayout()).outputs(), **changes}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sequence": torch.tensor([2**62])}, "sequence"),
        ({"sequence": torch.tensor([-1])}, "sequence"),
        (
            {"layout": string_array(json.dumps({"part": "entry", "sub_graph_num": MAX_PARTS + 1}))},
            "sub_graph_num",
        ),
        ({"base": torch.tensor([1])}, "base"),
    ],
)
def test_answers_that_make_no_sense_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        Position.read(answer(**changes))


# ---- discovery


def test_a_server_that_comes_back_is_sent_no_number_twice(
    online: Online, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender was closed meanwhile; a late message of that sender must not count as a new one."""
    monkeypatch.setattr("megalith.serving.sync.publisher.MISSING_SECONDS", -1.0)
    replica = online.replica()
    discovery = StaticDiscovery([])
    publisher = online.publisher(discovery)
    for _ in range(2):
        discovery.register(SERVICE, Found(replica.address))
        online.trainer.step()
        assert publisher.flush(LIMIT), publisher.report()
        discovery.unregister(SERVICE, replica.address)
        publisher.publish()
        assert publisher.report() == []

    numbers = [
        int(metadata["megalith-sequence"])
        for _, _, _, metadata in replica.server.requests
        if "megalith-sequence" in metadata
    ]
    assert len(numbers) == len(set(numbers))  # two may be in flight, so they may arrive in another order
    assert_equal(replica.servable, online.model)


class Broken(SyncBackend):
    """A user's backend with its own errors."""

    def subscribe_model(self, model_name: str) -> None:
        pass

    def get_sync_targets(self, sub_graph: str) -> SyncTargets:
        raise RuntimeError("the connection is gone")


def test_a_backend_that_fails_does_not_disturb_training(online: Online) -> None:
    with Publisher(
        online.model, Broken(), model_name="movies", interval=HOUR, protocol="monolith"
    ) as publisher:
        assert publisher.publish() == 1


# ---- the trainer's own


def test_dense_weights_that_become_others_are_copied_again() -> None:
    model = make_model()
    source = ParameterSource(model)
    assert source.copy_dense() is not None
    assert source.copy_dense() is None

    model.extra = torch.nn.Linear(2, 2)
    assert "extra.weight" in (source.copy_dense() or {})
    model.extra.double()
    assert (source.copy_dense() or {})["extra.weight"].dtype == torch.float64
    del model.extra
    assert "extra.weight" not in (source.copy_dense() or {"extra.weight": None})


def test_an_older_interval_does_not_take_back_a_newer_one(online: Online) -> None:
    publisher = online.publisher([online.replica()])
    assert publisher.flush(LIMIT)
    (sender,) = publisher._senders.values()

    sender._complete(Interval(0, 1.0))

    assert sender.acknowledged == 1
    assert publisher.report()[0].complete == publisher.interval.time


def test_the_journal_is_compacted_when_nothing_is_sent(online: Online) -> None:
    replica = online.replica()
    publisher = online.publisher([replica], max_journal=30_000)
    assert publisher.flush(LIMIT)
    replica.server.before = gate = Gate()
    gate.open.clear()

    for _ in range(5):
        online.model.embeddings.shards.assign({"user": (torch.arange(4000), torch.rand(4000, 5))})
        publisher.publish()
    assert len(publisher.journal) == 20_000
    gate.open.set()

    with publisher.lock:
        assert publisher.lock.wait_for(lambda: len(publisher.journal) == 4000, LIMIT)
    assert publisher.flush(LIMIT)
    assert_equal(replica.servable, online.model, 4000)


# ---- everything at once


class World:
    """A trainer and two servers, of which any may start over, and a network that keeps copies."""

    def __init__(self, start: Path, folder: Path, stack: ExitStack) -> None:
        self._start, self._folder, self._stack = start, folder, stack
        self._random, self._lock = random.Random(1), threading.Lock()
        self.replicas = [Replica(start, stack) for _ in range(2)]
        self._tip = (start / "tip").read_text()
        self._saved = start / "checkpoint"
        self._versions = [start / "export" / "1"]
        self.model, self.publisher = self._train(load_start(start))

    def _train(self, model: Model) -> tuple[Model, Publisher]:
        self._trainer = Trainer(model, seed=self._random.randrange(1000))
        self._discovery = StaticDiscovery([each.address for each in self.replicas])
        options = {"base": self._tip, "max_backlog": 300, "timeout": 2.0}
        return model, publisher_of(model, self._discovery, self._stack, self._start, **options)

    def happens(self, event: str) -> None:
        replica = self._random.choice(self.replicas)
        if event == "steps":
            self._trainer.step(3)
            self.publisher.publish()
        elif event == "save":
            self._saved = self._folder / f"save{len(list(self._folder.iterdir()))}"
            self._tip = checkpoint.save(self.model, self._saved).tip
            self.publisher.checkpoint_taken(self._tip)
        elif event == "version":
            self.happens("save")
            number = len(self._versions) + 1
            export_version(self.model, self._folder / "export", base=self._tip, version=number)
            self._versions.append(self._folder / "export" / str(number))
            replica.subscriber.move_to(Servable(self._versions[-1]))
        elif event == "another version":
            replica.subscriber.move_to(Servable(self._random.choice(self._versions)))
        elif event == "server restarts":
            replica.restart()
        elif event == "trainer restarts":
            self.publisher.close()
            model = make_model()
            checkpoint.load(model, self._saved)
            self.model, self.publisher = self._train(model)
        elif event == "flap":
            for each in self.replicas:
                self._discovery.unregister(SERVICE, each.address)
                self._discovery.register(SERVICE, Found(each.address))
        elif event == "lossy":
            replica.server.after = lambda *_: self._lose(replica)
        elif event == "late":
            self._repeat(replica)

    def _lose(self, replica: Replica) -> None:
        """Delivers some older message once more, then loses the answer to this one."""
        with self._lock:
            if self._random.random() < 0.3:
                self._repeat(replica)
            if self._random.random() < 0.3:
                raise TimeoutError("lost")

    def _repeat(self, replica: Replica) -> None:
        if replica.server.requests:
            _, signature, inputs, metadata = self._random.choice(replica.server.requests)
            with suppress(SequenceError, InputError):
                replica.subscriber.handle(signature, inputs, metadata)


EVENTS = [
    *("steps", "steps", "save", "another version", "server restarts", "trainer restarts"),
    *("flap", "lossy", "lossy", "late", "version"),
]


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(EVENTS), min_size=4, max_size=10))
def test_whatever_happens_both_servers_end_with_the_trainers_rows(
    start: Path, tmp_path_factory: pytest.TempPathFactory, events: list[str]
) -> None:
    with ExitStack() as stack:
        world = World(start, tmp_path_factory.mktemp("world"), stack)
        for event in events:
            world.happens(event)
        world.happens("steps")

        assert world.publisher.flush(LIMIT), world.publisher.report()

        for replica in world.replicas:
            assert_equal(replica.subscriber.servable, world.model)


# ---- targets that hang, lag and move


def test_a_target_that_hangs_delays_no_other(online: Online) -> None:
    replicas = [online.replica(), online.replica()]
    gate = online.hold(replicas[0])
    publisher = online.publisher(replicas, timeout=0.5)
    assert gate.reached.wait(LIMIT)

    for _ in range(3):
        online.trainer.step()
        number = publisher.publish()
    with publisher.lock:
        done = publisher.lock.wait_for(lambda: len(publisher._lagging(number)) == 1, LIMIT)
    assert done
    assert_equal(replicas[1].servable, online.model)

    gate.open.set()
    assert publisher.flush(LIMIT), publisher.report()
    assert_equal(replicas[0].servable, online.model)


def test_closing_does_not_wait_for_a_target_that_hangs(online: Online) -> None:
    replica = online.replica()
    gate = online.hold(replica)
    publisher = online.publisher([replica], timeout=HOUR)
    assert gate.reached.wait(LIMIT)

    publisher.close()

    assert not [thread for thread in threading.enumerate() if thread.name.startswith("megalith push")]
    publisher.close()
    with pytest.raises(UsageError, match="closed"):
        publisher.publish()


def test_a_backlog_that_overflows_starts_over(online: Online) -> None:
    replica = online.replica()
    publisher = online.publisher([replica], max_backlog=50, timeout=0.5)
    assert publisher.flush(LIMIT)
    gate = online.hold(replica)
    online.trainer.step()
    publisher.publish()
    assert gate.reached.wait(LIMIT)
    for _ in range(5):
        online.trainer.step(3)
        publisher.publish()
    assert all(report.backlog <= 50 for report in publisher.report())

    gate.open.set()

    online.assert_arrives(publisher, replica)
    assert replica.subscriber.counters.begun > 1


def test_a_save_that_the_journal_has_dropped_needs_all_rows(online: Online) -> None:
    replica = online.replica()
    publisher = online.publisher([replica], max_journal=10)
    online.trainer.step(3)
    publisher.publish()
    replica.restart()

    online.assert_arrives(publisher, replica)
    assert replica.subscriber.counters.replacements == 1


def test_a_server_reloads_the_checkpoint_where_the_journal_starts_there(
    online: Online, tmp_path: Path
) -> None:
    online.trainer.step(3)
    save = checkpoint.save(online.model, tmp_path)
    replica = online.replica(checkpoint=tmp_path)
    publisher = online.publisher([replica], base=save.tip)
    online.trainer.step(1)

    online.assert_arrives(publisher, replica)
    assert (replica.subscriber.counters.reloads, replica.subscriber.counters.replacements) == (1, 0)
    assert replica.subscriber.counters.rows <= 64


def test_a_new_version_in_the_middle(online: Online, tmp_path: Path) -> None:
    replica = online.replica()
    publisher = online.publisher([replica])
    online.trainer.step(2)
    assert publisher.flush(LIMIT)
    save = checkpoint.save(online.model, tmp_path / "checkpoint")
    publisher.checkpoint_taken(save.tip)
    online.trainer.step(2)
    (newer,) = export_version(online.model, tmp_path / "export", base=save.tip, version=2)

    replica.subscriber.move_to(newer)
    online.trainer.step(1)

    online.assert_arrives(publisher, newer)
    assert replica.subscriber.counters.begun == 1
