"""megalith serve: serves a directory until a signal stops it."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.errors import InputError
from megalith.models import Model
from megalith.serving.discovery import FileDiscovery
from megalith.serving.server import repository
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.versions import write_labels
from megalith.training.export import export_newest
from megalith.training.model import load_trained
from tests.cli.support import megalith, words
from tests.forked import Forked
from tests.forked import megalith as command
from tests.serving.exports import ServerClient, export_version, logits, request_of, rows

FEATURES, DENSE = rows(2)


def served(tmp_path: Path, *arguments: object) -> Forked:
    """`megalith serve` in a separate process."""
    return Forked(tmp_path / "output", command, "serve", *arguments, "--port", 0)


def train(run: Path, *more: str) -> Model:
    """A run of five steps, and its model."""
    small = ["--dim", "4", "--batch-size", "32", "--threads", "1", "--max-steps", "5"]
    words("train", "--data", "synthetic", "--run", run, *small, *more)
    return load_trained(run)[0]


def test_a_signal_stops_the_server(tmp_path: Path) -> None:
    model = export_version(tmp_path / "exports")
    found = tmp_path / "servers.json"
    with served(tmp_path, tmp_path / "exports", "--discovery", f"file:{found}", "--trial", "never") as server:
        address = server.printed(r"gRPC on (\S+)\n")
        assert "movies version 1\n" in server.output
        with ServerClient(address) as ask:
            outputs = ask({**FEATURES, "dense": DENSE})
            torch.testing.assert_close(outputs["logits"], logits(model, FEATURES, DENSE))
        with FileDiscovery(found) as discovery:
            assert [replica.address for replica in discovery.replicas("movies:standalone")] == [address]
        assert server.end(signal.SIGTERM) == 0
        with FileDiscovery(found) as discovery:
            assert discovery.replicas("movies:standalone") == ()


@pytest.mark.usefixtures("restore_threads")
def test_following_a_run_waits_for_its_first_checkpoint_and_serves_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with served(tmp_path, run, "--follow", "--model-name", "clicks", "--trial", "never") as server:
        server.printed("(waiting) for the first checkpoint")
        model = train(run)
        with ServerClient(server.printed(r"gRPC on (\S+)\n")) as ask:
            for name, table in model.embeddings.shards.local.items():
                ids = torch.cat([chunk.ids for chunk in table.scan()])
                rows = ask({name: ids}, signature="lookup", model="clicks")[name]
                assert torch.equal(rows, table.lookup(ids))
            position = ask.send(request_of({}, model="clicks", signature="sync_position"))[0]
            assert position["step"].tolist() == [5]
        assert server.end(signal.SIGINT) == 0


@pytest.mark.usefixtures("restore_threads")
def test_a_run_is_exported_again_only_if_its_checkpoint_changed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run)
    for again, versions in ((False, ["5"]), (False, ["5"]), (True, ["5", "6"]), (True, ["6", "7"])):
        if again:
            train(run, "--start-over")  # to the same step, but another checkpoint
        with ThreadPoolExecutor(2) as pool:  # as two servers that start together
            assert len(set(pool.map(lambda _: export_newest(run, None), range(2)))) == 1
        assert exported(run / "exports" / "deepfm") == versions
    write_labels(run / "exports" / "deepfm", {"stable": 6})
    train(run, "--start-over")
    export_newest(run, None)
    versions = ["6", "7", "8"]  # an export with a label stays
    assert exported(run / "exports" / "deepfm") == versions
    export_newest(run, "clicks")  # a server with another name has exports of its own
    assert exported(run / "exports" / "clicks") == ["5"]
    assert exported(run / "exports" / "deepfm") == versions
    with pytest.raises(InputError, match="the name of the model"):
        export_newest(run, "..")


def exported(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "holds no exported model"),
        (["absent", "--follow", "--host", "0.0.0.0"], "--write-token-file"),
        (["absent", "--token-file", "nowhere"], "token: cannot read nowhere"),
        (["absent", "--tls-cert", "x"], "--tls-key"),
        (["absent", "--discovery", "other:x"], "must start with one of"),
        (["absent", "--discovery", "static:h:1", "--host", "0.0.0.0"], "--advertise"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    ended = megalith("serve", *arguments)
    assert ended.exit_code == 1
    assert message in ended.stderr
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_ends_a_start_that_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_version(tmp_path)
    ended: list[str] = []
    tried: list[Path] = []

    def opens(server: ModelServer, directory: Path) -> Any:
        signal.raise_signal(signal.SIGTERM)
        ended.append("it continued")

    monkeypatch.setattr(repository, "run_canary", lambda directory, *_, **options: tried.append(directory))
    monkeypatch.setattr(ModelServer, "_open", opens)
    result = megalith("serve", tmp_path, "--port", 0)
    assert (result.exit_code, ended) == (0, [])
    assert len(tried) == 1  # unlike a ModelServer, the command tries the first version too
    assert "shutting down" in result.stdout
