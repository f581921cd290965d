"""Which rank is this, on which device, writing where: launchers, GPUs, variables set in part or wrongly."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith.distributed.launcher_environment import LAUNCHERS, LaunchWarning, configure, read_launch
from megalith.errors import InputError


def named(prefix: str, **values: str) -> dict[str, str]:
    return {prefix + name: value for name, value in values.items()}


TORCHRUN = named("", RANK="3", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
TORCHRUN["TORCHELASTIC_RUN_ID"] = "evening"
OPENMPI = named("OMPI_COMM_WORLD_", RANK="5", SIZE="6", LOCAL_RANK="2", LOCAL_SIZE="3")
OPENMPI["PMIX_NAMESPACE"] = "prterun-node-4635@1"
SLURM = named("SLURM_", PROCID="6", LOCALID="2", NODEID="2", JOB_ID="4711", STEP_ID="0")
SLURM |= named("SLURM_STEP_", NUM_TASKS="7", TASKS_PER_NODE="2(x2),3")
Numbers = tuple[int, int, int, int, str | None]


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


class Case(NamedTuple):
    """What is set, and then rank, size, local rank, local size and launcher, and what is warned of."""

    environ: dict[str, str]
    found: Numbers
    warned: tuple[str, ...] = ()


CASES = {
    "nothing": Case({}, (0, 1, 0, 1, None), ("none of RANK, OMPI_COMM_WORLD_RANK, SLURM_PROCID is set",)),
    "torchrun": Case(TORCHRUN, (3, 8, 1, 2, "torchrun")),
    "OpenMPI": Case(OPENMPI, (5, 6, 2, 3, "OpenMPI")),
    "SLURM": Case(SLURM, (6, 7, 2, 3, "SLURM")),
    "SLURM, as many on every node": Case(
        named("SLURM_", PROCID="3", NTASKS="4", LOCALID="1", NTASKS_PER_NODE="2", NODEID="1", STEP_ID="0"),
        (3, 4, 1, 2, "SLURM"),
    ),
    "torchrun inside mpirun inside SLURM": Case({**SLURM, **OPENMPI, **TORCHRUN}, (3, 8, 1, 2, "torchrun")),
    "mpirun inside SLURM": Case({**SLURM, **OPENMPI}, (5, 6, 2, 3, "OpenMPI")),
    "rank and size by hand": Case(
        {"RANK": "3", "WORLD_SIZE": "8"},
        (3, 8, 0, 1, "torchrun"),
        ("LOCAL_RANK is not set; 0 is assumed", "LOCAL_WORLD_SIZE is not set; 1 is assumed"),
    ),
    "no local size": Case(
        without({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        (5, 6, 0, 1, "OpenMPI"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE is not set; 1 is assumed",),
    ),
    "rank 0 alone": Case(
        {"RANK": "0"},
        (0, 1, 0, 1, "torchrun"),
        ("WORLD_SIZE is not set", "LOCAL_RANK is not set", "LOCAL_WORLD_SIZE is not set"),
    ),
    "part of torchrun's, all of OpenMPI's": Case(
        {"LOCAL_RANK": "0", **OPENMPI},
        (5, 6, 2, 3, "OpenMPI"),
        ("torchrun: LOCAL_RANK is incomplete and ignored in favour of OpenMPI",),
    ),
    "a SLURM shell without srun": Case(
        named("SLURM_", JOB_ID="4711", NTASKS="8"),
        (0, 1, 0, 1, None),
        ("SLURM_NTASKS is set, but srun did not start this process",),
    ),
    "a SLURM batch script without srun": Case(
        named("SLURM_", JOB_ID="4711", NTASKS="8", PROCID="0", LOCALID="0"),
        (0, 8, 0, 1, "SLURM"),
        ("SLURM_NTASKS_PER_NODE is not set", "SLURM_STEP_ID is not set, so srun did not start this process"),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_launchers(case: Case) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        launch = read_launch(case.environ)
    found = (launch.rank, launch.size, launch.local_rank, launch.local_size, launch.launcher)
    assert found == case.found
    assert [w.category for w in caught] == [LaunchWarning] * len(case.warned)
    for warning, expected in zip(caught, case.warned, strict=True):
        assert expected in str(warning.message)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "3"}, ["RANK is 3", "WORLD_SIZE is not set"]),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE is 4", "RANK is not set", "all would be rank 0"]),
        ({"LOCAL_RANK": "1"}, ["LOCAL_RANK is 1", "LOCAL_WORLD_SIZE is not set"]),
        ({**TORCHRUN, "RANK": "8"}, ["RANK is 8", "WORLD_SIZE is 8"]),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, ["LOCAL_RANK is 2", "LOCAL_WORLD_SIZE is 2"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, ["LOCAL_WORLD_SIZE is 9", "WORLD_SIZE is 8"]),
        ({**TORCHRUN, "RANK": "-1"}, ["RANK must be an integer", "'-1'"]),
        ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "six"}, ["OMPI_COMM_WORLD_SIZE must be", "'six'"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, ["SLURM_STEP_TASKS_PER_NODE must be", "'2(y2)'"]),
        ({**SLURM, "SLURM_NODEID": "3"}, ["SLURM_NODEID is 3", "describes 3 nodes"]),
        ({**SLURM, "SLURM_PROCID": "7"}, ["SLURM_PROCID is 7", "SLURM_STEP_NUM_TASKS is 7"]),
    ],
)
def test_contradictions_and_nonsense_are_errors_that_name_the_variable(
    environ: dict[str, str], named: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        read_launch(environ)
    assert all(text in str(caught.value) for text in named)


VARIABLES = sorted(
    {"SLURM_NODEID", *(name for launcher in LAUNCHERS for names in launcher[1:] for name in names)}
)


@given(
    st.dictionaries(st.sampled_from(VARIABLES), st.sampled_from(["", "0", "1", "2", "7", "2(x3)", "x", "-1"]))
)
def test_whatever_is_set_ranks_make_sense_or_an_error_is_raised(environ: dict[str, str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            launch = read_launch(environ)
        except InputError:
            return
    assert 0 <= launch.rank < launch.size
    assert 0 <= launch.local_rank < launch.local_size <= launch.size


# ---- configure


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def show(patch: pytest.MonkeyPatch, count: int) -> None:
    """Sets the number of GPUs."""
    patch.setattr(torch.cuda, "is_available", lambda: count > 0)
    patch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize("count", [0, 8])
@pytest.mark.parametrize("environ", [TORCHRUN, OPENMPI, SLURM], ids=["torchrun", "OpenMPI", "SLURM"])
def test_every_launcher_with_and_without_gpus(
    gpus: pytest.MonkeyPatch, count: int, environ: dict[str, str]
) -> None:
    show(gpus, count)
    setup, launch = configure("runs/demo", environ=environ), read_launch(environ)
    assert (setup.rank, setup.size) == (launch.rank, launch.size)
    assert setup.device == (torch.device("cuda", launch.local_rank) if count else torch.device("cpu"))
    assert setup.run_dir == Path("runs/demo", str(setup.uuid), f"index-{setup.rank:04d}")
    assert configure("runs/demo", environ=environ, merge_checkpoints=True).run_dir == Path("runs/demo")
    assert configure("runs/demo", environ=environ) == configure(setup.run_dir, environ=environ) == setup


@pytest.mark.parametrize(("count", "device"), [(0, "cpu"), (2, "cuda:0")])
def test_without_a_launcher_nothing_changes(gpus: pytest.MonkeyPatch, count: int, device: str) -> None:
    show(gpus, count)
    with pytest.warns(LaunchWarning, match="no launcher"):
        setup = configure("runs/demo", environ={})
    assert (setup.rank, setup.size, setup.local_rank, setup.local_size) == (0, 1, 0, 1)
    assert (setup.run_dir, setup.device, setup.uuid) == (Path("runs/demo"), torch.device(device), None)


def test_a_local_rank_without_a_gpu_is_an_error(gpus: pytest.MonkeyPatch) -> None:
    show(gpus, 2)
    with pytest.raises(InputError, match="local rank 2 has no GPU: this process sees 2"):
        configure("runs/demo", environ=OPENMPI)
    assert configure("runs/demo", environ=OPENMPI, device="cpu").device == torch.device("cpu")


def test_a_process_that_is_shown_one_gpu_takes_it(gpus: pytest.MonkeyPatch) -> None:
    show(gpus, 1)
    with pytest.warns(LaunchWarning, match="CUDA_VISIBLE_DEVICES is not set and there is one GPU"):
        assert configure("runs/demo", environ=OPENMPI).device == torch.device("cuda", 0)
    gpus.setenv("CUDA_VISIBLE_DEVICES", "2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert configure("runs/demo", environ=OPENMPI).device == torch.device("cuda", 0)


def test_a_launch_has_one_uuid_on_all_ranks_and_another_launch_another() -> None:
    for environ, rank, identity in (
        (TORCHRUN, "RANK", "TORCHELASTIC_RUN_ID"),
        (OPENMPI, "OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE"),
        (SLURM, "SLURM_PROCID", "SLURM_STEP_ID"),
    ):
        own = read_launch(environ).uuid
        assert own is not None
        assert read_launch({**environ, rank: "2"}).uuid == own
        assert read_launch({**environ, "TORCHELASTIC_RESTART_COUNT": "1"}).uuid == own
        assert read_launch({**environ, identity: "another"}).uuid != own


@pytest.mark.parametrize("name", [{}, {"TORCHELASTIC_RUN_ID": "none"}], ids=["missing", "none"])
def test_a_launch_without_a_name_asks_for_one(name: dict[str, str]) -> None:
    environ = without(TORCHRUN, "TORCHELASTIC_RUN_ID") | name
    with pytest.raises(InputError, match="TORCHELASTIC_RUN_ID of torchrun is not set; pass uuid="):
        configure("runs/demo", environ=environ)
    assert configure("runs/demo", environ=environ, uuid="mine").run_dir == Path("runs/demo/mine/index-0003")
    assert configure("runs/demo", environ=environ, merge_checkpoints=True).run_dir == Path("runs/demo")


def test_a_uuid_that_leads_elsewhere_is_refused() -> None:
    for uuid in ("", ".", "..", "a/b", "/tmp", "a\0", "a" * 200):
        with pytest.raises(InputError, match="uuid must consist of"):
            configure("runs/demo", environ=TORCHRUN, uuid=uuid)
    setup = configure("runs/demo", environ={**TORCHRUN, "TORCHELASTIC_RUN_ID": "../../etc"})
    assert (setup.run_dir.parts[:2], len(setup.run_dir.parts)) == (("runs", "demo"), 4)
    assert ".." not in setup.run_dir.parts
