"""The subscriber: sessions, their bases and the replacement of all rows."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from megalith.errors import InputError, SequenceError
from megalith.models import Model
from megalith.serving.export.servable import Servable
from megalith.serving.sync.protocol import MessageHeader, Position, string_array
from megalith.serving.sync.subscriber import Subscriber
from tests.serving.sync.subscriber_calls import OTHER, begin, first, header, push, user
from tests.serving.sync_support import LIMIT, SESSION

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
