"""The subscriber: saves of the checkpoint, versions and parts of the model."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from megalith import checkpoint
from megalith.errors import InputError, SequenceError
from megalith.models import Model
from megalith.serving.export.servable import Servable
from megalith.serving.sync.protocol import Position
from megalith.serving.sync.subscriber import Subscriber
from tests.serving.sync.subscriber_calls import OTHER, begin, first, header, push, user
from tests.serving.sync_support import LIMIT, Trainer, assert_equal, export_version, make_model

# ---- the checkpoint


@pytest.fixture
def run(tmp_path: Path) -> tuple[Model, Trainer, Path]:
    model = make_model()
    return model, Trainer(model), tmp_path / "run"


def reload(subscriber: Subscriber) -> Position:
    return Position.read(subscriber.handle("sync_reload", {}, header()))


def test_deltas_behind_the_base_are_enough_to_catch_up(run: tuple[Model, Trainer, Path]) -> None:
    model, trainer, path = run
    trainer.step(5)
    saved = checkpoint.save(model, path / "checkpoint")
    (servable,) = export_version(model, path / "export", base=saved.tip)
    trainer.step(3)
    checkpoint.save_delta(model, path / "checkpoint")
    trainer.step(3)
    tip = checkpoint.save_delta(model, path / "checkpoint").tip
    subscriber = Subscriber(servable, checkpoint=path)

    assert reload(subscriber).base == tip

    assert not servable.overlay.hides_base
    assert_equal(servable, model)


def test_all_rows_are_read_where_the_base_is_not_in_the_chain(run: tuple[Model, Trainer, Path]) -> None:
    model, trainer, path = run
    trainer.step(5)
    (servable,) = export_version(model, path / "export", base="unknown")
    trainer.step(3)
    checkpoint.save(model, path / "checkpoint")
    trainer.step(3)
    tip = checkpoint.save_delta(model, path / "checkpoint").tip
    subscriber = Subscriber(servable, checkpoint=path / "checkpoint")
    begin(subscriber, "unknown")
    push(subscriber, user(1, value=9.0), 2)

    assert reload(subscriber).base == tip
    assert reload(subscriber).base == tip  # again: nothing to do

    assert subscriber.counters.reloads == 1
    assert_equal(servable, model)
    with pytest.raises(SequenceError):
        push(subscriber, user(1, value=9.0), 3)
    begin(subscriber, tip, sequence=4)
    push(subscriber, user(1, value=9.0), 5)
    begin(subscriber, tip, session=OTHER)  # back to the rows of the checkpoint, not of the export
    assert_equal(servable, model)


@pytest.mark.parametrize("there", ["nothing", "damaged", "another model"])
def test_a_checkpoint_that_cannot_be_read_leaves_everything(
    served: Servable, tmp_path: Path, there: str
) -> None:
    if there == "damaged":
        (tmp_path / "manifest.json").write_text("{}")
    if there == "another model":
        checkpoint.save(make_model(tables={"user": "people"}), tmp_path)
    subscriber = Subscriber(served, checkpoint=tmp_path)
    begin(subscriber)
    push(subscriber, user(1, value=1.0), 2)

    assert reload(subscriber).base == "one"

    assert first(served, 1) == 1.0
    push(subscriber, user(1, value=2.0), 3)


def test_without_a_checkpoint_a_reload_does_nothing(served: Servable) -> None:
    assert reload(Subscriber(served)).base == "one"


def test_a_reload_that_comes_late_undoes_nothing(run: tuple[Model, Trainer, Path]) -> None:
    model, trainer, folder = run
    (servable,) = export_version(model, folder / "late", base="one")
    trainer.step()
    checkpoint.save(model, folder / "checkpoint")
    subscriber = Subscriber(servable, checkpoint=folder / "checkpoint")
    begin(subscriber, sequence=2)
    push(subscriber, user(1, value=7.0), 3)

    subscriber.handle("sync_reload", {}, header(1))

    assert first(servable, 1) == 7.0
    assert subscriber.counters.reloads == 0


# ---- versions


def test_a_new_version_inherits_rows_weights_and_position(
    exported: tuple[Model, Path], served: Servable, subscriber: Subscriber
) -> None:
    name = next(iter(served.dense_names))
    weight = torch.ones(served.dense_names[name])
    push(subscriber, {**user(1, value=1.0), f"dense:{name}": weight}, 2, complete=1.0)
    newer = Servable(exported[1] / "2")

    subscriber.move_to(newer)

    assert first(newer, 1) == 1.0
    assert torch.equal(newer.dense_weights[name], weight)
    outputs = push(subscriber, user(1, value=2.0), 3)
    assert first(newer, 1) == 2.0
    assert outputs["base"].tolist() == [b"two"]
    subscriber.close()


def test_an_older_version_that_is_still_served_gets_pushes_too(
    exported: tuple[Model, Path], served: Servable
) -> None:
    newer = Servable(exported[1] / "1")
    subscriber = Subscriber(newer)
    subscriber.set_older([served, newer])
    begin(subscriber)
    push(subscriber, user(1, value=4.0), 2)
    assert (first(newer, 1), first(served, 1)) == (4.0, 4.0)
    subscriber.set_older([])
    push(subscriber, user(1, value=5.0), 3)
    assert (first(newer, 1), first(served, 1)) == (5.0, 4.0)


def test_starting_over_after_a_new_version_drops_what_may_be_older_than_it(
    exported: tuple[Model, Path], subscriber: Subscriber
) -> None:
    push(subscriber, user(1, value=1.0), 2)
    newer = Servable(exported[1] / "2")
    subscriber.move_to(newer)

    begin(subscriber, "two", sequence=3)

    assert len(newer.overlay) == 0
    subscriber.close()


def test_rows_of_a_trainer_that_is_gone_are_dropped_after_a_while(
    exported: tuple[Model, Path], served: Servable, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscriber = Subscriber(served, carry_seconds=0.01)
    begin(subscriber)
    push(subscriber, user(1, value=1.0), 2)
    newer = Servable(exported[1] / "2")
    reset, dropped = newer.reset, threading.Event()
    monkeypatch.setattr(newer, "reset", lambda: (reset(), dropped.set()))

    subscriber.move_to(newer)

    assert dropped.wait(LIMIT)
    with pytest.raises(SequenceError):
        push(subscriber, user(1, value=2.0), 3)
    assert len(newer.overlay) == 0
    assert subscriber.counters.dropped == 1


def test_rows_of_other_tables_are_not_carried(subscriber: Subscriber, tmp_path: Path) -> None:
    (other,) = export_version(make_model(tables={"user": "people"}), tmp_path, base="three")
    push(subscriber, user(1, value=1.0), 2)

    subscriber.move_to(other)

    assert Position.read(subscriber.handle("sync_position", {}, header())).session == ""


@pytest.mark.parametrize("step", [1, -1])
def test_an_older_version_starts_from_its_own_rows(
    exported: tuple[Model, Path], served: Servable, subscriber: Subscriber, step: int
) -> None:
    """Also one that was followed before, in whose rows that session's are still to be found."""
    newer = Servable(exported[1] / "2")
    push(subscriber, user(1, value=1.0), 2)
    own = first(newer, 1)
    subscriber.move_to(newer)
    if step < 0:
        begin(subscriber, "two", session=OTHER)  # nothing is pushed when it goes back
    else:
        push(subscriber, user(2, value=2.0), 3)

    subscriber.move_to(served)

    assert first(served, 1) == own
    assert Position.read(subscriber.handle("sync_position", {}, header())).session == ""
    subscriber.close()


