"""Journal and backlog: which ids have to be sent to a target, within bounds."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith.serving.sync.changed_ids import MAX_EPOCHS, Backlog, IdSets, Interval, Journal


def ids(*values: int, table: str = "user") -> dict[str, Tensor]:
    return {table: torch.tensor(values, dtype=torch.int64)}


def plain(found: dict[str, Tensor] | None) -> dict[str, list[int]] | None:
    return None if found is None else {name: sorted(set(x.tolist())) for name, x in found.items()}


# ---- sets


def test_ids_are_kept_once_and_take_no_more_than_about_twice_their_room() -> None:
    sets = IdSets()
    for _ in range(100):
        sets.add({"user": torch.arange(10_000)})
        assert len(sets) <= 2 * 10_000 + 4096

    assert plain(sets.tensors()) == {"user": list(range(10_000))}
    assert len(sets) == 10_000


@given(st.lists(st.lists(st.integers(-50, 50), max_size=20, unique=True), max_size=10), st.integers(1, 30))
def test_taking_gives_every_id_once_within_the_budget(given: list[list[int]], budget: int) -> None:
    sets = IdSets()
    for number, values in enumerate(given):
        sets.add(ids(*values, table=f"t{number % 2}"))
    costs = {"t0": 3, "t1": 5}

    taken: list[tuple[str, int]] = []
    while len(sets):
        piece = sets.take(budget, costs)
        cost = sum(costs[table] * x.numel() for table, x in piece.items())
        assert piece
        assert cost <= budget or sum(x.numel() for x in piece.values()) == 1
        taken += [(table, id) for table, x in piece.items() for id in x.tolist()]

    assert sorted(taken) == sorted({(f"t{n % 2}", id) for n, values in enumerate(given) for id in values})


def test_lazy_sets_are_compacted_by_their_owner() -> None:
    sets = IdSets(lazy=True)
    for _ in range(5):
        sets.add({"user": torch.arange(10_000)})
    uncompacted = sets.needs_compaction()
    assert len(sets) == 50_000
    sets.add({"user": torch.arange(5)})  # while another thread compacts

    sets.replace("user", uncompacted["user"], torch.arange(10_000))
    sets.replace("user", uncompacted["user"], torch.arange(3))  # too late

    assert len(sets) == 10_005
    assert sets.needs_compaction() == {}
    assert plain(sets.tensors()) == {"user": list(range(10_000))}


# ---- journal


@given(st.lists(st.sampled_from("abc") | st.lists(st.integers(0, 9), unique=True), max_size=12))
def test_a_journal_returns_what_changed_since_each_label(events: list[str | list[int]]) -> None:
    """A label that comes again moves to the end, and older labels lose nothing."""
    journal = Journal()
    since: dict[str, set[int]] = {}
    for event in events:
        if isinstance(event, list):
            journal.add(ids(*event))
            since = {label: changed | set(event) for label, changed in since.items()}
        else:
            journal.begin_epoch(event)
            since.pop(event, None)
            since[event] = set()

    assert journal.labels == tuple(since)
    for number, (label, changed) in enumerate(since.items()):
        assert plain(journal.since(label)) == ({"user": sorted(changed)} if changed else {})
        for other in range(len(since)):
            assert journal.is_not_older(label, journal.labels[other]) is (other <= number)
        assert not journal.is_not_older("unknown", label)
    assert journal.since("unknown") is None


def test_the_oldest_labels_are_given_up_for_room() -> None:
    journal = Journal(max_ids=10)
    for label in "abc":
        journal.begin_epoch(label)
        journal.add(ids(*range(4)))

    assert journal.labels == ("b", "c")
    journal.add(ids(*range(100, 111)))
    assert journal.labels == ()
    journal.add(ids(5))  # ignored: there is no epoch
    journal.begin_epoch("d")
    journal.add(ids(6))
    assert plain(journal.since("d")) == {"user": [6]}


def test_labels_are_bounded_too() -> None:
    journal = Journal()
    for number in range(MAX_EPOCHS + 5):
        journal.begin_epoch(str(number))

    assert (len(journal.labels), journal.labels[0]) == (MAX_EPOCHS, "5")


def test_a_journal_counts_an_id_once_before_it_gives_up() -> None:
    journal = Journal(max_ids=10)
    journal.begin_epoch("a")
    for _ in range(100):
        journal.add(ids(*range(10)))
    assert journal.needs_compaction() == []

    assert plain(journal.since("a")) == {"user": list(range(10))}


# ---- backlog

ONE, TWO, THREE = (Interval(n, float(n)) for n in (1, 2, 3))
COSTS = {"user": 1, "item": 1}


def test_an_interval_is_complete_with_its_last_ids() -> None:
    backlog = Backlog(100)
    backlog.add(ids(1, 2, 3), ONE)

    first, done = backlog.take(2, COSTS)
    assert (plain(first), done) == ({"user": [1, 2]}, None)
    assert backlog.sizes == {"user": 1}
    second, done = backlog.take(2, COSTS)
    assert (plain(second), done) == ({"user": [3]}, ONE)
    assert not backlog.is_pending


def test_later_ids_do_not_delay_the_interval_in_progress() -> None:
    backlog = Backlog(100)
    backlog.add(ids(1, 2), ONE)
    backlog.take(1, COSTS)
    backlog.add(ids(1, 5), TWO)
    backlog.add(ids(5, 6), THREE)

    assert backlog.take(9, COSTS)[1] is ONE
    taken, done = backlog.take(9, COSTS)
    assert (plain(taken), done) == ({"user": [1, 5, 6]}, THREE)


def test_a_full_backlog_reports_it_and_the_first_ids_do_not_count() -> None:
    backlog = Backlog(3)
    backlog.begin(ids(*range(10)), ONE)

    assert backlog.add(ids(11, 12), TWO)
    assert backlog.add(ids(11, 12, 13), TWO)
    assert not backlog.add(ids(14), THREE)


def test_the_first_ids_go_before_those_that_changed_while_they_were_looked_for() -> None:
    first, second = Interval(1, 1.0), Interval(2, 2.0)
    backlog = Backlog(2)
    backlog.begin({}, first)
    assert backlog.add({"user": torch.tensor([2])}, second)

    backlog.begin({"user": torch.tensor([1, 2, 3])}, first)

    assert len(backlog) == 4
    assert plain(*backlog.take(100, {"user": 1})[:1]) == {"user": [1, 2, 3]}
    ids, complete = backlog.take(100, {"user": 1})
    assert (plain(ids), complete) == ({"user": [2]}, second)
    assert not backlog.is_pending


def test_ids_that_do_not_concern_the_target_are_left_out() -> None:
    backlog = Backlog(100, keep=lambda table, x: x[x % 2 == 0] if table == "user" else x[:0])
    backlog.add({**ids(1, 2, 4), **ids(2, table="item")}, ONE)

    taken, _ = backlog.take(9, COSTS)
    assert plain(taken) == {"user": [2, 4]}
