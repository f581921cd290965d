"""ClientCache: clients share discoveries and connections, and a slow discovery delays only its own calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megalith.errors import DiscoveryError, InputError, UsageError
from megalith.serving.client import predict_client as module
from megalith.serving.client.predict_client import ClientCache
from megalith.serving.discovery import StaticDiscovery
from tests.serving.client.test_predict_client import LONG, X, doubled
from tests.serving.plain_server import LIMIT, plain_server


@pytest.fixture
def cache() -> Iterator[ClientCache]:
    with ClientCache() as made:
        yield made


def ask(cache: ClientCache, url: str | None = None, timeout: float = LONG) -> list[float]:
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
    monkeypatch.setattr(module, "MAX_CLIENTS", 2)
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
        assert ask(cache) == [2.0, 5.0]
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
        monkeypatch.setattr(module, "open_discovery", {"slow": slow, "quick": quick}.__getitem__)
        with pytest.raises(DiscoveryError, match=r"slow did not answer within 0.05 seconds"):
            ask(cache, "slow", 0.05)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(ask, cache, "slow")
            assert slow.starting.wait(LIMIT)
            assert ask(cache, "quick") == [2.0, 5.0]
            slow.released.set()
            assert waiting.result(LIMIT) == [2.0, 5.0]
        assert slow.opened == 1


def test_a_discovery_that_opens_after_all_was_closed_is_closed(
    cache: ClientCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Opening("localhost:1")
    monkeypatch.setattr(module, "open_discovery", {"slow": slow}.__getitem__)
    with pytest.raises(DiscoveryError):
        ask(cache, "slow", 0.05)
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

        monkeypatch.setattr(module, "open_discovery", opens)
        with pytest.raises(DiscoveryError, match="no server"):
            ask(cache, "some")
        assert ask(cache, "some") == [2.0, 5.0]
