"""Models and versions: where they are found, how they are called, and how a new one takes over."""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.errors import RemoteError, SequenceError, UsageError
from megalith.serving.discovery import FileDiscovery, StaticDiscovery
from megalith.serving.server import repository
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import ServerConfig
from megalith.serving.sync.protocol import MessageHeader, string_array
from tests.serving.exports import (
    ServerClient,
    export_version,
    fails,
    logits,
    request_of,
    rows,
    serving,
    wait_until,
)

FEATURES, DENSE = rows(4)
INPUTS = {**FEATURES, "dense": DENSE}


def version_of(ask: ServerClient, **spec: object) -> int:
    number: int = ask.send(request_of(INPUTS, **spec))[1].version.value  # type: ignore[arg-type]
    return number


def test_the_newest_version_answers(tmp_path: Path) -> None:
    export_version(tmp_path, version=9)
    export_version(tmp_path, version=10, seed=1)
    with serving(tmp_path) as (_, ask):
        assert version_of(ask) == 10
        with pytest.raises(RemoteError, match="no version 9; it has 10"):
            ask(INPUTS, version=9)


def test_several_versions_answer_where_asked_to(tmp_path: Path) -> None:
    models = {version: export_version(tmp_path, version=version, seed=version) for version in (1, 2, 3)}
    with serving(tmp_path, keep_versions=2) as (_, ask):
        assert version_of(ask) == 3
        for version in (2, 3):
            outputs = ask(INPUTS, version=version)
            torch.testing.assert_close(outputs["logits"], logits(models[version], FEATURES, DENSE))
        assert ask.status() == {3: (30, ""), 2: (30, "")}


def test_a_new_version_takes_over_without_dropping_a_request(tmp_path: Path) -> None:
    before = logits(export_version(tmp_path, version=1, seed=1), FEATURES, DENSE)
    with serving(tmp_path, poll_seconds=0.01) as (server, ask):
        stop = threading.Event()
        switched = threading.Event()

        def load() -> list[tuple[int, torch.Tensor]]:
            seen = []
            while not stop.is_set():
                outputs, spec = ask.send(request_of(INPUTS))
                seen.append((spec.version.value, outputs["logits"]))
                if spec.version.value == 2:
                    switched.set()
            return seen

        with ThreadPoolExecutor(8) as pool:
            loads = [pool.submit(load) for _ in range(8)]
            try:
                after = logits(export_version(tmp_path, version=2, seed=2), FEATURES, DENSE)
                assert switched.wait(60)
            finally:
                stop.set()
            seen = [each for load in loads for each in load.result(60)]
        for version, scores in seen:
            torch.testing.assert_close(scores, before if version == 1 else after)
        server.refresh()  # returns when the old version has ended
        assert {version for version, _ in seen} == {1, 2}
        assert ask.status() == {2: (30, ""), 1: (50, "")}


def test_a_broken_version_is_reported_and_the_old_one_continues(tmp_path: Path) -> None:
    export_version(tmp_path, version=1)
    with serving(tmp_path, poll_seconds=3600) as (server, ask):
        export_version(tmp_path, version=2)
        table = tmp_path / "2" / "signature.json"
        table.write_text(table.read_text().replace('"format_version": 2', '"format_version": 99'))
        server.refresh()
        server.refresh()
        assert version_of(ask) == 1
        state, error = ask.status()[2]
        assert (state, "99" in error) == (50, True)
        assert 'megalith_failed_versions_total{model="movies"} 1.0' in server.metrics.text().decode()

        export_version(tmp_path, version=3)
        server.refresh()
        assert version_of(ask) == 3


def test_a_model_that_was_never_opened_has_a_status_too(tmp_path: Path) -> None:
    export_version(tmp_path / "films", name="films")
    (tmp_path / "songs" / "1").mkdir(parents=True)
    with serving(tmp_path) as (_, ask):
        state, error = ask.status("songs")[1]
        assert (state, "signature.json" in error) == (50, True)
        with fails("UNAVAILABLE", "has no available version"):
            ask(INPUTS, model="songs")


def test_a_version_in_use_is_closed_by_its_last_user(tmp_path: Path) -> None:
    export_version(tmp_path, version=1)
    with ModelServer(tmp_path, ServerConfig(poll_seconds=3600, drain_seconds=0.0)) as server:
        (model,) = server.models
        with model.version(1) as used:
            export_version(tmp_path, version=2)
            server.refresh()
            assert list(model.versions) == [2]
            rows = used.servable.lookup("user", FEATURES["user"])
            assert rows.any()
        used.join(20.0)
        with pytest.raises(UsageError, match="is closed"):
            used.servable.lookup("user", FEATURES["user"])


