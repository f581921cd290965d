"""Ranks and devices: which process of a launch this is, and where it should put its things.

`read_launch` reads what a launcher told this process; `configure` adds a device and a run directory;
`broadcast_dense` gives every rank the dense weights of rank 0. Reading is all they do: no variable, device,
seed or process group is set, and importing this file reads nothing.

Where several launchers left variables behind, torchrun is believed first, then OpenMPI, then SLURM: torchrun
and mpirun are often started inside a SLURM job, never the other way round, and the nearest knows best.
"""

from __future__ import annotations

import os
import re
import uuid as uuids
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megalith.distributed.dense_broadcast import broadcast_dense
from megalith.distributed.ranks import has_process_group
from megalith.errors import InputError

__all__ = ["LAUNCHERS", "Launch", "LaunchWarning", "RankSetup", "broadcast_dense", "configure", "read_launch"]


class Launcher(NamedTuple):
    """The variables a launcher sets; of several for one number, the first that is set counts."""

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    identity: tuple[str, ...]
    """Together they tell one launch from another, and are the same on all of its ranks."""


LAUNCHERS = (
    Launcher(
        "torchrun",
        ("RANK",),
        ("WORLD_SIZE",),
        ("LOCAL_RANK",),
        ("LOCAL_WORLD_SIZE",),
        ("TORCHELASTIC_RUN_ID",),
    ),
    Launcher(
        "OpenMPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE",),
    ),
    Launcher(
        "SLURM",
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)
"""In the order in which they are asked."""

_NUMBER = re.compile(r"[0-9]{1,9}")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NO_RUN_ID = "none"  # what torchrun says when it was given none


class LaunchWarning(UserWarning):
    """A launch that is described in part, or not at all."""


@dataclass(frozen=True)
class Launch:
    """This process among those of its launch."""

    rank: int = 0
    """Its number among all, from 0."""
    size: int = 1
    """How many there are."""
    local_rank: int = 0
    """Its number among those of its machine."""
    local_size: int = 1
    """How many its machine has."""
    launcher: str | None = None
    """Who said so: torchrun, OpenMPI, SLURM; None if nobody did."""
    uuid: str | None = None
    """Names the launch, restarts included, on all its ranks alike; None if the launcher does not."""


@dataclass(frozen=True, kw_only=True)
class RankSetup(Launch):
    """What `configure` found out: this process's place, device and directory."""

    device: torch.device
    """Where its dense part should live."""
    run_dir: Path
    """Where it should write."""


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """What the launcher told this process, from os.environ unless `environ` is given.

    The first launcher whose rank and size are both set is believed; else the first of which anything is set;
    else this is rank 0 of 1. A rank that is not set is 0 and a size 1, with a LaunchWarning that names the
    variable. Raises InputError, naming the variable, if a value is no number or two contradict each other.
    """
    given = os.environ if environ is None else environ
    launcher = _choose(given)
    if launcher is None:
        return Launch()
    rank = _find(given, launcher.rank, 0)
    size = _find(given, launcher.size, 1)
    local_rank = _find(given, launcher.local_rank, 0)
    local_size = _find(given, launcher.local_size, 1)
    _check(launcher.name, rank, size, local_rank, local_size)
    for found in (rank, size, local_rank, local_size):
        if not found.is_set:
            _warn(f"{launcher.name}: {found.name} is not set and taken as {found.number}")
    if launcher.name == "SLURM" and "SLURM_STEP_ID" not in given and size.number > 1:
        _warn(f"SLURM_STEP_ID is not set, so srun did not start this process, but {size}: are there others?")
    uuid = _launch_uuid(given, launcher)
    return Launch(rank.number, size.number, local_rank.number, local_size.number, launcher.name, uuid)


def configure(
    run: str | Path,
    *,
    merge_checkpoints: bool = False,
    uuid: str | None = None,
    device: torch.device | str | None = None,
    model: nn.Module | None = None,
    group: dist.ProcessGroup | None = None,
    broadcast: bool = True,
    environ: Mapping[str, str] | None = None,
) -> RankSetup:
    """This process's rank, size, device and run directory. Sets nothing; called again it says the same.

    run: the directory of the whole run. A rank's own is run/uuid/index-0003, by its rank; it is `run` itself
    if checkpoints are merged into one, or without a launcher. Nothing is made there.
    uuid: names the launch, the same on all ranks; derived from what the launcher says if None.
    device: instead of the GPU of the local rank, or the CPU where there is none.
    model: gets the dense weights of rank 0 of `group` (see broadcast_dense), unless broadcast=False.
    environ: instead of os.environ.
    Raises InputError if variables contradict each other or the process group, if nothing names the launch, or
    if a local rank has no GPU where there are some.
    """
    launch = read_launch(environ)
    grouped = has_process_group()
    if grouped and (dist.get_rank(), dist.get_world_size()) != (launch.rank, launch.size):
        raise InputError(
            f"the process group has rank {dist.get_rank()} of {dist.get_world_size()}, but the variables of "
            f"{launch.launcher or 'no launcher'} say rank {launch.rank} of {launch.size}; make both the same "
            "or pass environ={'RANK': ..., 'WORLD_SIZE': ..., ...}"
        )
    plain = merge_checkpoints or launch.launcher is None
    setup = RankSetup(
        **{**vars(launch), "uuid": launch.uuid if uuid is None else uuid},
        device=_device(launch) if device is None else torch.device(device),
        run_dir=Path(run) if plain else _own_dir(Path(run), launch, uuid),
    )
    if model is not None and broadcast and (grouped or launch.size > 1):
        broadcast_dense(model, group)
    return setup


# ---- which launcher


