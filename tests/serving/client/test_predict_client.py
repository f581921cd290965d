"""PredictClient: requests, responses and failover; ClientCache: clients share discoveries and connections."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalith import Ragged
from megalith.errors import DiscoveryError, InputError, MegalithError, RemoteError, UsageError
from megalith.serving.client import channels, predict_client
from megalith.serving.client.channels import Channels
from megalith.serving.client.predict_client import ClientCache, PredictClient
from megalith.serving.discovery import Replica, StaticDiscovery
from megalith.serving.proto.message_types import PredictResponse, TensorProto
from megalith.serving.proto.tf_tensors import strings_to_tensor_proto, to_tensor_proto
from tests.serving.exports import fails
from tests.serving.plain_server import LIMIT, PlainServer, Refused, Seen, plain_server

LONG = LIMIT


def doubled(seen: Seen) -> dict[str, Tensor]:
    return {"y": 2 * seen.inputs["x"], "z": torch.zeros(1)}


def refuse(code: str) -> Any:
    def answer(seen: Seen) -> dict[str, Tensor]:
        raise Refused(code)

    return answer


def client(*servers: PlainServer, **settings: Any) -> PredictClient:
    replicas = [Replica(server.address, k) for k, server in enumerate(servers)]
    return PredictClient(StaticDiscovery(replicas), "movies", **{"timeout": LONG, **settings})


X = torch.tensor([1.0, 2.5])

# ---- what goes out and comes back


def test_a_prediction() -> None:
    with plain_server(doubled) as server, client(server, signature_name="score", model_version=7) as c:
        assert c.predict({"x": X}, outputs=["y"])["y"].tolist() == [2.0, 5.0]
    spec = server.seen[0].message.model_spec
    assert (spec.name, spec.signature_name, spec.version.value) == ("movies:entry", "score", 7)
    assert list(server.seen[0].message.output_filter) == ["y"]


def test_without_names_all_outputs_come_and_without_a_version_the_newest_is_asked() -> None:
    with plain_server(doubled) as server, client(server) as c:
        assert sorted(c.predict({"x": X})) == ["y", "z"]
    assert not server.seen[0].message.model_spec.HasField("version")
    assert not server.seen[0].message.output_filter


@pytest.mark.parametrize(
    ("task", "name"),
    [("entry", "movies:entry"), ("ps_3", "movies:ps_3"), (3, "movies:ps_3"), ("standalone", "movies")],
)
def test_the_task_is_the_part_asked(task: str | int, name: str) -> None:
    with plain_server(doubled) as server, client(server, task=task) as c:
        c.predict({"x": X})
    assert server.seen[0].message.model_spec.name == name


def test_columns_and_strings_travel() -> None:
    ragged = Ragged.from_lists([[1, 2], []])
    weighted = Ragged(torch.tensor([3]), torch.tensor([0, 0, 1]), torch.tensor([0.5]))
    inputs = {
        "x": X,
        "movies": ragged,
        "users": weighted,
        "words": ["a", "ü"],
        "raw": [b"\xff"],
        "grid": np.array([[b"1", "2"]], dtype=object),
    }
    with plain_server(doubled) as server, client(server) as c:
        c.predict(inputs)
    seen: Any = server.seen[0].inputs
    assert seen["movies"].tolist() == [1, 2]
    assert seen["movies:row_splits"].tolist() == [0, 2, 2]
    assert seen["users:weights"].tolist() == [0.5]
    assert "movies:weights" not in seen
    assert seen["words"].tolist() == [b"a", "ü".encode()]
    assert seen["raw"].tolist() == [b"\xff"]
    assert seen["grid"].tolist() == [[b"1", b"2"]]


@pytest.mark.parametrize("value", ["text", 5, None, [1, 2], torch.zeros(1, dtype=torch.complex64)])
def test_what_cannot_travel_is_named(value: Any) -> None:
    with client() as c, pytest.raises(InputError, match="input 'x': "):
        c.predict({"x": value})


@pytest.mark.parametrize(
    "settings",
    [
        {"model_name": ""},
        {"model_name": "a/b"},
        {"old_model_name": "a:b"},
        {"task": -1},
        {"task": True},
        {"task": ""},
        {"model_version": -2},
        {"signature_name": "a\ud800"},
        {"timeout": 0},
        {"timeout": float("nan")},
    ],
)
def test_invalid_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        PredictClient(StaticDiscovery([]), **{"model_name": "movies", **settings})


def test_many_threads_get_their_own_answers() -> None:
    with plain_server(doubled) as a, plain_server(doubled) as b, client(a, b) as c:

        def ask(k: int) -> float:
            return c.predict({"x": torch.tensor([float(k)])})["y"].item()

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(ask, range(200))) == [2.0 * k for k in range(200)]


def test_a_closed_client_raises() -> None:
    with plain_server(doubled) as server:
        c = client(server)
        c.predict({"x": X})
        c.close()
        c.close()
        with pytest.raises(UsageError, match="closed"):
            c.predict({"x": X})


def test_a_url_is_opened_and_closed(tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    with plain_server(doubled) as server:
        path.write_text(json.dumps({"services": {"movies:entry": [server.address]}}))
        with PredictClient(f"file:{path}", "movies", timeout=LONG) as c:
            assert c.predict({"x": X})["y"].tolist() == [2.0, 5.0]
            assert any("servers.json" in thread.name for thread in threading.enumerate())
        assert not any("servers.json" in thread.name for thread in threading.enumerate())


# ---- one deadline for everything


def test_the_deadline_reaches_the_server() -> None:
    with plain_server(doubled) as server, client(server) as c:
        c.predict({"x": X}, timeout=20)
    remaining = server.seen[0].time_remaining
    assert remaining is not None
    assert 0 < remaining <= 21.0  # gRPC rounds deadlines up


def test_two_hanging_servers_share_one_deadline() -> None:
    with ExitStack() as stack:

        def hang(seen: Seen) -> dict[str, Tensor]:
            hanging[0].released.wait(LIMIT)
            return {}

        hanging = [stack.enter_context(plain_server(hang)) for _ in range(2)]
        c = stack.enter_context(client(*hanging))
        with pytest.raises(RemoteError) as raised:
            c.predict({"x": X}, timeout=2)
        assert raised.value.code == "DEADLINE_EXCEEDED"
        assert sorted(raised.value.targets) == sorted(server.address for server in hanging)
        remaining = sorted(server.seen[0].time_remaining or 0.0 for server in hanging)
        assert remaining[0] <= 1.0
        assert remaining[1] <= 2.1  # gRPC rounds deadlines up
        hanging[0].released.set()


def test_a_slow_server_is_hedged_and_then_tried_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "REST_SECONDS", 1000.0)
    monkeypatch.setattr(random, "randrange", lambda stop: 0)

    def slow(seen: Seen) -> dict[str, Tensor]:
        first.released.wait(LIMIT)
        return {"y": torch.zeros(0)}

    with plain_server(slow) as first, plain_server(doubled) as second, client(first, second) as c:
        for _ in range(3):
            assert c.predict({"x": X}, timeout=2)["y"].tolist() == [2.0, 5.0]
        assert (len(first.seen), len(second.seen)) == (1, 3)
        first.released.set()


# ---- other replicas


@pytest.mark.parametrize(
    "code", ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN", "NOT_FOUND"]
)
def test_another_replica_is_tried_and_the_one_that_failed_rests(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "REST_SECONDS", 1000.0)
    with plain_server(refuse(code)) as bad, plain_server(doubled) as good, client(bad, good) as c:
        for _ in range(4):
            assert c.predict({"x": X})["y"].tolist() == [2.0, 5.0]
        works = code == "NOT_FOUND"  # it only lacks this model, so it has its turns
        assert (len(bad.seen), len(good.seen)) == (2 if works else 1, 4)


@pytest.mark.parametrize(
    "code", ["INVALID_ARGUMENT", "PERMISSION_DENIED", "UNIMPLEMENTED", "UNAUTHENTICATED"]
)
def test_a_refused_request_is_not_tried_elsewhere(code: str) -> None:
    with plain_server(refuse(code)) as a, plain_server(refuse(code)) as b, client(a, b) as c:
        with pytest.raises(RemoteError, match=f"movies:entry: .*{code}: requested by the test") as raised:
            c.predict({"x": X})
        assert raised.value.code == code
        assert len(raised.value.targets) == len(a.seen) + len(b.seen) == 1


def when_a_failure_was_heard(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set as soon as a client has made of a failure what it makes of it."""
    heard = threading.Event()
    original = channels.Attempt._take_failure

    def noted(attempt: channels.Attempt, error: RemoteError) -> None:
        original(attempt, error)
        heard.set()

    monkeypatch.setattr(channels.Attempt, "_take_failure", noted)
    return heard