def test_a_lookup_keeps_its_version_open_after_its_client_has_left(tmp_path: Path) -> None:
    """Otherwise a thread would read rows from a file that is not mapped any more."""
    export_version(tmp_path, version=1)
    with serving(tmp_path, poll_seconds=3600) as (server, ask):
        version: Any = server.models[0].newest
        look_up, entered, go = version.servable.lookup, threading.Event(), threading.Event()

        def hold(*arguments: Any) -> Any:
            entered.set()
            assert go.wait(20)
            return look_up(*arguments)

        version.servable.lookup = hold
        with fails("DEADLINE_EXCEEDED"):
            ask({"user": FEATURES["user"]}, signature="lookup", timeout=0.5)
        assert entered.wait(20)
        export_version(tmp_path, version=2)
        server.refresh()
        assert list(server.models[0].versions) == [2]
        assert not version._ended.is_set()
        go.set()
        version.join(20.0)
        assert version._ended.is_set()


def test_deleting_the_newest_version_rolls_back_and_pushes_continue(tmp_path: Path) -> None:
    for version in (1, 2):
        export_version(tmp_path, version=version)
    ids, row = torch.tensor([7]), torch.full((1, 5), 3.0)
    with serving(tmp_path, poll_seconds=3600, allow_writes=True) as (server, ask):
        ask({"user_id": ids, "user_value": torch.ones(1, 5)}, signature="hashtable_assign")
        shutil.rmtree(tmp_path / "2")
        server.refresh()
        assert version_of(ask) == 1
        result = ask({"user_id": ids, "user_value": row}, signature="hashtable_assign")
        assert result["user_result"].tolist() == [1]
        assert torch.equal(ask({"user": ids}, signature="lookup")["user"], row)
        shutil.rmtree(tmp_path / "1")
        server.refresh()
        assert version_of(ask) == 1, "the last version stays available even if its directory is deleted"


def test_a_version_in_use_delays_no_other_model(tmp_path: Path) -> None:
    for name in ("films", "songs"):
        export_version(tmp_path / name, name=name)
    with serving(tmp_path, poll_seconds=3600) as (server, ask):
        films = server.models[0]
        with films.version(1):
            for name in ("films", "songs"):
                export_version(tmp_path / name, name=name, version=2)
            server.refresh()
            assert [version_of(ask, model=name) for name in ("films", "songs")] == [2, 2]
            assert ask.status("films") == {2: (30, ""), 1: (40, "")}
        wait_until(lambda: ask.status("films") == {2: (30, ""), 1: (50, "")})


def test_a_version_that_could_not_be_opened_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_version(tmp_path, version=1)
    with serving(tmp_path, poll_seconds=3600) as (server, ask):
        export_version(tmp_path, version=2)
        opens, failures = server._repository._open_version, [OSError("too many open files")] * 2

        def fails(directory: Path) -> Any:
            if failures:
                raise failures.pop()
            return opens(directory)

        monkeypatch.setattr(server._repository, "_open_version", fails)
        server.refresh()
        server.refresh()
        assert len(failures) == 1, "not at once"
        now = time.monotonic() + repository.RETRY_SECONDS
        monkeypatch.setattr(repository, "time", SimpleNamespace(monotonic=lambda: now))
        server.refresh()
        server.refresh()
        assert (len(failures), version_of(ask)) == (0, 1)
        now += 2 * repository.RETRY_SECONDS
        server.refresh()
        assert version_of(ask) == 2
        assert 'megalith_failed_versions_total{model="movies"} 1.0' in server.metrics.text().decode()


def test_a_version_that_is_fixed_in_place_is_served(tmp_path: Path) -> None:
    export_version(tmp_path, version=1)
    export_version(tmp_path, version=2)
    signature = tmp_path / "2" / "signature.json"
    text = signature.read_text()
    signature.write_text(text[:-10])
    with serving(tmp_path, poll_seconds=3600) as (server, ask):
        assert version_of(ask) == 1
        signature.write_text(text)
        server.refresh()
        assert version_of(ask) == 2


def test_versions_are_int64_and_as_many_as_there_are(tmp_path: Path) -> None:
    for number in (*range(1100), 2**63 - 1, 2**63, 10**30):
        (tmp_path / str(number)).mkdir()
    (tmp_path / "007").mkdir()
    assert sorted(repository.versions_of(tmp_path)) == [*range(1100), 2**63 - 1]