def test_a_version_with_other_parts_starts_over(tmp_path: Path) -> None:
    """Its publisher would otherwise continue to send the ids of the old part."""
    model = make_model()
    two = export_version(model, tmp_path, base="one", num_shards=2)
    three = export_version(model, tmp_path, base="two", num_shards=3, version=2)
    subscriber = Subscriber(two[1])
    begin(subscriber)
    push(subscriber, user(6, value=1.0), 2)

    subscriber.move_to(three[1])

    with pytest.raises(SequenceError):
        push(subscriber, user(6, value=2.0), 3)


# ---- parts


def test_a_part_takes_what_is_its_own(tmp_path: Path) -> None:
    model = make_model()
    entry, ps_0, ps_1 = export_version(model, tmp_path, base="one", num_shards=2)
    for servable in (entry, ps_0, ps_1):
        begin(Subscriber(servable))
    subscriber = Subscriber(ps_1)
    begin(subscriber)

    push(subscriber, user(1, 3, value=1.0), 2)
    with pytest.raises(InputError, match="id 2 belongs to another part than ps_1"):
        push(subscriber, user(3, 2, value=1.0), 3)
    with pytest.raises(InputError, match="unknown input 'user_id'"):
        Subscriber(entry).handle("hashtable_assign", user(1, value=1.0), {})
