"""Monolith's functions of ranks, devices and launches.

Names of devices are TensorFlow's (`/job:JOB/task:N/device:TYPE:0`). Nothing is placed by them here: a tensor
has a `torch.device`, and rows are on the rank or server that the router gives.

    process                          name
    parameter server i               /job:ps/task:i/device:CPU:0
    rank 0, with parameter servers   /job:chief/replica:0/task:0/device:TYPE:0
    rank r > 0, with servers         /job:worker/replica:0/task:(r - 1)/device:TYPE:0
    a rank without servers           the empty string
    a process without a launcher     /device:TYPE:0
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

from megalith.distributed.launcher_environment import LaunchWarning, read_launch
from megalith.errors import InputError
from megalith.ops import checks

# ---- ranks


def get_mpi_rank() -> int:
    """Return the rank of this process among all processes."""
    return read_launch().rank


def get_mpi_local_rank() -> int:
    """Return the rank of this process among those of its machine."""
    return read_launch().local_rank


def get_mpi_size() -> int:
    """Return the number of processes."""
    return read_launch().size


def get_mpi_local_size() -> int:
    """Return the number of processes on this machine."""
    return read_launch().local_size


# ---- devices


def get_device_str(
    force_on_cpu: bool = False,
    *,
    num_ps: int = 0,
    enable_gpu_training: bool | None = None,
    environ: Mapping[str, str] | None = None,
) -> str:
    """Return the name of the device of this process.

    The keyword-only arguments are flags in Monolith. A process belongs to synchronous training if a launcher
    (OpenMPI, torchrun or SLURM) started it; Monolith knows OpenMPI and has a flag for it.

    Args:
        force_on_cpu: Whether the device is the CPU in any case.
        num_ps: The number of parameter servers.
        enable_gpu_training: Whether the device is a GPU; None: if this process sees one.
        environ: The variables of the launcher; None: os.environ.

    Returns:
        The name; the module's table lists all forms. The empty string means that the process places nothing.
    """
    cpu = checks.flag(force_on_cpu, "force_on_cpu")
    num_ps = checks.integer(num_ps, "num_ps", least=0)
    if enable_gpu_training is None:
        gpu = torch.cuda.is_available()
    else:
        gpu = checks.flag(enable_gpu_training, "enable_gpu_training")
    if environ is not None and not isinstance(environ, Mapping):
        raise InputError(f"environ must map names of variables to texts, got {type(environ).__name__}")
    device = f"device:{'GPU' if gpu and not cpu else 'CPU'}:0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaunchWarning)  # a process without a launcher has a name too
        launch = read_launch(environ)
    if launch.launcher is None:
        return f"/{device}"
    if num_ps == 0:
        return ""
    job, task = ("chief", 0) if launch.rank == 0 else ("worker", launch.rank - 1)
    return f"/job:{job}/replica:0/task:{task}/{device}"
