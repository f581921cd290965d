"""Processes on one port: all answer, one that dies is replaced, each takes pushes and has its metrics."""

from __future__ import annotations

import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from megalith.errors import InputError, RemoteError, UsageError
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import Batching, ServerConfig
from megalith.serving.server.server_processes import ServerProcesses, divide_cores
from tests.serving.exports import INPUTS, ServerClient, export_version, request_of

LIMIT = 120.0


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    directory = tmp_path_factory.mktemp("exports")
    export_version(directory)
    config = ServerConfig(
        processes=2,
        allow_writes=True,
        http_port=0,
        metrics_port=0,
        trial="never",
        batching=Batching(threads=1),
    )
    with ServerProcesses(directory, config) as started:
        yield started


def scores(address: str) -> list[float]:
    with ServerClient(address) as ask:
        return ask(INPUTS)["logits"].tolist()


def test_all_processes_answer_on_one_port_and_on_their_own(group: ServerProcesses) -> None:
    expected = scores(group.address)
    assert len(expected) == 2
    assert len(set(group.process_ids)) == 2
    assert [scores(address) for address in group.process_addresses] == [expected, expected]
    with urllib.request.urlopen(f"http://{group.http_address}/v2/health/ready", timeout=LIMIT) as response:
        assert response.status == 200
    assert len(set(group.metrics_addresses)) == 2
    for address in group.metrics_addresses:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT) as response:
            assert 'megalith_version_state{model="movies",version="1"} 30.0' in response.read().decode()
    assert group.models == [("movies", 1)]


def test_pushes_go_to_each_process_and_not_to_the_shared_port(group: ServerProcesses) -> None:
    ids = torch.tensor([1])
    push = request_of({"user_id": ids, "user_value": torch.full((1, 5), 0.5)}, signature="hashtable_assign")
    with ServerClient(group.address) as ask, pytest.raises(RemoteError, match="shared by several") as raised:
        ask.send(push)
    assert raised.value.code == "PERMISSION_DENIED"
    for address in group.process_addresses:
        with ServerClient(address) as ask:
            ask.send(push)
            assert ask({"user": ids}, signature="lookup")["user"].tolist() == [[0.5] * 5]


def test_a_process_that_dies_is_started_again_while_the_other_answers(
    group: ServerProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    killed, other = group.process_ids
    os.kill(killed, signal.SIGFPE)
    end = time.monotonic() + LIMIT
    again: list[float] = []
    while not again:
        assert len(scores(group.process_addresses[1])) == 2  # without a pause
        assert time.monotonic() < end
        with suppress(RemoteError):
            again = scores(group.process_addresses[0])  # under the same address
    assert len(again) == 2
    assert (group.process_ids[0] != killed, group.process_ids[1]) == (True, other)
    assert "server process 0: ended with status -8; it is started again" in caplog.text


@pytest.mark.soak
def test_a_model_that_cannot_be_served_ends_the_start(tmp_path: Path) -> None:
    group = ServerProcesses(tmp_path, ServerConfig(processes=2))
    with pytest.raises(RemoteError, match="holds no exported model"):
        group.start()
    assert all(child._process is not None and child._process.poll() is not None for child in group._children)
    with pytest.raises(UsageError, match="only once"):
        group.start()


def test_wrong_use() -> None:
    with pytest.raises(InputError, match="ModelServer"):
        ServerProcesses("exports", ServerConfig())
    with pytest.raises(InputError, match="ServerProcesses"):
        ModelServer("exports", ServerConfig(processes=2))
    with pytest.raises(InputError, match="access log"):
        ServerProcesses("exports", ServerConfig(processes=2, access_log="-"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        group = ServerProcesses("exports", ServerConfig(processes=2, port=taken.getsockname()[1]))
        with pytest.raises(OSError, match="in use"):
            group.start()


@pytest.mark.parametrize(
    ("processes", "cores", "expected"),
    [
        (2, [0, 1], [(0,), (1,)]),
        (2, [0, 2, 4, 6, 7], [(0, 2), (4, 6)]),
        (3, [0, 1], [(), (), ()]),
    ],
)
def test_cores_are_divided(processes: int, cores: list[int], expected: list[tuple[int, ...]]) -> None:
    assert divide_cores(processes, cores) == expected