def _choose(given: Mapping[str, str]) -> Launcher | None:
    """The launcher to believe; warns of what it passes over."""
    complete = [x for x in LAUNCHERS if _is_set(given, x.rank) and _is_set(given, x.size)]
    # A SLURM job sets most of its variables for every shell in it; only a task of it has a number.
    begun = [x for x in LAUNCHERS if _set_names(given, x) and (x.name != "SLURM" or _is_set(given, x.rank))]
    chosen = next(iter(complete or begun), None)
    if chosen is None:
        known = ", ".join(launcher.rank[0] for launcher in LAUNCHERS)
        left = _set_names(given, LAUNCHERS[-1])
        but = f"; {left[0]} is set, but srun did not start this process" if left else ""
        _warn(f"no launcher: none of {known} is set, so this is rank 0 of 1{but}")
        return None
    for launcher in LAUNCHERS[: LAUNCHERS.index(chosen)]:
        if launcher in begun:
            names = ", ".join(_set_names(given, launcher))
            _warn(f"{launcher.name}: {names} is not enough and left aside: {chosen.name} says more")
    return chosen


def _set_names(given: Mapping[str, str], launcher: Launcher) -> list[str]:
    variables = (*launcher.rank, *launcher.size, *launcher.local_rank, *launcher.local_size)
    return [name for name in variables if name in given]


def _is_set(given: Mapping[str, str], variables: tuple[str, ...]) -> bool:
    return any(name in given for name in variables)


# ---- values


class _LauncherVariables(NamedTuple):
    """A number, and the variable it comes from or should have come from."""

    name: str
    number: int
    is_set: bool

    def __str__(self) -> str:
        return f"{self.name} is {self.number}" if self.is_set else f"{self.name} is not set"


def _find(given: Mapping[str, str], variables: tuple[str, ...], default: int) -> _LauncherVariables:
    for name in variables:
        if name in given:
            per_node = name.endswith("TASKS_PER_NODE")
            return _LauncherVariables(
                name, _tasks_here(given, name) if per_node else _number(name, given[name]), True
            )
    return _LauncherVariables(variables[-1], default, False)


def _number(name: str, text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise InputError(f"{name} must be a whole number, got {text!r}; unset it, or mend what sets it")
    return int(text)


def _tasks_here(given: Mapping[str, str], name: str) -> int:
    """SLURM's tasks on this node, out of all nodes' in its short form: 4(x2),3 means 4, 4 and 3."""
    parts = [_TASKS.fullmatch(part) for part in given[name].split(",")]
    node = _number("SLURM_NODEID", given.get("SLURM_NODEID", "0"))
    nodes = 0
    for part in parts:
        if part is None:
            raise InputError(f"{name} must be numbers of tasks such as 4(x2),3, got {given[name]!r}")
        nodes += int(part[2] or 1)
        if node < nodes or name == "SLURM_NTASKS_PER_NODE":  # this one holds for every node
            return int(part[1])
    raise InputError(f"SLURM_NODEID is {node}, but {name} is {given[name]!r}, which is of {nodes} nodes")


def _check(
    launcher: str,
    rank: _LauncherVariables,
    size: _LauncherVariables,
    local_rank: _LauncherVariables,
    local_size: _LauncherVariables,
) -> None:
    """Raises InputError if the numbers contradict each other."""
    for part, whole in ((rank, size), (local_rank, local_size)):
        if part.number >= whole.number:
            raise InputError(
                f"{launcher}: {part}, but {whole}; ranks count from 0 to one less than the size: set both as "
                "the launcher would, or neither"
            )
    if local_size.number > size.number:
        raise InputError(f"{launcher}: {local_size}, but {size}: a part cannot be more than all")
    if size.number > 1 and not rank.is_set:
        raise InputError(f"{launcher}: {size}, but {rank}: all would be rank 0; set both or neither")


def _warn(message: str) -> None:
    warnings.warn(message, LaunchWarning, stacklevel=4)


# ---- directory and device


def _launch_uuid(given: Mapping[str, str], launcher: Launcher) -> str | None:
    """A name of the launch out of its variables, or None if one of them says nothing."""
    values = [given.get(name, "") for name in launcher.identity]
    if not all(values) or values == [_NO_RUN_ID]:
        return None
    return str(uuids.uuid5(uuids.NAMESPACE_OID, "\0".join((launcher.name, *values))))


def _own_dir(run: Path, launch: Launch, uuid: str | None) -> Path:
    name = launch.uuid if uuid is None else uuid
    if name is None:
        (launcher,) = (x for x in LAUNCHERS if x.name == launch.launcher)
        raise InputError(
            f"nothing names this launch, as {' and '.join(launcher.identity)} of {launcher.name} would; pass "
            "uuid=, the same on all ranks, or merge_checkpoints=True (torchrun: --standalone or --rdzv-id)"
        )
    if not _NAME.fullmatch(name):
        raise InputError(f"uuid must be a name of letters, digits, dots and dashes, got {name!r}")
    own = Path(name) / f"index-{launch.rank:04d}"
    return run if run.parts[-2:] == own.parts else run / own


def _device(launch: Launch) -> torch.device:
    """The GPU of the local rank; the only one if there is one; the CPU if there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return torch.device("cpu")
    if launch.local_rank < count:
        return torch.device("cuda", launch.local_rank)
    if count == 1:  # as where each process is shown its own GPU alone
        if "CUDA_VISIBLE_DEVICES" not in os.environ:
            _warn("CUDA_VISIBLE_DEVICES is not set and there is one GPU: the ranks of this machine share it")
        return torch.device("cuda", 0)
    raise InputError(
        f"local rank {launch.local_rank} has no GPU: this process sees {count} (CUDA_VISIBLE_DEVICES); "
        f"start at most {count} ranks on this machine, or pass device="
    )
