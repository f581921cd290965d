"""RowFetcher: every id is asked once of the part that owns it; rows come back in the order of the ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalith.checkpoint.manifest import Routing
from megalith.errors import InputError, RemoteError, UnknownNameError
from megalith.serving.client import row_fetcher as fetch_module
from megalith.serving.client.row_fetcher import RowFetcher
from megalith.serving.discovery import Replica, StaticDiscovery
from megalith.serving.export.signature import ExportedTable, Signature
from tests.serving.exports import fails
from tests.serving.plain_server import LIMIT, PlainServer, Refused, Seen, plain_server

LONG = LIMIT
DIMS = {"user": 2, "movie": 3}
ROUTINGS = {
    "roundrobin": Routing("roundrobin", 2),
    "hash_roundrobin": Routing("hash_roundrobin", 2),
    "continuous": Routing("continuous", 2, block_size=10),
    "skip_first": Routing("roundrobin", 2, skip_first=True),
}


def signature(user: Routing, movie: Routing | None = None, parts: int = 2) -> Signature:
    routings = {"user": user, "movie": movie or user}
    return Signature(
        model="movies",
        version=1,
        part="entry",
        sub_graph_num=parts,
        base="b",
        step=0,
        created="now",
        megalith="0",
        precision="float32",
        tables={name: ExportedTable((DIMS[name],), (1.0,), routings[name]) for name in DIMS},
    )


def row(table: str, id: int) -> list[float]:
    """The row of an id: ids divisible by 5 have none."""
    return [0.0 if id % 5 == 0 else id % 1000 + column / 8 for column in range(DIMS[table])]


def lookup(seen: Seen) -> dict[str, Tensor]:
    answer = {}
    for table, ids in seen.inputs.items():
        assert isinstance(ids, Tensor)
        rows = [row(table, id) for id in ids.tolist()]
        answer[table] = torch.tensor(rows).reshape(-1, DIMS[table])
    return answer


def refuse(seen: Seen) -> dict[str, Tensor]:
    raise Refused("UNAVAILABLE")


@contextmanager
def fetching(
    *answers: Any, routed: Signature | None = None, **options: Any
) -> Iterator[tuple[RowFetcher, list[PlainServer]]]:
    """A fetcher of rows, and the servers of ps_0, ps_1 ..."""
    discovery, servers = StaticDiscovery({}), []
    with ExitStack() as stack:
        for k, answer in enumerate(answers):
            servers.append(stack.enter_context(plain_server(answer)))
            discovery.register(f"movies:ps_{k}", Replica(servers[-1].address))
        routed = routed or signature(ROUTINGS["roundrobin"])
        fetch = stack.enter_context(RowFetcher(discovery, routed, **{"timeout": LONG, **options}))
        yield fetch, servers


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_each_part_is_asked_for_its_own_ids_once(routing: Routing) -> None:
    router = routing.router()
    assert router is not None
    asked = {"user": torch.tensor([7, 8, 7, -3, 25, 5, 2**62]), "movie": torch.tensor([1, 2, 1])}
    with fetching(lookup, lookup, routed=signature(routing)) as (fetch, servers):
        rows = fetch(asked)
        for table, ids in asked.items():
            assert rows[table].tolist() == [row(table, id) for id in ids.tolist()]
            for shard, server in enumerate(servers):
                owned = ids[router.owner(ids) == shard].unique().tolist()
                sent: list[int] = []
                for seen in server.seen:
                    sent += seen.inputs.get(table, torch.empty(0)).tolist()
                assert sorted(sent) == owned
        for shard, server in enumerate(servers):
            assert len(server.seen) <= 1
            for seen in server.seen:
                spec = seen.message.model_spec
                assert (spec.name, spec.signature_name) == (f"movies:ps_{shard}", "lookup")
                assert spec.version.value == 1


def test_any_ids_come_back_in_their_order() -> None:
    mixed = signature(ROUTINGS["continuous"], ROUTINGS["hash_roundrobin"])
    ids = st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 25)), max_size=30)
    with fetching(lookup, lookup, routed=mixed) as (fetch, _):

        @settings(max_examples=40)
        @given(ids, ids)
        def check(user: list[int], movie: list[int]) -> None:
            asked = {"user": user, "movie": movie}
            rows = fetch({name: torch.tensor(each, dtype=torch.int64) for name, each in asked.items()})
            for table, each in asked.items():
                assert rows[table].dtype == torch.float32
                assert rows[table].shape == (len(each), DIMS[table])
                assert rows[table].tolist() == torch.tensor([row(table, id) for id in each]).tolist()

        check()


def test_nothing_asked_sends_nothing() -> None:
    with fetching(lookup, lookup) as (fetch, servers):
        assert fetch({}) == {}
        assert fetch({"movie": torch.empty(0, dtype=torch.int64)})["movie"].shape == (0, 3)
        assert [server.seen for server in servers] == [[], []]


def test_a_table_of_one_part_in_a_model_of_two() -> None:
    one = signature(Routing(), ROUTINGS["roundrobin"])
    with fetching(lookup, lookup, routed=one) as (fetch, servers):
        assert fetch({"user": torch.tensor([1, 2])})["user"].tolist() == [row("user", 1), row("user", 2)]
        assert [len(server.seen) for server in servers] == [1, 0]


def of_version(number: int) -> Any:
    """A part that has one version, which is also its newest."""

    def answer(seen: Seen) -> dict[str, Tensor]:
        if seen.message.model_spec.HasField("version") and seen.message.model_spec.version.value != number:
            raise Refused("NOT_FOUND")
        return lookup(seen)

    return answer


def test_the_newest_version_is_asked_only_if_no_replica_has_the_entrys() -> None:
    routed = signature(ROUTINGS["roundrobin"])
    with ExitStack() as stack:
        ahead, same = (stack.enter_context(plain_server(of_version(number))) for number in (2, 1))
        discovery = StaticDiscovery({"movies:ps_0": [ahead.address]})
        fetch = stack.enter_context(RowFetcher(discovery, routed, timeout=LONG))
        ids = {"user": torch.tensor([2])}
        assert fetch(ids)["user"].tolist() == [row("user", 2)]
        assert [seen.message.model_spec.version.value for seen in ahead.seen] == [1, 0]
        discovery.register("movies:ps_0", Replica(same.address))
        for _ in range(4):
            fetch(ids)
        assert all(seen.message.model_spec.version.value == 1 for seen in ahead.seen[2:] + same.seen)
        assert len(same.seen) == 4


def test_more_rows_than_a_message_holds_are_asked_for_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a user takes 8 bytes, of a movie 12."""
    monkeypatch.setattr(fetch_module, "MAX_PIECE_BYTES", 40)
    asked = {"user": torch.tensor([*range(2, 14), 3]), "movie": torch.tensor([9, 4, 2, 6, 8, 1])}
    with fetching(lookup, lookup) as (fetch, servers):
        rows = fetch(asked)
        for table, ids in asked.items():
            assert rows[table].tolist() == [row(table, id) for id in ids.tolist()]
        for server in servers:
            assert len(server.seen) > 1
            for seen in server.seen:
                sizes = {name: ids.shape[0] for name, ids in seen.inputs.items()}
                assert 8 * sizes.get("user", 0) + 12 * sizes.get("movie", 0) <= 40
    monkeypatch.setattr(fetch_module, "MAX_PIECE_BYTES", 1)  # less than a row: one at a time
    with fetching(lookup, refuse, fail_soft=True) as (fetch, _):
        rows = fetch({"user": torch.tensor([2, 1, 3])})
        assert rows["user"].tolist() == [row("user", 2), [0, 0], [0, 0]]
        assert (fetch.failed_shards, fetch.rows_missing_by_failure) == (1, 2)


