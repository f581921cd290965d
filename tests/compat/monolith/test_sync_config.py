"""The target list of parameter sync: the bytes of Monolith's ClientConfig."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.compat.monolith.agent_service import TargetExtraInfo
from megalith.compat.monolith.distributed_serving_ops import refresh_sync_config
from megalith.compat.monolith.sync_clients import read_sync_config
from megalith.errors import InputError
from megalith.serving.discovery import StaticDiscovery, SyncBackend
from megalith.serving.discovery.contract import SyncTargets
from megalith.serving.proto.message_types import ClientConfig


class Fixed(SyncBackend):
    """Always the same targets."""

    def __init__(self, targets: list[str] | dict[str, TargetExtraInfo]) -> None:
        self._targets = targets

    def subscribe_model(self, model_name: str) -> None:
        pass

    def get_sync_targets(self, sub_graph: str) -> SyncTargets:
        return f"movies:{sub_graph}", self._targets


def test_a_list_of_targets_has_no_extra_info() -> None:
    discovery = StaticDiscovery(["localhost:8888"])
    discovery.subscribe_model("test_ffm_model")

    assert refresh_sync_config(discovery, 1) == (
        b"\x0a\x13test_ffm_model:ps_1\x12\x10hashtable_assign\x1a\x0elocalhost:8888\x20\xb8\x17"
    )


def test_a_dict_of_targets_keeps_its_order_and_says_where_each_runs() -> None:
    data = refresh_sync_config(
        Fixed({"b:1": TargetExtraInfo("lf", "blue", 7), "a:1": TargetExtraInfo(replica_id=-1)}), 0
    )

    config = ClientConfig.FromString(data)
    assert list(config.targets) == ["b:1", "a:1"]
    first, second = config.targets_extra_info
    assert (first.idc, first.cluster, first.replica_id) == ("lf", "blue", 7)
    assert [second.HasField(name) for name in ("idc", "cluster", "replica_id")] == [False, False, True]
    assert second.replica_id == -1


def test_no_targets_is_a_config_too_and_what_is_no_address_is_refused() -> None:
    expected = ClientConfig(model_name="movies:ps_3", signature_name="hashtable_assign", timeout_in_ms=3000)
    assert read_sync_config(refresh_sync_config(Fixed([]), 3)) == expected
    assert read_sync_config(refresh_sync_config(Fixed({}), 3)) == expected
    with pytest.raises(InputError, match="movies:ps_0: target: 'unix:/tmp/x' is not an address"):
        refresh_sync_config(Fixed(["unix:/tmp/x"]), 0)


def test_what_is_not_said_has_monoliths_defaults() -> None:
    assert (read_sync_config(b"").timeout_in_ms, list(read_sync_config(b"").targets)) == (1000, [])


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (b"\xff\xff", "these 2 bytes are not a ClientConfig"),
        (ClientConfig(targets=["nowhere"]), "target: 'nowhere' is not an address"),
        (ClientConfig(timeout_in_ms=0), "timeout_in_ms must be above 0"),
        (ClientConfig(targets=["a:1"] * 10_001), "10001 targets, but at most 10000 are allowed"),
    ],
)
def test_configs_that_cannot_be_used_are_refused(config: object, match: str) -> None:
    with pytest.raises(InputError, match=match):
        read_sync_config(config)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_config_or_refused(data: bytes) -> None:
    try:
        config = read_sync_config(data)
    except InputError:
        return
    assert read_sync_config(config.SerializeToString()) == config
