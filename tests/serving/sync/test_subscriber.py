"""The subscriber: each message once, in order, or not at all."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.errors import InputError, SequenceError
from megalith.models import Model
from megalith.serving.export.servable import Servable
from megalith.serving.sync.protocol import string_array
from megalith.serving.sync.subscriber import Subscriber
from tests.serving.sync.subscriber_calls import OTHER, begin, first, header, push, user
from tests.serving.sync_support import LIMIT

# ---- order


def test_messages_are_applied_in_their_order_and_each_once(served: Servable, subscriber: Subscriber) -> None:
    outputs = push(subscriber, user(1, 2, value=1.0), 2)
    assert outputs["user_result"].tolist() == [2]
    push(subscriber, user(1, value=2.0), 3)
    push(subscriber, user(1, 2, value=1.0), 2)  # again: an acknowledgement was lost

    assert (first(served, 1), first(served, 2)) == (2.0, 1.0)
    assert subscriber.counters.duplicates == 1


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


def test_removed_ids_have_no_row(
    exported: tuple[Model, Path], served: Servable, subscriber: Subscriber
) -> None:
    id = next(iter(exported[0].embeddings.shards.scan("user"))).ids[:1]
    assert served.lookup("user", id).abs().sum() > 0

    push(subscriber, {"user:removed": id}, 2)

    assert served.lookup("user", id).abs().sum() == 0


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
