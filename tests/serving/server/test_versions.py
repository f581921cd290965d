"""Labels of versions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalith.errors import InputError, RemoteError
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import ServerConfig
from megalith.serving.server.versions import LABELS, TRAFFIC, read_labels, write_labels
from tests.serving.exports import INPUTS, ServerClient, export_version, request_of


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([], "labels must be a dict"),
        ({"7": 1}, "not a number"),
        ({"a b": 1}, "label 'a b'"),
        ({"": 1}, "label ''"),
        ({"a": -1}, "version of 'a'"),
        ({"a": "1"}, "version of 'a'"),
        ({f"v{k}": 1 for k in range(1001)}, "more than 1000"),
    ],
)
def test_wrong_labels_are_refused(tmp_path: Path, labels: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        write_labels(tmp_path, labels)
    assert not (tmp_path / LABELS).exists()
    (tmp_path / LABELS).write_text(json.dumps(labels))
    with pytest.raises(InputError, match=message) as raised:
        read_labels(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_labels_are_written_and_read(tmp_path: Path) -> None:
    assert read_labels(tmp_path) == {}
    write_labels(tmp_path, {"stable": 3})
    assert read_labels(tmp_path) == {"stable": 3}
    (tmp_path / LABELS).write_bytes(b"{")
    with pytest.raises(InputError, match="is not valid JSON"):
        read_labels(tmp_path)


def test_the_split_of_an_earlier_file_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = {"labels": {"stable": 3}, "traffic": {"stable": 90, "4": 10}}
    (tmp_path / TRAFFIC).write_text(json.dumps(before))
    for _ in range(2):
        assert read_labels(tmp_path) == {"stable": 3}
    assert caplog.text.count("requests are not split between versions any more") == 1
    write_labels(tmp_path, {"canary": 4})
    assert read_labels(tmp_path) == {"canary": 4}


# ---- a server


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exports")
    for version in (1, 2, 3):
        export_version(out, version=version, seed=version)
    return out


@pytest.fixture
def server(exports: Path) -> Iterator[ModelServer]:
    write_labels(exports, {"stable": 1, "canary": 2})
    with ModelServer(exports, ServerConfig(poll_seconds=3600, trial="never")) as started:
        yield started


def test_versions_with_a_label_are_loaded_and_answer_by_it(server: ModelServer) -> None:
    (model,) = server.models
    assert list(model.versions) == [1, 2, 3]
    request = request_of(INPUTS)
    with ServerClient(server.address) as ask:
        assert ask.send(request)[1].version.value == 3  # the newest
        for label, number in (("stable", 1), ("canary", 2)):
            request.model_spec.version_label = label
            assert ask.send(request)[1].version.value == number
            assert list(ask.status(label=label)) == [number]
        model.labels = {"zero": 0}  # 0 is not "any version" if a label names it
        request.model_spec.version_label = "zero"
        with pytest.raises(RemoteError, match="no version 0"):
            ask.send(request)
        with pytest.raises(RemoteError, match="no version 0"):
            ask.status(label="zero")
        server.refresh()
        request.model_spec.version_label = "other"
        with pytest.raises(RemoteError, match="no version label 'other'; its labels are stable, canary"):
            ask.send(request)


def test_labels_change_while_the_server_runs(
    server: ModelServer, exports: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model,) = server.models
    write_labels(exports, {"canary": 2})
    server.refresh()
    assert (model.labels, list(model.versions)) == ({"canary": 2}, [2, 3])

    (exports / LABELS).write_text("{")
    server.refresh()
    server.refresh()
    assert (model.labels, list(model.versions)) == ({"canary": 2}, [2, 3])
    assert caplog.text.count("keeps its labels") == 1

    (exports / LABELS).unlink()
    server.refresh()
    assert (model.labels, list(model.versions)) == ({}, [3])