def test_a_part_that_fails_raises() -> None:
    with fetching(lookup, refuse) as (fetch, servers):
        with pytest.raises(RemoteError, match=r"movies:ps_1: .*UNAVAILABLE") as raised:
            fetch({"user": torch.tensor([1, 2])})
        assert raised.value.targets == (servers[1].address,)
        assert fetch({"user": torch.tensor([2])})["user"].tolist() == [row("user", 2)]


def test_a_part_that_fails_softly_gives_zeros_and_is_counted() -> None:
    with fetching(lookup, refuse, fail_soft=True) as (fetch, _):
        rows = fetch({"user": torch.tensor([1, 2, 3, 1]), "movie": torch.tensor([1])})
        assert rows["user"].tolist() == [[0.0] * 2, row("user", 2), [0.0] * 2, [0.0] * 2]
        assert rows["movie"].tolist() == [[0.0] * 3]
        assert (fetch.failed_shards, fetch.rows_missing_by_failure) == (1, 3)
        fetch({"user": torch.tensor([1])})
        assert (fetch.failed_shards, fetch.rows_missing_by_failure) == (2, 4)


def test_a_part_nobody_serves_fails_like_one_that_is_down() -> None:
    with fetching(lookup) as (fetch, _), fails("UNAVAILABLE", "movies:ps_1: discovery knows no server"):
        fetch({"user": torch.tensor([1])})
    with fetching(lookup, fail_soft=True) as (fetch, _):
        assert fetch({"user": torch.tensor([1])})["user"].tolist() == [[0.0, 0.0]]