def test_a_directory_of_models(tmp_path: Path) -> None:
    for name, seed in (("films", 1), ("books", 2)):
        export_version(tmp_path / f"any-{name}", name=name, seed=seed)
    with serving(tmp_path, poll_seconds=3600) as (server, ask):
        assert [model.name for model in server.models] == ["books", "films"]
        films, books = (ask(INPUTS, model=name)["logits"] for name in ("films", "books"))
        assert not torch.equal(films, books)
        export_version(tmp_path / "later", name="songs")
        server.refresh()
        assert version_of(ask, model="songs") == 1


def test_two_directories_of_one_model(tmp_path: Path) -> None:
    export_version(tmp_path / "a", version=1)
    export_version(tmp_path / "b", version=2)
    with serving(tmp_path) as (server, ask):
        assert version_of(ask) == 1
        (other,) = [model for model in server.models if not model.available]
        assert "served from" in other.statuses[2].error


def test_a_version_that_was_renamed_is_refused(tmp_path: Path) -> None:
    export_version(tmp_path, version=1)
    shutil.copytree(tmp_path / "1", tmp_path / "5")
    with serving(tmp_path) as (_, ask):
        assert version_of(ask) == 1
        assert "has version 1" in ask.status()[5][1]


def test_parts_of_a_model_in_one_server(tmp_path: Path) -> None:
    model = export_version(tmp_path, num_shards=2)
    discovery = StaticDiscovery({})
    with ModelServer(tmp_path, ServerConfig(fetch_timeout=20), discovery=discovery) as server:
        assert [each.name for each in server.models] == ["movies:entry", "movies:ps_0", "movies:ps_1"]
        services = ["movies:entry", "movies:ps_0", "movies:ps_1"]
        assert [discovery.replicas(each)[0].address for each in services] == [server.address] * 3
        with ServerClient(server.address) as ask:
            for name in ("movies", "movies:entry"):
                outputs = ask(INPUTS, model=name)
                torch.testing.assert_close(outputs["logits"], logits(model, FEATURES, DENSE))
            with pytest.raises(RemoteError, match="serves rows: use signature 'lookup'"):
                ask(INPUTS, model="movies:ps_0")
            for shard, ids in enumerate((torch.tensor([2, 4]), torch.tensor([3, 5]))):
                part: Any = {"model": f"movies:ps_{shard}", "signature": "lookup"}
                rows = ask({"user": ids}, **part)["user"]
                assert torch.equal(rows, model.embeddings.shards.local["user"].lookup(ids))
                with pytest.raises(RemoteError, match="belongs to another part"):
                    ask({"user": ids + 1}, **part)
    assert not discovery.replicas("movies:entry")


def test_the_hit_rate_of_an_entry(tmp_path: Path) -> None:
    export_version(tmp_path, num_shards=2)
    with serving(tmp_path, discovery=StaticDiscovery({}), fetch_timeout=20) as (server, ask):
        ask({**INPUTS, "user": torch.tensor([1, 2, 3, 10**9])}, model="movies:entry")
        text = server.metrics.text().decode()
        assert 'megalith_ids_looked_up_total{model="movies:entry",version="1"} 12.0' in text
        assert 'megalith_ids_missing_total{model="movies:entry",version="1"} 1.0' in text


def test_models_are_registered_and_unregistered(tmp_path: Path) -> None:
    export_version(tmp_path / "models" / "movies")
    path = tmp_path / "servers.json"
    with (
        ModelServer(tmp_path / "models", ServerConfig(discovery=f"file:{path}", replica_id=4)) as server,
        FileDiscovery(path) as discovery,
    ):
        for part in ("standalone", "entry", "ps_0"):
            (replica,) = discovery.replicas(f"movies:{part}")
            assert (replica.address, replica.replica_id) == (server.address, 4)
    assert "127.0.0.1" not in json.dumps(json.loads(path.read_text()))


def test_sessions_of_training_are_counted(tmp_path: Path) -> None:
    export_version(tmp_path)
    config = ServerConfig(allow_writes=True, poll_seconds=3600)
    with ModelServer(tmp_path, config) as server:
        (model,) = server.models
        assert model.subscriber is not None
        begin = {"base": string_array("")}
        for session, number in (("a" * 32, 1), ("b" * 32, 2)):
            header = MessageHeader(session, sequence=1, number=number)
            model.subscriber.handle("sync_begin", begin, dict(header.metadata()))
        old = dict(MessageHeader("a" * 32, sequence=2, number=1).metadata())
        with pytest.raises(SequenceError):
            model.subscriber.handle("sync_begin", begin, old)
        text = server.metrics.text().decode()
    for event, count in (("begun", 2), ("replaced", 1), ("refused", 1)):
        assert f'megalith_sessions_{event}_total{{model="movies"}} {count}.0' in text
