"""The default process group of the ranks that a launcher started.

`launcher_environment.py` reads what the launcher set; this is the one call that changes something.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from megalith.distributed.launcher_environment import Launch
from megalith.errors import InputError, RankTimeoutError

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