@pytest.mark.parametrize("code", sorted(channels.FINAL | {"INTERNAL", "UNAVAILABLE", "NOT_FOUND"}))
def test_a_failure_of_the_second_costs_no_answer_of_the_first(
    monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """The first server is slow, so the second is tried too; its error does not end the first try."""
    monkeypatch.setattr(random, "randrange", lambda stop: 0)

    def slow(seen: Seen) -> dict[str, Tensor]:
        refused.wait(LIMIT)
        return doubled(seen)

    refused = when_a_failure_was_heard(monkeypatch)
    with plain_server(slow) as first, plain_server(refuse(code)) as second, client(first, second) as c:
        assert c.predict({"x": X}, timeout=4)["y"].tolist() == [2.0, 5.0]
        assert (len(first.seen), len(second.seen)) == (1, 1)


def test_what_the_second_said_is_told_if_the_first_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "randrange", lambda stop: 0)

    def slow(seen: Seen) -> dict[str, Tensor]:
        refused.wait(LIMIT)
        raise Refused("UNAVAILABLE")

    refused = when_a_failure_was_heard(monkeypatch)
    answers = (slow, refuse("INVALID_ARGUMENT"), doubled)
    with ExitStack() as stack:
        servers = [stack.enter_context(plain_server(answer)) for answer in answers]
        c = stack.enter_context(client(*servers))
        with fails("INVALID_ARGUMENT"):
            c.predict({"x": X}, timeout=4)
        assert [len(server.seen) for server in servers] == [1, 1, 0]


