"""ServerConfig: values are rejected at construction, with the name of the option."""

from __future__ import annotations

from typing import Any

import pytest

from megalith.errors import InputError
from megalith.serving.server.server_config import Batching, ServerConfig


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("port", 65536, "port must be an integer from 0 to 65535, got 65536"),
        ("port", None, "port must be an integer from 0 to 65535, got None"),
        ("http_port", -1, "http_port must be an integer from 0 to 65535, got -1"),
        ("process_port", 65536, "process_port must be an integer from 0 to 65535, got 65536"),
        ("processes", 0, "processes must be an integer of 1 or more, got 0"),
        ("metrics_port", True, "metrics_port must be an integer from 0 to 65535, got True"),
        ("keep_versions", 0, "keep_versions must be an integer of 1 or more, got 0"),
        ("max_concurrent", 0, "max_concurrent must be an integer of 1 or more, got 0"),
        ("max_request_bytes", 1.5, "max_request_bytes must be an integer of 1 or more, got 1.5"),
        ("replica_id", -2, "replica_id must be an integer of -1 or more, got -2"),
        ("drain_seconds", -1, "drain_seconds must be a number of 0 or more, got -1"),
        ("poll_seconds", float("nan"), "poll_seconds must be a number of 0 or more, got nan"),
        ("fetch_timeout", 0, "fetch_timeout must be above 0"),
        ("read_seconds", 0, "read_seconds must be above 0"),
    ],
)
def test_values_out_of_range(option: str, value: Any, message: str) -> None:
    with pytest.raises(InputError) as raised:
        ServerConfig(**{option: value})
    assert str(raised.value) == message


@pytest.mark.parametrize("settings", [{"max_rows": 0}, {"max_wait": -1}, {"workers": True}])
def test_batching_out_of_range(settings: dict[str, int]) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        Batching(**settings)


def test_none_leaves_optional_ports_and_the_default_number_of_versions() -> None:
    config = ServerConfig(http_port=None, metrics_port=None, keep_versions=None)
    assert (config.http_port, config.metrics_port, config.keep_versions) == (None, None, None)


def test_ports_of_several_processes_must_exist() -> None:
    for option in ("metrics_port", "process_port"):
        ServerConfig(processes=2, **{option: 65534})
        with pytest.raises(InputError, match=f"{option} must leave ports for 2 processes"):
            ServerConfig(processes=2, **{option: 65535})
