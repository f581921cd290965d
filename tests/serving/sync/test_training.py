"""`megalith train --publish`: what a run trains is served while it trains, and all of it at the end."""

from __future__ import annotations

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
from megalith.serving.export.servable import Servable
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.security import Security
from megalith.serving.server.server_config import ServerConfig
from megalith.training import Run, RunConfig, Watcher, load_trained
from megalith.training.export import export_run
from megalith.training.publishing import Pushed
from tests.distributed.ranks import run_ranks
from tests.serving.certificates import make_certificates
from tests.serving.zookeeper import free_port


def config_of(**flags: Any) -> RunConfig:
    return RunConfig().changed(
        data_kind="synthetic",
        data_batch_size=32,
        data_options={"num_batches": 30},
        model_dim=4,
        train_threads=1,
        train_publish_interval=1e-3,
        train_publish_name="clicks",
        **flags,
    )


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


class PushWatcher(Watcher):
    """Starts a server of the run's first checkpoint in the middle of training."""

    def __init__(self, run: Run, stack: ExitStack, port: int = 0) -> None:
        self._run, self._stack, self._port = run, stack, port
        self.server: ModelServer | None = None
        self.result: Pushed | None = None

    def batch(self, step: int, samples: int, loss: float) -> None:
        if step % 10 == 5 and self.server is None:
            exports = self._run.directory / "exports"
            export_run(self._run.directory, exports, name="clicks")
            self.server = self._stack.enter_context(
                ModelServer(
                    exports, ServerConfig(port=self._port, allow_writes=True, checkpoint=self._run.directory)
                )
            )

    def pushed(self, pushed: Pushed) -> None:
        self.result = pushed


def test_a_server_of_the_first_checkpoint_ends_with_everything_that_was_trained(
    tmp_path: Path, stack: ExitStack
) -> None:
    port = free_port()
    run = Run(config_of(train_publish=f"static:127.0.0.1:{port}", train_save_every=10), tmp_path / "run")
    watcher = PushWatcher(run, stack, port)

    run.train(watcher)

    assert watcher.server is not None
    assert watcher.result is not None
    assert watcher.result.lagging == ()
    assert watcher.result.servers == 1
    assert watcher.result.rows >= sum(run.rows().values())
    assert_served(watcher.server, run.model)


def test_a_resumed_run_goes_on_with_its_servers(tmp_path: Path, stack: ExitStack) -> None:
    port = free_port()
    url = f"static:127.0.0.1:{port}"
    run = Run(config_of(train_publish=url, train_max_steps=8), tmp_path / "run")
    watcher = PushWatcher(run, stack, port)
    run.train(watcher)
    resumed = Run.resume(tmp_path / "run", {"max_steps": 16})
    saves = checkpoint.read_manifest(tmp_path / "run" / "checkpoint").tip
    assert resumed.config.train.publish == url

    resumed.train()

    assert watcher.server is not None
    assert_served(watcher.server, resumed.model)
    quiet = Run.resume(tmp_path / "run", {"max_steps": 17, "publish": ""})
    quiet.train()
    with pytest.raises(AssertionError):
        assert_served(watcher.server, quiet.model)
    assert checkpoint.read_manifest(tmp_path / "run" / "checkpoint").tip != saves
    (served,) = watcher.server.models
    assert served.subscriber.counters.replacements == 0


@pytest.mark.parametrize("publish", ["nowhere", "static:", "zk:"])
def test_a_discovery_that_makes_no_sense_is_refused_before_anything_is_written(
    tmp_path: Path, publish: str
) -> None:
    with pytest.raises(InputError):
        Run(config_of(train_publish=publish), tmp_path / "run")

    assert not (tmp_path / "run").exists()


