"""Parameter sync by Monolith's names, with real servers of a model in two parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from megalith.compat.monolith.distributed_serving_ops import (
    ParameterSyncClient,
    create_parameter_sync_clients,
    parameter_sync_client_from_config,
    refresh_sync_config,
)
from megalith.compat.monolith.sync_clients import (
    SyncHandle,
    TrackedChanges,
)
from megalith.errors import InputError
from megalith.serving.client.credentials import Credentials
from megalith.serving.discovery import Replica, StaticDiscovery
from megalith.serving.export.exporter import export_model
from megalith.serving.proto.message_types import ClientConfig
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.security import Security
from megalith.serving.server.server_config import ServerConfig
from tests.compat.monolith.sync_client_support import responses, shards_of
from tests.serving.sync_support import LIMIT, Trainer, assert_equal, export_version, make_model


class Parts:
    """A model in training, served in two parts; a part may be killed and started again at its address."""

    def __init__(self, root: Path, stack: ExitStack, routing: str) -> None:
        self.model = make_model(dist_type=routing)
        self.trainer = Trainer(self.model, num_ids=300)
        self.trainer.step(2)
        self._root, self._stack, self._version = root, stack, 0
        self.export()
        self.servers = [self._start(part, 0) for part in range(2)]
        self.backend = StaticDiscovery(
            {f"movies:ps_{part}": [server.address] for part, server in enumerate(self.servers)}
        )
        self.backend.subscribe_model("movies")
        self.clients = create_parameter_sync_clients(2)
        for client in self.clients:
            stack.callback(client.close)
            client.attach(self.model.embeddings.shards)

    def _start(self, part: int, port: int) -> ModelServer:
        # A trial of a further version takes a new process: three seconds of the CPU.
        config = ServerConfig(port=port, allow_writes=True, poll_seconds=60.0, trial="never")
        return self._stack.enter_context(ModelServer(self._root / f"ps_{part}", config))

    def export(self) -> None:
        """Exports the tables as they are now."""
        self._version += 1
        shards = self.model.embeddings.shards
        export_model(shards, self._root, name="movies", version=self._version, num_shards=2)

    def restart(self, part: int) -> None:
        """Ends a server, if it still runs, and starts one with the rows of the export; clients reconnect."""
        self.servers[part].stop()
        self.servers[part] = self._start(part, int(self.servers[part].address.rpartition(":")[2]))
        self.await_connection(self.clients[part], part)

    def await_connection(self, client: ParameterSyncClient, part: int) -> None:
        connection = client.handle._channels.get(self.servers[part].address)
        grpc.channel_ready_future(connection.channel).result(LIMIT)

    def push(self, client: ParameterSyncClient, part: int) -> list[dict[str, Any]]:
        """The response of each target of a part."""
        return responses(client.create_sync_op(refresh_sync_config(self.backend, part)))

    def sync(self) -> list[dict[str, Any]]:
        """The responses of the targets of both parts."""
        return [each for part, client in enumerate(self.clients) for each in self.push(client, part)]

    def assert_equal(self) -> None:
        for server in self.servers:
            newest = server.models[0].newest
            assert newest is not None
            assert_equal(newest.servable, self.model, num_ids=300)


@pytest.fixture
def parts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Parts]:
    with ExitStack() as stack:
        yield Parts(tmp_path, stack, getattr(request, "param", "roundrobin"))


@pytest.mark.parametrize("parts", ["roundrobin", "hash_roundrobin"], indirect=True)
def test_two_clients_deliver_rows_and_removals_to_two_parts(parts: Parts) -> None:
    for _ in range(3):
        parts.trainer.step(3)
        parts.model.embeddings.shards.remove({"item": torch.arange(20)})

        found = parts.sync()

        assert [(each["status_code"], each.get("error_message")) for each in found] == [(0, None)] * 2
        assert all(each["update_num"] > 0 for each in found)
        parts.assert_equal()
    assert [each["update_num"] for each in parts.sync()] == [0, 0]


def test_a_part_that_dies_and_comes_back_gets_everything(parts: Parts) -> None:
    parts.trainer.step(2)
    parts.sync()
    parts.servers[1].stop()
    parts.trainer.step(2)
    well, dead = parts.sync()
    assert (well["status_code"], dead["status_code"], dead["update_num"]) == (0, 14, 0)

    # Discovery does not list the dead server for a while; training continues.
    address = parts.servers[1].address
    parts.backend.unregister("movies:ps_1", address)
    parts.trainer.step(2)
    assert [each["target"] for each in parts.sync()] == [parts.servers[0].address, ""]
    parts.restart(1)
    parts.backend.register("movies:ps_1", Replica(address))

    found = parts.sync()

    assert (found[1]["status_code"], found[1]["update_num"] > 0) == (0, True)
    parts.assert_equal()


@pytest.mark.parametrize("how", ["restarted", "at a new address", "as a second replica"])
def test_a_server_that_appears_is_sent_the_pushed_rows(parts: Parts, how: str) -> None:
    parts.trainer.step(3)
    parts.sync()
    if how == "restarted":
        parts.restart(0)
    else:
        first = parts.servers[0]
        if how == "at a new address":
            first.stop()
            parts.backend.unregister("movies:ps_0", first.address)
            del parts.servers[0]
        parts.servers.insert(0, parts._start(0, 0))
        parts.backend.register("movies:ps_0", Replica(parts.servers[0].address))

    found = {each["target"]: each for each in parts.sync()}  # although nothing was trained since

    new = found.pop(parts.servers[0].address)
    assert (new["status_code"], new["update_num"] > 0) == (0, True)
    assert [each["update_num"] for each in found.values()] == [0] * len(found)
    parts.assert_equal()


@pytest.mark.parametrize(("max_ids", "status", "row"), [(100, 0, 0.0), (3, 0, 0.0), (1, 9, 1.0)])
def test_a_restarted_part_removes_rows_although_too_many_ids_have_changed(
    parts: Parts, max_ids: int, status: int, row: float
) -> None:
    shards = parts.model.embeddings.shards
    shards.assign({"user": (torch.arange(1000, 1010), torch.ones(10, 5))})
    parts.export()
    parts.restart(0)
    changes = TrackedChanges(max_ids)
    with ExitStack() as stack:
        client, other = (ParameterSyncClient(SyncHandle(name, changes=changes)) for name in "01")
        for each in (client, other):
            stack.enter_context(each).attach(shards)
        shards.assign({"user": (torch.arange(1000, 1010, 2), torch.full((5, 5), 9.0))})
        shards.remove({"user": torch.tensor([1004, 1006])})
        parts.push(client, 0)
        parts.restart(0)
        parts.await_connection(client, 0)

        (response,) = responses(client.create_sync_op())

    newest = parts.servers[0].models[0].newest
    assert newest is not None
    rows = newest.servable.lookup("user", torch.tensor([1002, 1004, 1006]))
    assert rows[:, 0].tolist() == [9.0, row, row]
    assert response["status_code"] == status
    message = response.get("error_message", "")
    assert ("rows were removed since attach to remember" in message) == (status == 9)


def test_what_no_target_gets_is_reported(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    (alone,) = create_parameter_sync_clients(1)
    with alone:
        alone.attach(parts.model.embeddings.shards)
        other = shards_of(other=1)
        alone.attach(other)
        other.assign({"other": (torch.tensor([1, 2]), torch.ones(2, 1))})
        parts.model.embeddings.shards.assign({"user": (torch.tensor([0, 1, 2]), torch.ones(3, 5))})

        (response,) = parts.push(alone, 0)

    assert (response["status_code"], response["update_num"]) == (9, 2)
    assert response["error_message"].split("; ") == [
        "1 ids of table 'user' belong to parts that no client has pushed to (ps_1): attach it to one client "
        "for each part, which create_parameter_sync_clients(2) makes",
        "table 'other' is not served there: its 2 ids are not pushed",
    ]
    assert response["error_message"].split("; ")[1] in caplog.text


@pytest.mark.parametrize(
    "make",
    [
        parameter_sync_client_from_config,
        lambda: ParameterSyncClient(client=create_parameter_sync_clients(0)[0]),
    ],
)
def test_one_client_per_rank_reports_the_parts_that_no_rank_pushes_to(
    make: Callable[[], ParameterSyncClient], tmp_path: Path
) -> None:
    # Two ranks push to ps_0 and ps_1 of a model with four parts. Rank 0 has the even ids, rank 1 the others.
    ranks = [shards_of(t=1), shards_of(t=1)]
    export_model(ranks[0], tmp_path, name="m", num_shards=4)
    with ExitStack() as stack:
        config = ServerConfig(allow_writes=True, poll_seconds=60.0)
        servers = [stack.enter_context(ModelServer(tmp_path / f"ps_{i}", config)) for i in range(4)]
        backend = StaticDiscovery({f"m:ps_{i}": [server.address] for i, server in enumerate(servers)})
        backend.subscribe_model("m")
        clients = [stack.enter_context(make()) for _ in range(3)]
        for client, shards in zip(clients, [*ranks, ranks[0]], strict=True):
            client.attach(shards)

        def push(rank: int, part: int, *ids: int) -> dict[str, Any]:
            ranks[rank % 2].assign({"t": (torch.tensor(ids), torch.ones(len(ids), 1))})
            (response,) = responses(clients[rank].create_sync_op(refresh_sync_config(backend, part)))
            return response

        for rank in (0, 1, 0, 1):
            response = push(rank, rank, *range(rank, 8, 2))
            assert (response["status_code"], response["update_num"]) == (9, 2)
            message = f"2 ids of table 't' belong to parts that no client has pushed to (ps_{rank + 2})"
            assert message in response["error_message"]

        # With more ranks than parts, a rank has no target.
        response = push(2, 4, 2, 4)
        assert (response["target"], response["status_code"]) == ("", 9)
        assert "no targets for 'm:ps_4', and changed ids wait: " in response["error_message"]


def test_one_client_may_push_to_the_parts_in_turn(parts: Parts) -> None:
    with parameter_sync_client_from_config() as client:
        client.attach(parts.model.embeddings.shards)
        statuses = []
        for _ in range(3):
            parts.trainer.step(2)
            for part in range(2):
                statuses += [response["status_code"] for response in parts.push(client, part)]
            parts.assert_equal()
    # Only in the first call the other part is still unknown.
    assert statuses == [9, 0, 0, 0, 0, 0]


def test_credentials_are_presented(tmp_path: Path) -> None:
    shards = shards_of(t=1)
    export_model(shards, tmp_path, name="m", num_shards=1)
    security = Security(write_token="secret-token-1")
    config = ServerConfig(allow_writes=True, poll_seconds=60.0, security=security)
    credentials = Credentials(token="secret-token-1")
    with ExitStack() as stack:
        server = stack.enter_context(ModelServer(tmp_path / "ps_0", config))
        targets = ClientConfig(
            model_name="m:ps_0", targets=(server.address,), timeout_in_ms=3000
        ).SerializeToString()
        clients = [
            parameter_sync_client_from_config(targets),
            parameter_sync_client_from_config(targets, credentials=credentials),
            *create_parameter_sync_clients(0, credentials=credentials),
            *create_parameter_sync_clients(1, credentials=credentials),
        ]
        for client in clients:
            stack.callback(client.close)
            client.attach(shards)
        shards.assign({"t": (torch.tensor([1]), torch.ones(1, 1))})

        found = [responses(client.create_sync_op(targets))[0]["status_code"] for client in clients]

    assert found == [16, 0, 0, 0]
    with pytest.raises(InputError, match="credentials must be Credentials, got str"):
        create_parameter_sync_clients(1, credentials="secret-token-1")  # type: ignore[arg-type]


def test_an_entry_has_no_rows(tmp_path: Path) -> None:
    model = make_model()
    export_version(model, tmp_path, base="one", num_shards=1)
    options = ServerConfig(allow_writes=True, discovery=f"file:{tmp_path / 'servers.json'}", trial="never")
    with (
        ModelServer(tmp_path, options) as server,
        parameter_sync_client_from_config() as client,
    ):
        client.attach(model.embeddings.shards)
        model.embeddings.shards.assign({"user": (torch.tensor([1]), torch.ones(1, 5))})
        config = ClientConfig(model_name="movies:entry", targets=(server.address,), timeout_in_ms=3000)

        (response,) = responses(client.create_sync_op(config.SerializeToString()))

        assert (response["status_code"], response["update_num"]) == (9, 0)
        assert "is an entry, which has no rows: push to its parts" in response["error_message"]
