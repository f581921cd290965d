"""`megalith train --publish`: what a run trains is served while it trains, and all of it at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

from megalith import checkpoint
from megalith.cli.main import app
from megalith.errors import InputError
from megalith.models import Model
from megalith.serving.exported.servable import Servable
from megalith.serving.server.model_server import ModelServer
from megalith.training import Run, RunConfig, Watcher, load_trained
from megalith.training.exporting import export_run
from tests.distributed.ranks import run_ranks
from tests.serving.zookeeper import free_port


def config_of(**flags: Any) -> RunConfig:
    return RunConfig().changed(
        data_kind="teacher",
        data_batch_size=32,
        data_options={"num_batches": 30},
        model_dim=4,
        train_threads=1,
        train_publish_interval=1e-3,
        train_publish_name="clicks",
        **flags,
    )


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def assert_served(server: ModelServer, model: Model) -> None:
    (served,) = server.models
    servable = served.subscriber.servable
    assert isinstance(servable, Servable)
    assert_part(servable, model)


def assert_part(servable: Servable, model: Model) -> None:
    """Rows that are this part's, and dense weights if it has some, are the model's."""
    signature = servable.signature
    for name, table in model.embeddings.shards.local.items():
        for chunk in table.scan() if signature.part != "entry" else ():
            owner = signature.tables[name].router().owner(chunk.ids)
            mine = owner == (signature.shard or 0)
            assert bool(mine.any())
            assert torch.equal(servable.lookup(name, chunk.ids[mine]), chunk.rows[mine]), name
    for name, weight in servable.dense_weights.items():
        assert torch.equal(weight, model.state_dict()[name]), name


class Told(Watcher):
    """Starts a server of the run's first checkpoint in the middle of training."""

    def __init__(self, run: Run, stack: ExitStack, port: int = 0) -> None:
        self._run, self._stack, self._port = run, stack, port
        self.server: ModelServer | None = None
        self.lags: list[str] = []

    def batch(self, step: int, samples: int, loss: float) -> None:
        if step % 10 == 5 and self.server is None:
            exports = self._run.directory / "exports"
            export_run(self._run.directory, exports, name="clicks")
            self.server = self._stack.enter_context(
                ModelServer(exports, port=self._port, allow_writes=True, checkpoint=self._run.directory)
            )

    def lagging(self, targets: Sequence[str]) -> None:
        self.lags += targets


def test_a_server_of_the_first_checkpoint_ends_with_everything_that_was_trained(
    tmp_path: Path, stack: ExitStack
) -> None:
    port = free_port()
    run = Run(config_of(train_publish=f"static:127.0.0.1:{port}", train_save_every=10), tmp_path / "run")
    told = Told(run, stack, port)

    run.train(told)

    assert told.server is not None
    assert told.lags == []
    assert_served(told.server, run.model)


def test_a_resumed_run_goes_on_with_its_servers(tmp_path: Path, stack: ExitStack) -> None:
    port = free_port()
    url = f"static:127.0.0.1:{port}"
    run = Run(config_of(train_publish=url, train_max_steps=8), tmp_path / "run")
    told = Told(run, stack, port)
    run.train(told)
    resumed = Run.resume(tmp_path / "run", {"max_steps": 16})
    saves = checkpoint.read_manifest(tmp_path / "run" / "checkpoint").tip
    assert resumed.config.train.publish == url

    resumed.train()

    assert told.server is not None
    assert_served(told.server, resumed.model)
    quiet = Run.resume(tmp_path / "run", {"max_steps": 17, "publish": ""})
    quiet.train()
    with pytest.raises(AssertionError):
        assert_served(told.server, quiet.model)
    assert checkpoint.read_manifest(tmp_path / "run" / "checkpoint").tip != saves
    (served,) = told.server.models
    assert served.subscriber.counters.replacements == 0


def test_a_server_that_is_not_there_is_named_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalith.training.publishing.FINISH_SECONDS", 0.2)
    run = Run(config_of(train_publish="static:127.0.0.1:9", train_max_steps=2), tmp_path / "run")
    with ExitStack() as stack:
        told = Told(run, stack)
        run.train(told)

    (text,) = told.lags
    assert text.startswith("clicks at 127.0.0.1:9: ")


@pytest.mark.parametrize("publish", ["nowhere", "static:", "zk:"])
def test_a_discovery_that_makes_no_sense_is_refused_before_anything_is_written(
    tmp_path: Path, publish: str
) -> None:
    with pytest.raises(InputError):
        Run(config_of(train_publish=publish), tmp_path / "run")

    assert not (tmp_path / "run").exists()


def resume_on_ranks(run: Path, url: str) -> int:
    resumed = Run.resume(run, {"publish": url, "max_steps": 12})
    told = Told(resumed, ExitStack())
    told.server = cast(ModelServer, True)  # it runs elsewhere
    resumed.train(told)
    assert told.lags == []
    return len(resumed.model.embeddings.shards.local["user"])


@pytest.mark.parametrize("num_shards", [0, 3])
def test_ranks_push_each_its_own_rows_wherever_they_are_served(
    tmp_path: Path, stack: ExitStack, num_shards: int
) -> None:
    first = Run(config_of(train_max_steps=4), tmp_path / "run")
    first.train()
    export_run(tmp_path / "run", tmp_path / "exports", name="clicks", num_shards=num_shards)
    url = f"file:{tmp_path / 'servers.json'}"
    server = stack.enter_context(ModelServer(tmp_path / "exports", allow_writes=True, discovery=url))

    rows = run_ranks(resume_on_ranks, tmp_path / "run", url)

    assert min(rows) > 0
    trained, _ = load_trained(tmp_path / "run")
    parts = {model.name: model.subscriber.servable for model in server.models}
    assert len(parts) == (1 if num_shards == 0 else 1 + num_shards)
    for servable in parts.values():
        assert_part(servable, trained)


def test_the_command_says_which_servers_lag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.training.publishing.FINISH_SECONDS", 0.2)
    config = tmp_path / "run.toml"
    config.write_text('[data]\nkind = "teacher"\nbatch_size = 32\n[data.options]\nnum_batches = 4\n')

    result = CliRunner().invoke(
        app,
        [
            "train",
            *("--config", str(config), "--run", str(tmp_path / "run")),
            *("--publish", "static:127.0.0.1:9", "--publish-interval", "0.5", "--model-name", "clicks"),
        ],
    )

    assert result.exit_code == 0, result.output
    assert "not everything was pushed: clicks at 127.0.0.1:9" in " ".join(result.output.split())
