"""Monolith's names of servers, chief and workers."""

from __future__ import annotations

import pytest

from megalith.compat import monolith
from megalith.compat.monolith import get_device_str, ps_device
from megalith.distributed.launcher_environment import LaunchWarning
from megalith.errors import InputError


def mpi(rank: int, size: int = 4) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return {f"OMPI_COMM_WORLD_{n}": str(v) for n, v in zip(names, (rank, size, rank, size), strict=True)}


TORCHRUN = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}


@pytest.mark.parametrize(
    ("environ", "num_ps", "gpu", "name"),
    [
        ({}, 0, False, "/device:CPU:0"),
        ({}, 3, True, "/device:GPU:0"),
        (mpi(0), 2, False, "/job:chief/replica:0/task:0/device:CPU:0"),
        (mpi(1), 2, True, "/job:worker/replica:0/task:0/device:GPU:0"),
        (mpi(3), 2, False, "/job:worker/replica:0/task:2/device:CPU:0"),
        (mpi(3), 0, True, ""),
        (TORCHRUN, 1, False, "/job:worker/replica:0/task:1/device:CPU:0"),
    ],
)
def test_names_of_ranks(environ: dict[str, str], num_ps: int, gpu: bool, name: str) -> None:
    assert get_device_str(num_ps=num_ps, enable_gpu_training=gpu, environ=environ) == name
    forced = get_device_str(True, num_ps=num_ps, enable_gpu_training=gpu, environ=environ)
    assert forced == name.replace("GPU", "CPU")


def test_ranks_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    local = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    for name, value in (mpi(3) | local).items():
        monkeypatch.setenv(name, value)
    assert [monolith.get_mpi_rank(), monolith.get_mpi_size()] == [3, 4]
    assert [monolith.get_mpi_local_rank(), monolith.get_mpi_local_size()] == [1, 2]
    for name in mpi(3):
        monkeypatch.delenv(name)
    with pytest.warns(LaunchWarning, match="no launcher"):
        assert [monolith.get_mpi_rank(), monolith.get_mpi_size()] == [0, 1]


def test_names_of_servers() -> None:
    assert [ps_device(i) for i in (0, 1)] == ["/job:ps/task:0/device:CPU:0", "/job:ps/task:1/device:CPU:0"]
    with pytest.raises(InputError, match="index must be"):
        ps_device(-1)
    with pytest.raises(InputError, match="num_ps must be"):
        get_device_str(num_ps=-1, environ={})
