"""Launcher environment: the rank, device, run directory and process group of this process.

`read_launch` reads the variables that a launcher set; `configure` adds a device and a run directory. They
only read: no variable, device, seed or process group is set, and importing this module reads nothing.
`init_process_group` is the one call that changes something: it connects the ranks of a launch.

If the variables of several launchers are set, torchrun takes precedence, then OpenMPI, then SLURM: torchrun
and mpirun are often started inside a SLURM job, never the other way round.
"""

from __future__ import annotations

import logging
import os
import re
import uuid as uuids
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.optim import Optimizer

from megalith.distributed.dense_parameters import broadcast_dense
from megalith.distributed.ranks import has_process_group
from megalith.errors import InputError, RankTimeoutError

__all__ = ["LAUNCHERS", "Launch", "LaunchWarning", "RankSetup", "broadcast_dense", "configure", "read_launch"]


class Launcher(NamedTuple):
    """The variables of a launcher; of several variables for one number, the first that is set is used."""

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    identity: tuple[str, ...]  # Together they identify a launch; they are equal on all its ranks


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
"""In order of precedence."""

_NUMBER = re.compile(r"[0-9]{1,9}")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NO_RUN_ID = "none"  # torchrun's value without --rdzv-id


class LaunchWarning(UserWarning):
    """The variables of a launch are incomplete or missing."""


@dataclass(frozen=True)
class Launch:
    """The position of this process in its launch."""

    rank: int = 0  # Rank among all processes, from 0
    size: int = 1  # Number of processes
    local_rank: int = 0  # Rank among the processes of its machine
    local_size: int = 1  # Number of processes on its machine
    launcher: str | None = None  # torchrun, OpenMPI or SLURM; None without a launcher
    uuid: str | None = None
    """Identifies the launch on all its ranks, also after a restart; None if the launcher has no id."""


@dataclass(frozen=True, kw_only=True)
class RankSetup(Launch):
    """The result of `configure`: rank, device and run directory of this process."""

    device: torch.device  # The device for the dense part of the model
    run_dir: Path  # The directory to write to


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    # The first launcher whose rank and size are both set is used; otherwise the first with any variable set;
    # otherwise this is rank 0 of 1. A missing rank is 0 and a missing size is 1, with a LaunchWarning that
    # names the variable.
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
            _warn(f"{launcher.name}: {found.name} is not set; {found.number} is assumed")
    if launcher.name == "SLURM" and "SLURM_STEP_ID" not in given and size.number > 1:
        _warn(f"SLURM_STEP_ID is not set, so srun did not start this process, but {size}: use srun")
    uuid = _launch_uuid(given, launcher)
    return Launch(rank.number, size.number, local_rank.number, local_size.number, launcher.name, uuid)


def configure(
    run: str | Path,
    *,
    merge_checkpoints: bool = False,
    uuid: str | None = None,
    device: torch.device | str | None = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
    broadcast: bool = True,
    environ: Mapping[str, str] | None = None,
) -> RankSetup:
    """Return the rank, size, device and run directory of this process. It sets nothing and is idempotent."""
    if optimizer is not None and model is None:
        raise InputError("configure: optimizer needs model=, the model whose weights it updates")
    launch = read_launch(environ)
    grouped = has_process_group()
    if grouped and (dist.get_rank(), dist.get_world_size()) != (launch.rank, launch.size):
        raise InputError(
            f"the process group has rank {dist.get_rank()} of {dist.get_world_size()}, but the variables of "
            f"{launch.launcher or 'no launcher'} are for rank {launch.rank} of {launch.size}; make "
            "them equal or pass environ={'RANK': ..., 'WORLD_SIZE': ..., ...}"
        )
    plain = merge_checkpoints or launch.launcher is None
    setup = RankSetup(
        **{**vars(launch), "uuid": launch.uuid if uuid is None else uuid},
        device=_device(launch) if device is None else torch.device(device),
        run_dir=Path(run) if plain else _own_dir(Path(run), launch, uuid),
    )
    if model is not None and broadcast and (grouped or launch.size > 1):
        broadcast_dense(model, group, optimizer=optimizer)
    return setup


# ---- which launcher


def _choose(given: Mapping[str, str]) -> Launcher | None:
    """Return the launcher to use; warn about the variables that it ignores."""
    complete = [x for x in LAUNCHERS if _is_set(given, x.rank) and _is_set(given, x.size)]
    # A SLURM job sets most of its variables in every shell; only its tasks have a rank.
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
            _warn(f"{launcher.name}: {names} is incomplete and ignored in favour of {chosen.name}")
    return chosen


def _set_names(given: Mapping[str, str], launcher: Launcher) -> list[str]:
    variables = (*launcher.rank, *launcher.size, *launcher.local_rank, *launcher.local_size)
    return [name for name in variables if name in given]


def _is_set(given: Mapping[str, str], variables: tuple[str, ...]) -> bool:
    return any(name in given for name in variables)


# ---- values


