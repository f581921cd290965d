"""DNSDiscovery: the addresses of a name, which change while it is watched."""

from __future__ import annotations

import socket
import threading

import pytest

from megalith.errors import InputError, UsageError
from megalith.serving.discovery import DNSDiscovery, Replica, open_discovery
from tests.serving.zookeeper import LIMIT, Changes

MODULE = "megalith.serving.discovery.dns.lookup_addresses"
ENTRY = "movies:entry"


class Records:
    """What a name leads to; None: it cannot be resolved."""

    def __init__(self) -> None:
        self.addresses: list[str] | None = ["10.0.0.2", "10.0.0.1"]
        self.asked: list[str] = []
        self._changed = threading.Condition()

    def wait_for(self, count: int) -> None:
        """Waits until the name was resolved some more times."""
        with self._changed:
            wanted = len(self.asked) + count
            assert self._changed.wait_for(lambda: len(self.asked) >= wanted, LIMIT)

    def __call__(self, host: str, port: int) -> list[str]:
        with self._changed:
            self.asked.append(host)
            self._changed.notify_all()
        if self.addresses is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [f"{each}:{port}" for each in self.addresses]


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    made = Records()
    monkeypatch.setattr(MODULE, made)
    return made


def addresses(discovery: DNSDiscovery, service: str = ENTRY) -> list[str]:
    return [replica.address for replica in discovery.replicas(service)]


def test_a_real_name_is_resolved() -> None:
    with open_discovery("dns:localhost:8500") as discovery:
        found = [replica.address for replica in discovery.replicas(ENTRY)]
    assert set(found) <= {"127.0.0.1:8500", "[::1]:8500"}
    assert found


def test_all_addresses_serve_every_service(records: Records) -> None:
    discovery = DNSDiscovery("servers.local", 8500)
    for service in (ENTRY, "books:ps_0"):
        assert addresses(discovery, service) == ["10.0.0.1:8500", "10.0.0.2:8500"]
    discovery.register(ENTRY, Replica("10.0.0.9:8500"))
    discovery.unregister(ENTRY, "10.0.0.1:8500")
    assert addresses(discovery) == ["10.0.0.1:8500", "10.0.0.2:8500"]
    assert set(records.asked) == {"servers.local"}


def test_a_name_for_each_part(records: Records) -> None:
    discovery = DNSDiscovery("{part}.{model}.local", 8500)
    addresses(discovery, "my_movies:ps_0")
    assert records.asked == ["ps-0.my-movies.local"]


def test_changes_are_reported_and_failures_change_nothing(
    records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    changes = Changes()
    with DNSDiscovery("servers.local", 8500, interval=0.01) as discovery:
        discovery.watch(ENTRY, changes)
        changes.until_addresses("10.0.0.1:8500", "10.0.0.2:8500")
        records.addresses = None
        records.wait_for(3)
        assert addresses(discovery) == ["10.0.0.1:8500", "10.0.0.2:8500"]
        records.addresses = ["10.0.0.3"]
        changes.until_addresses("10.0.0.3:8500")
    assert caplog.text.count("keeping the addresses found before") == 1
    with pytest.raises(UsageError, match="cannot be started again"):
        discovery.start()


@pytest.mark.parametrize(
    "url", ["dns:", "dns:x", "dns:x:y", "dns::8500", "dns:a b:1", "dns:x:0", "dns:x:65536"]
)
def test_what_is_not_a_name_and_a_port(url: str) -> None:
    with pytest.raises(InputError, match="dns"):
        open_discovery(url)
