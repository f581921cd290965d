"""Monolith's functions of ranks: the numbers of `read_launch`, under OpenMPI, torchrun or SLURM.

Without the variables of a launcher they return rank 0 of 1, with a LaunchWarning.
"""

from __future__ import annotations

from megalith.distributed.launcher_environment import read_launch


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
