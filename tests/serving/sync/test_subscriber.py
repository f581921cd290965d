"""The subscriber: each message once, in order, or not at all; sessions, saves, versions and parts."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith import checkpoint
from megalith.errors import InputError, SequenceError
from megalith.models import Model
from megalith.serving.export.servable import Servable
from megalith.serving.sync.protocol import MessageHeader, Position, string_array
from megalith.serving.sync.subscriber import Subscriber
from tests.serving.sync.subscriber_calls import OTHER, begin, first, header, push, user
from tests.serving.sync_support import LIMIT, SESSION, Trainer, assert_equal, export_version, make_model

# ---- order


@pytest.mark.parametrize(
    ("sequence", "options"),
    [(4, {}), (3, {}), (2, {"session": OTHER}), (2, {"index": 1, "count": 2}), (0, {})],
    ids=["a gap", "one is missing", "another session", "another publisher", "no sequence"],
)
def test_what_does_not_follow_is_refused_and_changes_nothing(
    served: Servable, subscriber: Subscriber, sequence: int, options: dict[str, Any]
) -> None:
    with pytest.raises(SequenceError):
        push(subscriber, user(1, value=9.0), sequence, **options)

    assert len(served.overlay) == 0
    push(subscriber, user(1, value=1.0), 2)
    assert first(served, 1) == 1.0


def test_a_message_that_overtook_the_one_before_it_waits_for_that(
    served: Servable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalith.serving.sync.subscriber.EARLY_SECONDS", LIMIT)
    subscriber = Subscriber(served)
    begin(subscriber)
    early = threading.Thread(target=push, args=(subscriber, user(1, value=3.0), 3))
    early.start()

    push(subscriber, user(1, value=2.0), 2)

    early.join(LIMIT)
    assert first(served, 1) == 3.0
    assert subscriber.counters.refused == 0


def test_nothing_is_applied_before_a_session_has_begun(served: Servable) -> None:
    with pytest.raises(SequenceError, match="has no session"):
        push(Subscriber(served), user(1, value=9.0), 1)


def test_a_message_with_one_wrong_input_changes_nothing_and_may_come_again_right(
    served: Servable, subscriber: Subscriber
) -> None:
    wrong = {**user(1, value=5.0), "item_id": torch.tensor([1]), "item_value": torch.full((1, 5), torch.nan)}

    with pytest.raises(InputError, match="NaN or Inf"):
        push(subscriber, wrong, 2)

    assert len(served.overlay) == 0
    push(subscriber, user(1, value=1.0), 2)
    assert first(served, 1) == 1.0


def test_a_monolith_client_has_no_sequence(served: Servable) -> None:
    subscriber = Subscriber(served)

    subscriber.handle("hashtable_assign", user(1, value=3.0), {})
    subscriber.handle(
        "multi/raw_assign",
        {"id": torch.tensor([7]), "id_split": torch.tensor([0, 0, 1]), "flat_value": torch.full((5,), 4.0)},
        {},
    )

    assert (first(served, 1), first(served, 7)) == (3.0, 4.0)


def test_dense_weights_of_several_messages_change_together(served: Servable, subscriber: Subscriber) -> None:
    before = served.dense_weights
    a, b, *_ = before

    push(subscriber, {f"dense:{a}": torch.ones_like(before[a])}, 2)
    assert torch.equal(served.dense_weights[a], before[a])
    push(subscriber, {f"dense:{b}": torch.ones_like(before[b])}, 3, complete=1.0)

    assert torch.equal(served.dense_weights[a], torch.ones_like(before[a]))
    assert torch.equal(served.dense_weights[b], torch.ones_like(before[b]))


def part(name: str, begin: Any, values: Any) -> dict[str, Any]:
    return {f"dense_part:{name}": values, f"dense_begin:{name}": torch.tensor([begin])}


def test_a_dense_weight_in_parts_is_used_whole(served: Servable, subscriber: Subscriber) -> None:
    before = served.dense_weights
    a = max(before, key=lambda name: before[name].numel())
    n = before[a].numel()
    new = torch.arange(float(n))
    parts = [(at, new[at : at + 10]) for at in range(0, n, 10)]

    for number, (at, values) in enumerate(parts[:-1]):
        push(subscriber, part(a, at, values), 2 + number)
        push(subscriber, part(a, at, values), 2 + number)  # again: an acknowledgement was lost
    last = 1 + len(parts)
    with pytest.raises(InputError, match="before its last part"):
        push(subscriber, user(1, value=7.0), last, complete=1.0)
    assert torch.equal(served.dense_weights[a], before[a])
    push(subscriber, part(a, *parts[-1]), last)
    assert torch.equal(served.dense_weights[a], before[a])
    push(subscriber, {}, last + 1, complete=1.0)

    assert torch.equal(served.dense_weights[a], new.view_as(before[a]))
    assert first(served, 1) != 7.0
    push(subscriber, part(a, 0, new), last + 2, complete=2.0)  # one part can be all
    assert torch.equal(served.dense_weights[a], new.view_as(before[a]))


def test_a_weight_starts_again_at_its_first_part(served: Servable, subscriber: Subscriber) -> None:
    before = served.dense_weights
    a = max(before, key=lambda name: before[name].numel())
    n = before[a].numel()
    push(subscriber, part(a, 0, torch.full((5,), 9.0)), 2)
    begin(subscriber, sequence=3)  # the sender starts over
    push(subscriber, part(a, 0, torch.zeros(n - 1)), 4)
    push(subscriber, part(a, n - 1, torch.zeros(1)), 5, complete=1.0)
    assert not served.dense_weights[a].any()


@pytest.mark.parametrize(
    "wrong",
    [
        (0, torch.zeros(10**6)),  # more than the weight has
        (3, torch.zeros(2)),  # a gap
        (2**62, torch.zeros(1)),
        (-1, torch.zeros(2)),
        (0, torch.zeros(2, dtype=torch.float64)),
        (0, torch.tensor([float("nan")])),
        (0, torch.zeros(0)),
        (0, torch.zeros(2, 2)),
        (0, None),
        (0, string_array("text")),
    ],
    ids=range(10),
)
def test_parts_that_do_not_fit_are_refused_and_change_nothing(
    served: Servable, subscriber: Subscriber, wrong: Any
) -> None:
    before = served.dense_weights
    a = max(before, key=lambda name: before[name].numel())
    inputs = {name: each for name, each in part(a, *wrong).items() if each is not None}
    with pytest.raises(InputError, match="dense"):
        push(subscriber, user(1, value=7.0) | inputs, 2)
    with pytest.raises(InputError, match="session"):  # a Monolith client
        subscriber.handle("hashtable_assign", part(a, 0, torch.zeros(1)), {})
    assert first(served, 1) != 7.0
    push(subscriber, part(a, 0, torch.zeros(before[a].numel())), 2, complete=1.0)
    assert not served.dense_weights[a].any()


def test_a_replacement_ends_after_the_last_part_only(served: Servable) -> None:
    subscriber = Subscriber(served)
    before = served.dense_weights
    a = max(before, key=lambda name: before[name].numel())
    begin(subscriber, "")
    push(subscriber, part(a, 0, torch.ones(5)), 2)
    with pytest.raises(InputError, match="before its last part"):
        subscriber.handle("sync_end", {}, header(3, complete=1.0))
    push(subscriber, part(a, 5, torch.ones(before[a].numel() - 5)), 3)
    subscriber.handle("sync_end", {}, header(4, complete=1.0))
    assert torch.equal(served.dense_weights[a], torch.ones_like(before[a]))


def test_dense_weights_of_one_publisher_do_not_change_with_the_interval_of_another(served: Servable) -> None:
    subscriber = Subscriber(served)
    for index in (0, 1):
        begin(subscriber, index=index, count=2)
    before = served.dense_weights
    a = next(iter(before))

    push(subscriber, {f"dense:{a}": torch.ones_like(before[a])}, 2, count=2)
    push(subscriber, {}, 2, index=1, count=2, complete=1.0)
    assert torch.equal(served.dense_weights[a], before[a])
    push(subscriber, {}, 3, count=2, complete=1.0)

    assert torch.equal(served.dense_weights[a], torch.ones_like(before[a]))


def test_staleness_is_known_once_all_publishers_have_completed(served: Servable) -> None:
    subscriber = Subscriber(served)
    for index in (0, 1):
        begin(subscriber, index=index, count=2)
    push(subscriber, {}, 2, index=0, count=2, complete=5.0)
    assert subscriber.staleness() is None

    push(subscriber, {}, 2, index=1, count=2, complete=7.0)

    age = subscriber.staleness()
    assert age is not None
    assert age > 1e9  # since second 5 of 1970, not 7


def test_staleness_is_told_while_a_message_is_applied(subscriber: Subscriber) -> None:
    push(subscriber, {}, 2, complete=5.0)
    staleness: list[float | None] = []
    asking = threading.Thread(target=lambda: staleness.append(subscriber.staleness()), daemon=True)
    with subscriber._lock:
        asking.start()
        asking.join(LIMIT)
        assert len(staleness) == 1


# ---- faults of the network


@pytest.mark.parametrize("seed", range(20))
def test_messages_that_come_twice_late_and_out_of_order_are_applied_in_order(
    served: Servable, seed: int
) -> None:
    """A sender that waits for each acknowledgement, a network that keeps copies and delivers them later."""
    chance = random.Random(seed)
    subscriber = Subscriber(served)
    applied: list[float] = []
    held: list[tuple[str, dict[str, Any], dict[str, str]]] = []
    sequence = itertools.count(1)

    def deliver(signature: str, inputs: dict[str, Any], metadata: dict[str, str]) -> None:
        before = first(served, 1)
        subscriber.handle(signature, inputs, metadata)
        if first(served, 1) != before:
            applied.append(first(served, 1))

    def send(signature: str, inputs: dict[str, Any]) -> None:
        message = (signature, inputs, header(next(sequence)))
        held.append(message)
        for late in chance.sample(held, min(len(held), chance.randrange(3))):
            try:
                deliver(*late)
            except SequenceError:
                continue
        deliver(*message)

    send("sync_begin", {"base": string_array("one")})
    for value in range(1, 20):
        if chance.random() < 0.1:
            send("sync_begin", {"base": string_array("one")})
        send("hashtable_assign", user(1, value=float(value)))

    assert applied == [float(value) for value in range(1, 20)]


# ---- positions and bases


def test_the_position_tells_session_base_sequence_and_layout(served: Servable) -> None:
    subscriber = Subscriber(served)
    fresh = Position.read(subscriber.handle("sync_position", {}, header()))
    assert (fresh.session, fresh.base, fresh.sequence) == ("", "one", 0)
    assert fresh.layout.part == "standalone"
    assert fresh.layout.tables["user"].dim == 5
    assert fresh.layout.dense == set(served.dense_names)

    begin(subscriber, sequence=7)
    push(subscriber, user(1, value=1.0), 8)

    here = Position.read(subscriber.handle("sync_position", {}, header()))
    assert (here.session, here.sequence) == (SESSION, 8)
    assert Position.read(subscriber.handle("sync_position", {}, header(session=OTHER))).sequence == 0
    assert Position.read(subscriber.handle("sync_position", {}, {})).sequence == 0


def test_another_session_begins_from_the_exported_rows(served: Servable, subscriber: Subscriber) -> None:
    push(subscriber, user(1, value=1.0), 2)

    begin(subscriber, session=OTHER)

    assert len(served.overlay) == 0
    with pytest.raises(SequenceError):
        push(subscriber, user(1, value=1.0), 3)


def test_an_older_session_is_refused_whatever_it_sends(served: Servable) -> None:
    """A rank of a killed run, or a second trainer, must not overwrite what the newest session pushes."""
    subscriber = Subscriber(served)
    begin(subscriber, number=7)
    push(subscriber, user(1, value=1.0), 2, number=7)
    begin(subscriber, session=OTHER, number=8)
    push(subscriber, user(1, value=2.0), 2, session=OTHER, number=8)

    for number in (7, 0):
        for signature in ("sync_begin", "sync_reload", "sync_end", "hashtable_assign"):
            with pytest.raises(SequenceError, match=r"a newer training session pushes .*: number 8"):
                subscriber.handle(signature, {"base": string_array("")}, header(3, number=number))
    assert Position.read(subscriber.handle("sync_position", {}, header(number=7))).session == OTHER
    assert first(served, 1) == 2.0
    counts = subscriber.counters
    assert (counts.sessions, counts.replaced_sessions, counts.old_sessions) == (2, 1, 8)


def test_a_session_that_began_during_a_wait_makes_the_waiting_one_older(
    served: Servable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalith.serving.sync.subscriber.EARLY_SECONDS", LIMIT)
    subscriber = Subscriber(served)
    begin(subscriber, number=7)
    waits = threading.Event()
    is_early = subscriber._is_early

    def reports(header: MessageHeader) -> bool:
        waits.set()
        return is_early(header)

    monkeypatch.setattr(subscriber, "_is_early", reports)
    errors: list[str] = []

    def begin_again() -> None:
        try:
            begin(subscriber, sequence=3, number=7)  # message 2 is missing, so it waits
        except SequenceError as error:
            errors.append(str(error))

    late = threading.Thread(target=begin_again)
    late.start()
    assert waits.wait(LIMIT)
    begin(subscriber, session=OTHER, number=8)
    late.join(LIMIT)
    assert len(errors) == 1
    assert "a newer training session pushes" in errors[0]
    assert Position.read(subscriber.handle("sync_position", {}, header())).session == OTHER


def test_the_number_of_a_session_outlives_its_rows(served: Servable, exported: tuple[Model, Path]) -> None:
    subscriber = Subscriber(served)
    begin(subscriber, number=8)
    subscriber.move_to(Servable(exported[1] / "1"))
    with pytest.raises(SequenceError, match="a newer training session"):
        begin(subscriber, session=OTHER, number=7)
    begin(subscriber, session=OTHER, number=9)


def test_a_write_without_a_session_is_refused_while_one_is_followed(served: Servable) -> None:
    subscriber = Subscriber(served)
    subscriber.handle("hashtable_assign", user(1, value=1.0), {})
    begin(subscriber)
    with pytest.raises(SequenceError, match="a training session pushes to this model"):
        subscriber.handle("hashtable_assign", user(1, value=3.0), {})
    assert subscriber.counters.refused == 1


def test_starting_over_in_a_session_keeps_what_others_of_it_pushed(served: Servable) -> None:
    subscriber = Subscriber(served)
    for index in (0, 1):
        begin(subscriber, index=index, count=2)
        push(subscriber, user(index, value=1.0), 2, index=index, count=2)

    begin(subscriber, sequence=5, index=0, count=2)

    assert (first(served, 0), first(served, 1)) == (1.0, 1.0)
    push(subscriber, user(1, value=2.0), 3, index=1, count=2)
    push(subscriber, user(0, value=2.0), 6, index=0, count=2)
    assert (first(served, 0), first(served, 1)) == (2.0, 2.0)


def test_a_beginning_on_another_base_is_refused(served: Servable) -> None:
    with pytest.raises(SequenceError, match="the base is 'one', not 'zero'"):
        begin(Subscriber(served), "zero")


@pytest.mark.parametrize(
    "metadata",
    [
        {"megalith-session": "x"},
        {"megalith-session": SESSION, "megalith-publisher": "2/2"},
        {"megalith-session": SESSION, "megalith-publisher": "a"},
        {"megalith-session": SESSION, "megalith-sequence": "-1"},
        {"megalith-session": SESSION, "megalith-sequence": "9" * 30},
        {"megalith-session": SESSION, "megalith-complete": "nan"},
        {"megalith-session": SESSION, "megalith-complete": "soon"},
    ],
)
@pytest.mark.parametrize("signature", ["hashtable_assign", "sync_position", "sync_begin", "sync_end"])
def test_metadata_that_make_no_sense_are_refused(
    served: Servable, metadata: dict[str, str], signature: str
) -> None:
    with pytest.raises(InputError):
        Subscriber(served).handle(signature, {}, metadata)


def test_controls_need_a_session_and_a_known_name(served: Servable) -> None:
    subscriber = Subscriber(served)
    for signature in ("sync_begin", "sync_end", "serving_default"):
        with pytest.raises(InputError):
            subscriber.handle(signature, {"base": string_array("")}, {})
    with pytest.raises(InputError, match="'base' must be one string"):
        subscriber.handle("sync_begin", {}, header(1))


# ---- replacing everything


def test_a_replacement_shows_when_it_is_complete_and_not_before(served: Servable) -> None:
    subscriber = Subscriber(served)
    old = served.lookup("user", torch.arange(500))
    begin(subscriber, "")
    push(subscriber, user(1, 2, value=1.0), 2)
    push(subscriber, {"user:removed": torch.tensor([2])}, 3)
    assert torch.equal(served.lookup("user", torch.arange(500)), old)

    subscriber.handle("sync_end", {}, header(4, complete=1.0))

    rows = served.lookup("user", torch.arange(500))
    assert rows[1, 0] == 1.0
    assert rows.abs().sum() == 5.0
    assert subscriber.counters.replacements == 1


def test_many_publishers_replace_together(served: Servable) -> None:
    subscriber = Subscriber(served)
    begin(subscriber, index=0, count=2)  # it knows the base, the other does not
    push(subscriber, user(0, value=1.0), 2, index=0, count=2)
    begin(subscriber, "", index=1, count=2)
    with pytest.raises(SequenceError):
        push(subscriber, user(0, value=2.0), 3, index=0, count=2)
    asked = subscriber.handle("sync_position", {}, header(index=0, count=2))
    assert Position.read(asked).base == ""
    with pytest.raises(SequenceError, match="being replaced"):
        begin(subscriber, "one", sequence=4, index=0, count=2)
    begin(subscriber, "", sequence=4, index=0, count=2)
    push(subscriber, user(1, value=1.0), 2, index=1, count=2)
    push(subscriber, user(0, value=3.0), 5, index=0, count=2)

    subscriber.handle("sync_end", {}, header(3, index=1, count=2))
    push(
        subscriber, user(1, value=4.0), 4, index=1, count=2
    )  # it continues while the other is still replacing
    subscriber.handle("sync_end", {}, header(6, index=0, count=2))

    rows = served.lookup("user", torch.arange(500))
    assert (rows[0, 0], rows[1, 0], rows.sum()) == (3.0, 4.0, 35.0)


def test_who_replaces_a_second_time_leaves_nothing_of_the_first(served: Servable) -> None:
    subscriber = Subscriber(served)
    begin(subscriber, "")
    push(subscriber, user(1, value=1.0), 2)
    begin(subscriber, "", sequence=3)
    push(subscriber, user(2, value=1.0), 4)
    subscriber.handle("sync_end", {}, header(5))

    assert (first(served, 1), first(served, 2)) == (0.0, 1.0)


def test_an_end_without_a_beginning_is_refused(subscriber: Subscriber) -> None:
    with pytest.raises(SequenceError, match="nothing is being replaced"):
        subscriber.handle("sync_end", {}, header(2))


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