def resume_on_ranks(run: Path, url: str) -> int:
    resumed = Run.resume(run, {"publish": url, "max_steps": 12})
    watcher = PushWatcher(resumed, ExitStack())
    watcher.server = cast(ModelServer, True)  # it runs elsewhere
    resumed.train(watcher)
    assert watcher.result is not None
    assert (watcher.result.lagging, watcher.result.servers) == ((), 1)
    return len(resumed.model.embeddings.shards.local["user"])


@pytest.mark.parametrize("num_shards", [0, 3])
def test_ranks_push_each_its_own_rows_wherever_they_are_served(
    tmp_path: Path, stack: ExitStack, num_shards: int
) -> None:
    first = Run(config_of(train_max_steps=4), tmp_path / "run")
    first.train()
    export_run(tmp_path / "run", tmp_path / "exports", name="clicks", num_shards=num_shards)
    url = f"file:{tmp_path / 'servers.json'}"
    server = stack.enter_context(
        ModelServer(tmp_path / "exports", ServerConfig(allow_writes=True, discovery=url))
    )

    rows = run_ranks(resume_on_ranks, tmp_path / "run", url)

    assert min(rows) > 0
    trained, _ = load_trained(tmp_path / "run")
    parts = {model.name: model.subscriber.servable for model in server.models}
    assert len(parts) == (1 if num_shards == 0 else 1 + num_shards)
    for servable in parts.values():
        assert_part(servable, trained)


def output_of_command(folder: Path, *flags: str) -> str:
    config = folder / "run.toml"
    config.write_text('[data]\nkind = "synthetic"\nbatch_size = 32\n[data.options]\nnum_batches = 4\n')
    train = ["train", "--config", str(config), "--run", str(folder / "run")]
    result = CliRunner().invoke(
        app, [*train, "--publish-interval", "0.5", "--model-name", "clicks", *flags], terminal_width=200
    )
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_the_command_reports_which_servers_lag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.training.publishing.FINISH_SECONDS", 0.2)

    output = output_of_command(tmp_path, "--publish", "static:127.0.0.1:9")

    assert "pushed 0 rows to 0 servers" in output
    assert output.count("some rows were not pushed: clicks at 127.0.0.1:9") == 1


def test_the_command_reports_that_discovery_lists_no_server(tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'servers.json'}"

    assert f"nothing was pushed: {url} lists no server" in output_of_command(tmp_path, "--publish", url)


def test_pushes_travel_by_tls_and_show_a_token(tmp_path: Path, stack: ExitStack) -> None:
    """And a run that shows another one, or none, changes nothing."""
    certificates = make_certificates(tmp_path)
    (tmp_path / "token").write_text("correct-horse\n")
    (tmp_path / "wrong").write_text("battery-staple\n")
    Run(config_of(train_max_steps=2), tmp_path / "run").train()
    export_run(tmp_path / "run", tmp_path / "exports", name="clicks")
    security = Security(
        certificate=certificates.server, key=certificates.server_key, write_token=tmp_path / "token"
    )
    server = stack.enter_context(
        ModelServer(tmp_path / "exports", ServerConfig(allow_writes=True, security=security))
    )
    address = f"localhost:{server.address.rpartition(':')[2]}"
    changes = {"publish": f"static:{address}", "publish_ca_file": str(certificates.authority)}

    def resume(steps: int, token: str) -> tuple[Run, Pushed]:
        files = {"publish_token_file": str(tmp_path / token)}
        run = Run.resume(tmp_path / "run", {**changes, **files, "max_steps": steps})
        watcher = PushWatcher(run, stack)
        watcher.server = server
        run.train(watcher)
        assert watcher.result is not None
        return run, watcher.result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalith.training.publishing.FINISH_SECONDS", 0.5)
        refused, pushed = resume(4, "wrong")
    assert [text.partition(": ")[0] for text in pushed.lagging] == [f"clicks at {address}"]
    with pytest.raises(AssertionError):
        assert_served(server, refused.model)

    run, pushed = resume(6, "token")
    assert (pushed.lagging, pushed.servers) == ((), 1)
    assert_served(server, run.model)