def test_only_replicas_that_are_asked_are_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "randrange", lambda stop: 0)
    with plain_server(doubled) as server, Channels() as channels:
        replicas = [Replica(server.address, 0), Replica("localhost:1", 1), Replica("localhost:2", 2)]
        with PredictClient(StaticDiscovery(replicas), "movies", timeout=LONG, channels=channels) as c:
            c.predict({"x": X})
        assert list(channels._open) == [server.address]


def test_all_replicas_failing_names_them_all() -> None:
    with (
        plain_server(refuse("UNAVAILABLE")) as a,
        plain_server(refuse("UNAVAILABLE")) as b,
        client(a, b) as c,
    ):
        with pytest.raises(RemoteError) as raised:
            c.predict({"x": X})
        assert raised.value.code == "UNAVAILABLE"
        assert sorted(raised.value.targets) == sorted([a.address, b.address])
        assert isinstance(raised.value, MegalithError)


def test_replicas_take_turns() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(plain_server(doubled)) for _ in range(3)]
        c = stack.enter_context(client(*servers))
        for _ in range(9):
            c.predict({"x": X})
        assert [len(server.seen) for server in servers] == [3, 3, 3]


def test_clients_begin_at_random() -> None:
    with plain_server(doubled) as a, plain_server(doubled) as b:
        random.seed(5)
        for _ in range(20):
            with client(a, b) as c:
                c.predict({"x": X})
        assert len(a.seen) > 2
        assert len(b.seen) > 2


def test_a_replica_that_comes_or_goes_is_noticed() -> None:
    discovery = StaticDiscovery({})
    with plain_server(doubled) as a, plain_server(doubled) as b:
        c = PredictClient(discovery, "movies", timeout=LONG)
        with pytest.raises(RemoteError, match="movies:entry: discovery knows no server of") as raised:
            c.predict({"x": X})
        assert (raised.value.code, raised.value.targets) == ("UNAVAILABLE", ())
        discovery.register("movies:entry", Replica(a.address))
        c.predict({"x": X})
        discovery.register("movies:entry", Replica(b.address))
        discovery.unregister("movies:entry", a.address)
        a.stop()
        c.predict({"x": X})
        c.predict({"x": X})
        assert (len(a.seen), len(b.seen)) == (1, 2)
        c.close()


def test_a_killed_replica_in_the_middle_costs_no_answer() -> None:
    with plain_server(doubled) as a, plain_server(doubled) as b, client(a, b) as c:
        for k in range(20):
            if k == 10:
                a.stop()
            assert c.predict({"x": X})["y"].tolist() == [2.0, 5.0]


