"""Labels of versions, and the split of requests between versions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from megalith.errors import InputError, RemoteError
from megalith.serving.proto.message_types import PredictResponse
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import ServerConfig
from megalith.serving.server.versions import (
    TRAFFIC,
    VersionRules,
    choose_version,
    point_of_key,
    point_of_request,
)
from tests.serving.exports import INPUTS, ServerClient, export_version, request_of

KEYS = [f"user-{number}" for number in range(2000)]


# ---- rules


def test_shares_of_keys_are_those_of_the_split_and_do_not_change() -> None:
    rules = VersionRules({"stable": 3, "canary": 4}, {"stable": 90, "canary": 10})
    chosen = {key: choose_version(rules, {3, 4}, point_of_key("movies", key)) for key in KEYS}
    assert 0.07 < Counter(chosen.values())[4] / len(KEYS) < 0.13
    assert point_of_key("movies", "user-7") == pytest.approx(33.5669, abs=1e-4)  # in every process
    assert point_of_key("movies", "user-7") != point_of_key("books", "user-7")

    grown = VersionRules({}, {"3": 70, "4": 30})
    moved = {key for key in KEYS if choose_version(grown, {3, 4}, point_of_key("movies", key)) != chosen[key]}
    assert all(chosen[key] == 3 for key in moved), "keys move only to the version whose share grows"


def test_requests_without_a_key_are_spread_evenly() -> None:
    rules = VersionRules({}, {"3": 90, "4": 10})
    counts = Counter(choose_version(rules, {3, 4}, point_of_request(number)) for number in range(1000))
    assert 98 <= counts[4] <= 102


@pytest.mark.parametrize(
    ("available", "point", "expected"),
    [
        ({3, 4, 5}, 0.0, 4),
        ({3, 4, 5}, 99.999, 3),
        ({3, 4, 5}, None, 3),
        ({4, 5}, 99.0, 4),
        ({5}, 50.0, None),
        ({2, 3}, 1.0, 3),
    ],
)
def test_versions_that_are_not_available_have_no_share(
    available: set[int], point: float | None, expected: int | None
) -> None:
    rules = VersionRules({}, {"3": 60, "4": 40, "2": 0})
    assert choose_version(rules, available, point) == expected


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([], "must be an object"),
        ({"other": 1}, "must be an object"),
        ({"labels": {"7": 1}}, "not a number"),
        ({"labels": {"a b": 1}}, "label 'a b'"),
        ({"labels": {"": 1}}, "label ''"),
        ({"labels": {"a": -1}}, "version of 'a'"),
        ({"labels": {"a": "1"}}, "version of 'a'"),
        ({"labels": 3}, "labels"),
        ({"traffic": {"a": 100}}, "neither a label nor a version; labels: none"),
        ({"traffic": {"1": 99}}, "add up to 100 percent, not 99"),
        ({"traffic": {"1": 101, "2": -1}}, "traffic of '1'"),
        ({"traffic": {"1": True}}, "traffic of '1'"),
        ({"traffic": {"1": None}}, "traffic of '1'"),
    ],
)
def test_wrong_rules_are_refused(tmp_path: Path, rules: Any, message: str) -> None:
    (tmp_path / TRAFFIC).write_text(json.dumps(rules))
    with pytest.raises(InputError, match=message) as raised:
        VersionRules.read(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_rules_are_written_and_read(tmp_path: Path) -> None:
    assert VersionRules.read(tmp_path) == VersionRules()
    rules = VersionRules({"stable": 3}, {"stable": 25.5, "9": 74.5})
    rules.write(tmp_path)
    assert VersionRules.read(tmp_path) == rules
    assert rules.shares == ((9, 74.5), (3, 25.5))
    (tmp_path / TRAFFIC).write_bytes(b"{")
    with pytest.raises(InputError, match="is not valid JSON"):
        VersionRules.read(tmp_path)


# ---- a server


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exports")
    for version in (1, 2, 3):
        export_version(out, version=version, seed=version)
    return out


@pytest.fixture
def server(exports: Path) -> Iterator[ModelServer]:
    VersionRules({"stable": 1, "canary": 2}, {"stable": 75, "canary": 25}).write(exports)
    with ModelServer(exports, ServerConfig(poll_seconds=3600, trial="never")) as started:
        yield started


def version_of(server: ModelServer, key: str | None = None) -> int:
    """The version that answers a request."""
    metadata = [] if key is None else [("megalith-request-key", key)]
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        data = call(request_of(INPUTS).SerializeToString(), metadata=metadata, timeout=20)
    number: int = PredictResponse.FromString(data).model_spec.version.value
    return number


def test_versions_that_rules_name_are_loaded_and_answer_by_label(server: ModelServer) -> None:
    (model,) = server.models
    assert list(model.versions) == [1, 2, 3]  # the newest too, although it has no share
    request = request_of(INPUTS)
    with ServerClient(server.address) as ask:
        for label, number in (("stable", 1), ("canary", 2)):
            request.model_spec.version_label = label
            assert ask.send(request)[1].version.value == number
            assert list(ask.status(label=label)) == [number]
        model.rules = VersionRules({"zero": 0})  # 0 is not "any version" if a label names it
        request.model_spec.version_label = "zero"
        with pytest.raises(RemoteError, match="no version 0"):
            ask.send(request)
        with pytest.raises(RemoteError, match="no version 0"):
            ask.status(label="zero")
        server.refresh()
        request.model_spec.version_label = "other"
        with pytest.raises(RemoteError, match="no version label 'other'; its labels are stable, canary"):
            ask.send(request)


def test_requests_are_split_and_keys_stay(server: ModelServer) -> None:
    counts = Counter(version_of(server) for _ in range(12))
    assert (counts[1] + counts[2], counts[3]) == (12, 0)
    assert 2 <= counts[2] <= 4
    for key in KEYS[:6]:
        expected = 2 if point_of_key("movies", key) < 25 else 1
        assert {version_of(server, key) for _ in range(2)} == {expected}


def test_rules_change_while_the_server_runs(
    server: ModelServer, exports: Path, caplog: pytest.LogCaptureFixture
) -> None:
    VersionRules({"canary": 2}, {"canary": 100}).write(exports)
    server.refresh()
    assert version_of(server) == 2
    (model,) = server.models
    assert list(model.versions) == [2, 3]

    (exports / TRAFFIC).write_text("{")
    server.refresh()
    server.refresh()
    assert version_of(server) == 2
    assert caplog.text.count("keeps its labels and its split") == 1

    (exports / TRAFFIC).unlink()
    server.refresh()
    assert version_of(server) == 3
    assert list(model.versions) == [3]
