"""Monolith's records of ZooKeeper: the JSON it writes, and what is refused when it is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.compat.monolith import (
    Container,
    ContainerServiceInfo,
    ReplicaMeta,
    SavedModel,
    SavedModelDeployConfig,
)
from megalith.errors import InputError
from megalith.serving.wire_names import ModelState
from tests.serving.discovery.test_discovery import JSON

KEYS = st.sampled_from(["address", "stat", "task", "grpc", "idc", "model_base_path"]) | st.text(max_size=4)


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({"address": "10.0.0.1:1", "address_ipv6": "[fe80::1]:1"}, ["10.0.0.1:1", "[fe80::1]:1"]),
        ({"address": "0.0.0.0:1", "address_ipv6": "[fe80::1]:1"}, ["[fe80::1]:1", "[fe80::1]:1"]),
        ({"address": "10.0.0.1:1", "address_ipv6": "[::]:1"}, ["10.0.0.1:1", "10.0.0.1:1"]),
        ({"address": "10.0.0.1:1", "archon_address": "10.0.0.1:2"}, ["10.0.0.1:1", "10.0.0.1:1"]),
        ({"address": "0.0.0.0:1"}, [None, None]),
        ({"address": ""}, [None, None]),
        ({}, [None, None]),
    ],
)
def test_a_replica_is_called_by_its_family_else_the_other(
    meta: dict[str, str], expected: list[str | None]
) -> None:
    replica = ReplicaMeta(**meta)  # type: ignore[arg-type]
    assert [replica.get_address(), replica.get_address(address_family="ipv6")] == expected
    assert replica.get_address(use_archon=True) == meta.get("archon_address")


def test_records_are_written_as_monolith_writes_them() -> None:
    assert ReplicaMeta("localhost:8500", stat=ModelState.AVAILABLE).to_json() == (
        b'{"address": "localhost:8500", "address_ipv6": null, "stat": 30, "model_name": null, "server_type": '
        b'null, "task": -1, "replica": -1, "archon_address": null, "archon_address_ipv6": null}'
    )
    assert SavedModelDeployConfig("/m").to_json() == b'{"model_base_path": "/m", "version_policy": null}'
    meta = ReplicaMeta("a:1", "[::1]:1", 30, "movies", "ps", 1, 2, "a:2", "[::1]:2")
    assert ReplicaMeta.from_json(meta.to_json()) == meta
    assert ReplicaMeta.from_json(b'{"stat": 31, "new": [1]}') == ReplicaMeta(stat=31)
    assert str(SavedModel("movies", "ps_0")) == "movies:ps_0"
    assert str(Container("default", "asdf")) == "default:asdf"


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "not valid JSON"),
        (b"[" * 60000, "nested"),
        (b"3", "must be a JSON object"),
        (b'{"stat": "30"}', "stat is '30'"),
        (b'{"stat": true}', "stat is True"),
        (b'{"address": "x"}', "/a/b: address: 'x' is not an address"),
        (b"{" + b" " * 70000 + b"}", "/a/b: has more than 65536 bytes"),
    ],
)
def test_records_that_cannot_be_read_are_refused(data: bytes, match: str) -> None:
    with pytest.raises(InputError, match=match):
        ReplicaMeta.from_json(data, where="/a/b")


@given(st.binary(max_size=30) | st.dictionaries(KEYS, JSON, max_size=4).map(lambda d: json.dumps(d).encode()))
def test_any_bytes_are_a_record_or_refused(data: bytes) -> None:
    for kind in (ReplicaMeta, ContainerServiceInfo, SavedModelDeployConfig):
        try:
            record = kind.from_json(data)
        except InputError:
            continue
        assert kind.from_json(record.to_json()) == record


@pytest.mark.parametrize("name", ["", "..", "a/b", "a:b", None])
def test_names_that_would_lead_elsewhere_are_refused(name: Any) -> None:
    with pytest.raises(InputError, match="model name"):
        SavedModel(name, "entry")
    with pytest.raises(InputError, match="container id"):
        Container("default", name)


def test_a_path_needs_its_parts() -> None:
    meta = ReplicaMeta(model_name="movies", server_type="ps", task=1, replica=2)
    assert meta.get_path("demo") == "/demo/service/movies/ps:1/2"
    assert meta.get_path("demo", idc="lf", cluster="blue") == "/demo/service/movies/lf:blue/ps:1/2"
    with pytest.raises(InputError, match="idc and cluster must be given together"):
        meta.get_path("demo", idc="lf")
    with pytest.raises(InputError, match="server type"):
        ReplicaMeta(model_name="movies").get_path("demo")
    with pytest.raises(InputError, match="'ipv4' or 'ipv6', got 'ipv5'"):
        meta.get_address(address_family="ipv5")  # type: ignore[arg-type]