def test_a_hanging_part_ends_with_the_deadline_and_the_others_count() -> None:
    def hang(seen: Seen) -> dict[str, Tensor]:
        servers[1].released.wait(LIMIT)
        return {}

    with fetching(lookup, hang, fail_soft=True, timeout=2) as (fetch, servers):
        rows = fetch({"user": torch.tensor([1, 2])})
        assert rows["user"].tolist() == [[0.0, 0.0], row("user", 2)]
        assert fetch.failed_shards == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "'user' is missing from the response"),
        ({"user": torch.zeros(1, 3)}, r"is torch.float32 \[1, 3\], expected float32 \[1, 2\]"),
        ({"user": torch.zeros(2, 2)}, r"expected float32 \[1, 2\]"),
        ({"user": torch.zeros(1, 2, dtype=torch.float64)}, "torch.float64"),
        (b"\xff", "INTERNAL"),
    ],
)
def test_mismatched_responses_are_failures(answer: Any, message: str) -> None:
    with fetching(lambda seen: answer, lookup) as (fetch, _), pytest.raises(RemoteError, match=message):
        fetch({"user": torch.tensor([2])})
    with fetching(lambda seen: answer, lookup, fail_soft=True) as (fetch, _):
        assert fetch({"user": torch.tensor([2, 1])})["user"].tolist() == [[0.0, 0.0], row("user", 1)]


def test_what_is_wrong_with_a_call_is_named() -> None:
    with fetching() as (fetch, _):
        with pytest.raises(UnknownNameError, match="table 'film' is unknown; known tables: user, movie"):
            fetch({"film": torch.tensor([1])})
        for ids in (torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([1], dtype=torch.int32), [1]):
            wrong: Any = {"user": ids}
            with pytest.raises(InputError, match="table 'user': ids must be"):
                fetch(wrong)


def test_a_model_without_such_parts_has_nothing_to_fetch_from() -> None:
    with pytest.raises(InputError, match="no ps parts"):
        RowFetcher(StaticDiscovery({}), signature(Routing(), parts=0))
    with pytest.raises(InputError, match="'user' is routed to 2 parts, but there are 1"):
        RowFetcher(StaticDiscovery({}), signature(ROUTINGS["roundrobin"], parts=1))