# ---- the old name of a model


def known_as(name: str) -> Any:
    def answer(seen: Seen) -> dict[str, Tensor]:
        if seen.message.model_spec.name != name:
            raise Refused("NOT_FOUND")
        return doubled(seen)

    return answer


def test_the_old_name_is_asked_where_the_new_one_is_not_known() -> None:
    with plain_server(known_as("films:entry")) as server:
        with client(server, old_model_name="films") as c:
            assert c.predict({"x": X})["y"].tolist() == [2.0, 5.0]
        assert [seen.message.model_spec.name for seen in server.seen] == ["movies:entry", "films:entry"]
        with client(server, old_model_name="cinema") as c, pytest.raises(RemoteError, match="cinema:entry"):
            c.predict({"x": X})


def test_the_old_name_is_asked_only_if_no_replica_knows_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "randrange", lambda stop: 0)
    with plain_server(known_as("films:entry")) as old, plain_server(known_as("movies:entry")) as new:
        with client(old, new, old_model_name="films") as c:
            c.predict({"x": X})
        assert [seen.message.model_spec.name for seen in old.seen + new.seen] == ["movies:entry"] * 2


def test_the_old_name_is_asked_where_discovery_does_not_know_the_new_one() -> None:
    with plain_server(known_as("films:entry")) as server:
        discovery = StaticDiscovery({"films:entry": [server.address]})
        with PredictClient(discovery, "movies", old_model_name="films", timeout=LONG) as c:
            assert c.predict({"x": X})["y"].tolist() == [2.0, 5.0]


# ---- responses are untrusted until validated


def response(**outputs: Any) -> bytes:
    data: bytes = PredictResponse(outputs=outputs).SerializeToString()
    return data


WRONG = "INVALID_ARGUMENT"
"""The request names an output that the server does not have, or that cannot be read."""
HUGE = TensorProto(dtype=1)
HUGE.tensor_shape.dim.add(size=2**60)
SHORT = TensorProto(dtype=1, tensor_content=b"123")
SHORT.tensor_shape.dim.add(size=1)


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        (b"\xff\xff\xff", "INTERNAL", "INTERNAL"),
        (response(), WRONG, "movies:entry: output 'y' is missing from the response; found nothing"),
        (response(z=to_tensor_proto(X)), WRONG, "found z"),
        (response(y=strings_to_tensor_proto([b"a"])), WRONG, "output 'y' holds strings"),
        (response(y=HUGE), "INTERNAL", "output 'y': shape"),
        (response(y=SHORT), "INTERNAL", "output 'y': 3 bytes"),
        (response(y=TensorProto(dtype=77)), "INTERNAL", "output 'y': dtype 77"),
    ],
)
def test_malformed_responses(answer: bytes, code: str, message: str) -> None:
    with plain_server(lambda seen: answer) as server, client(server) as c, fails(code, message):
        c.predict({"x": X}, outputs=["y"])


def test_any_bytes_give_tensors_or_a_remote_error() -> None:
    good = response(y=to_tensor_proto(torch.arange(6.0).reshape(2, 3)), z=to_tensor_proto(X))
    answers: list[bytes] = []
    with plain_server(lambda seen: answers.pop()) as server, client(server) as c:

        @settings(max_examples=80)
        @given(
            st.lists(st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)), max_size=6),
            st.integers(0, len(good)),
        )
        def check(flips: list[tuple[int, int]], length: int) -> None:
            damaged = bytearray(good)
            for at, value in flips:
                damaged[at] = value
            answers.append(bytes(damaged[:length]))
            with suppress(RemoteError):
                assert all(isinstance(value, Tensor) for value in c.predict({"x": X}).values())

        check()


# ---- the cache of clients


@pytest.fixture
def cache() -> Iterator[ClientCache]:
    with ClientCache() as made:
        yield made


def ask_of(cache: ClientCache, url: str | None = None, timeout: float = LONG) -> list[float]:
    client = cache.client("movies", 0, discovery=url, timeout=timeout)
    values: list[float] = client.predict({"x": X}, timeout=LONG)["y"].tolist()
    return values


