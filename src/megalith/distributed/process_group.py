"""Joining: the ranks that a launcher started become a process group.

What they find out by themselves is in `environment.py`; this is the one call that changes something.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from megalith.distributed.launcher_environment import Launch
from megalith.errors import InputError, RankTimeoutError


def init_process_group(launch: Launch, *, timeout: float = 600.0) -> None:
    """Makes the default process group, over gloo, of all ranks of a launch; one rank needs none.

    They meet at MASTER_ADDR and MASTER_PORT. timeout: seconds to wait for each other, here and in the group's
    collectives. Raises InputError if no address is set, RankTimeoutError if some do not come.
    """
    if launch.size == 1:
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise InputError(
                f"{launch.launcher} started {launch.size} ranks, but {name} is not set, so they cannot meet: "
                "set it to the same on all ranks, as torchrun does"
            )
    limit = timedelta(seconds=timeout)
    # torchrun's store outlives its restarts, and what the ranks before left in it leads nowhere.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store, rank, size = next(rendezvous("env://", launch.rank, launch.size, timeout=limit))
        own = PrefixStore(f"megalith/attempt-{attempt}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=limit)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0][:300]
        raise RankTimeoutError(
            f"rank {launch.rank} of {launch.size} could not join the others: {reason}"
        ) from error