class _LauncherVariables(NamedTuple):
    """A number and the variable that it comes from, or would come from."""

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
        raise InputError(f"{name} must be an integer, got {text!r}; unset it, or set it to an integer")
    return int(text)


def _tasks_here(given: Mapping[str, str], name: str) -> int:
    """Return the number of SLURM tasks on this node; 4(x2),3 means 4, 4 and 3 tasks on three nodes."""
    parts = [_TASKS.fullmatch(part) for part in given[name].split(",")]
    node = _number("SLURM_NODEID", given.get("SLURM_NODEID", "0"))
    nodes = 0
    for part in parts:
        if part is None:
            raise InputError(f"{name} must be numbers of tasks such as 4(x2),3, got {given[name]!r}")
        nodes += int(part[2] or 1)
        if node < nodes or name == "SLURM_NTASKS_PER_NODE":  # this one is the same for every node
            return int(part[1])
    raise InputError(f"SLURM_NODEID is {node}, but {name} is {given[name]!r}, which describes {nodes} nodes")


def _check(
    launcher: str,
    rank: _LauncherVariables,
    size: _LauncherVariables,
    local_rank: _LauncherVariables,
    local_size: _LauncherVariables,
) -> None:
    for part, whole in ((rank, size), (local_rank, local_size)):
        if part.number >= whole.number:
            raise InputError(
                f"{launcher}: {part}, but {whole}; ranks are 0 to size - 1: set both as the "
                "launcher does, or neither"
            )
    if local_size.number > size.number:
        raise InputError(f"{launcher}: {local_size}, but {size}: the local size cannot exceed the size")
    if size.number > 1 and not rank.is_set:
        raise InputError(f"{launcher}: {size}, but {rank}: all would be rank 0; set both or neither")


def _warn(message: str) -> None:
    warnings.warn(message, LaunchWarning, stacklevel=4)


# ---- directory and device


def _launch_uuid(given: Mapping[str, str], launcher: Launcher) -> str | None:
    """Return an id of the launch derived from its variables, or None if one of them is not set."""
    values = [given.get(name, "") for name in launcher.identity]
    if not all(values) or values == [_NO_RUN_ID]:
        return None
    return str(uuids.uuid5(uuids.NAMESPACE_OID, "\0".join((launcher.name, *values))))


def _own_dir(run: Path, launch: Launch, uuid: str | None) -> Path:
    name = launch.uuid if uuid is None else uuid
    if name is None:
        (launcher,) = (x for x in LAUNCHERS if x.name == launch.launcher)
        raise InputError(
            f"nothing identifies this launch: {' and '.join(launcher.identity)} of {launcher.name} is "
            "not set; pass uuid=, equal on all ranks, or merge_checkpoints=True (torchrun: pass "
            "--standalone or --rdzv-id)"
        )
    if not _NAME.fullmatch(name):
        raise InputError(f"uuid must consist of up to 128 letters, digits, dots, '_' and '-', got {name!r}")
    own = Path(name) / f"index-{launch.rank:04d}"
    return run if run.parts[-2:] == own.parts else run / own


def _device(launch: Launch) -> torch.device:
    """Return the GPU of the local rank, the only GPU if there is one, or the CPU if there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return torch.device("cpu")
    if launch.local_rank < count:
        return torch.device("cuda", launch.local_rank)
    if count == 1:  # e.g. each process sees only its own GPU
        if "CUDA_VISIBLE_DEVICES" not in os.environ:
            _warn("CUDA_VISIBLE_DEVICES is not set and there is one GPU: the ranks of this machine share it")
        return torch.device("cuda", 0)
    raise InputError(
        f"local rank {launch.local_rank} has no GPU: this process sees {count} (CUDA_VISIBLE_DEVICES); "
        f"start at most {count} ranks on this machine, or pass device="
    )


logger = logging.getLogger(__name__)


def check_address(launch: Launch) -> None:
    """Check that the address at which the ranks of a launch connect is set."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise InputError(
                f"{launch.launcher} started {launch.size} ranks, but {name} is not set: set it to the same "
                "value on all ranks, as torchrun does, so that they can connect"
            )


def init_process_group(launch: Launch, *, timeout: float = 600.0) -> None:
    """Create the default process group of all ranks of a launch, with gloo. One rank needs no group."""
    # The ranks connect at MASTER_ADDR and MASTER_PORT.
    if launch.size == 1:
        return
    check_address(launch)
    limit = timedelta(seconds=timeout)
    # torchrun's store survives a restart, but the addresses that earlier ranks left in it are invalid.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store, rank, size = next(rendezvous("env://", launch.rank, launch.size, timeout=limit))
        own = PrefixStore(f"megalith/attempt-{attempt}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=limit)
        logger.info("rank %d of %d connected (%s)", rank, size, launch.launcher)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0][:300]
        raise RankTimeoutError(
            f"rank {launch.rank} of {launch.size} could not connect to the other ranks: {reason}"
        ) from error