def test_equal_settings_give_one_client_and_others_another() -> None:
    discovery = StaticDiscovery([])
    with ClientCache(discovery) as cache:
        first = cache.client("movies", timeout=LONG)
        assert cache.client("movies", "entry", timeout=LONG) is first
        assert cache.client("movies", discovery=discovery, timeout=LONG) is first
        assert cache.client("movies", signature_name="lookup", timeout=LONG) is not first
        assert cache.client("movies", "ps_0", timeout=LONG) is not first
        assert len(cache) == 3
    assert len(cache) == 0
    assert cache.discovery is None


def test_the_oldest_client_is_closed_beyond_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict_client, "MAX_CLIENTS", 2)
    with ClientCache(StaticDiscovery([])) as cache:
        first = cache.client("a", timeout=LONG)
        for name in ("b", "c"):
            cache.client(name, timeout=LONG)
        assert len(cache) == 2
        assert cache.client("a", timeout=LONG) is not first


def test_reset_sets_another_discovery() -> None:
    with plain_server(doubled) as server, ClientCache("static:localhost:1") as cache:
        assert cache.discovery == "static:localhost:1"
        cache.reset(f"static:{server.address}")
        assert ask_of(cache) == [2.0, 5.0]
        assert torch.equal(server.seen[0].inputs["x"], X)


def test_wrong_arguments(cache: ClientCache) -> None:
    with pytest.raises(UsageError, match="no discovery: pass one"):
        cache.client("movies", timeout=1)
    with pytest.raises(InputError, match="timeout must be"):
        cache.client("movies", timeout=0)
    with pytest.raises(InputError, match="must not contain '/', ':'"):
        cache.client("a:b", discovery="static:localhost:1", timeout=LONG)
    with pytest.raises(InputError, match="nope"):
        cache.open("nope:localhost")
    assert len(cache) == 0  # what failed is not kept


class Opening(StaticDiscovery):
    """A discovery that starts only when released."""

    opened = 0

    def __init__(self, address: str) -> None:
        super().__init__([address])
        self.released = threading.Event()
        self.starting = threading.Event()
        self.stopped = threading.Event()

    def start(self, timeout: float = 15.0) -> None:
        self.opened += 1
        self.starting.set()
        assert self.released.wait(LIMIT)

    def stop(self) -> None:
        self.stopped.set()


def test_a_discovery_that_does_not_open_costs_a_call_its_deadline_and_others_nothing(
    cache: ClientCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plain_server(doubled) as server:
        slow, quick = Opening(server.address), StaticDiscovery([server.address])
        monkeypatch.setattr(predict_client, "open_discovery", {"slow": slow, "quick": quick}.__getitem__)
        with pytest.raises(DiscoveryError, match=r"slow did not answer within 0.05 seconds"):
            ask_of(cache, "slow", 0.05)
        with monkeypatch.context() as patched:
            patched.setattr(predict_client, "OPEN_SECONDS", 0.05)
            with pytest.raises(DiscoveryError, match=r"slow did not answer within 0.05 seconds"):
                cache.open("slow")
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(ask_of, cache, "slow")
            assert slow.starting.wait(LIMIT)
            assert ask_of(cache, "quick") == [2.0, 5.0]
            slow.released.set()
            assert waiting.result(LIMIT) == [2.0, 5.0]
        assert slow.opened == 1


def test_a_discovery_that_opens_after_all_was_closed_is_closed(
    cache: ClientCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Opening("localhost:1")
    monkeypatch.setattr(predict_client, "open_discovery", {"slow": slow}.__getitem__)
    with pytest.raises(DiscoveryError):
        ask_of(cache, "slow", 0.05)
    cache.close()
    assert not slow.stopped.is_set()
    slow.released.set()
    assert slow.stopped.wait(LIMIT)


def test_a_discovery_that_failed_to_open_is_tried_again(
    cache: ClientCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plain_server(doubled) as server:
        found: list[Any] = [DiscoveryError("no server"), StaticDiscovery([server.address])]

        def opens(url: str) -> Any:
            made = found.pop(0)
            if isinstance(made, Exception):
                raise made
            return made

        monkeypatch.setattr(predict_client, "open_discovery", opens)
        with pytest.raises(DiscoveryError, match="no server"):
            ask_of(cache, "some")
        assert ask_of(cache, "some") == [2.0, 5.0]
