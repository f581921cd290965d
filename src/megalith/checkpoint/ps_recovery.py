"""Recovery of parameter servers: from their last checkpoint and a log of the updates after it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from megalith.checkpoint.manifest import full_name, read_manifest
from megalith.checkpoint.parts import TableLoad, load_on_server
from megalith.errors import CheckpointError
from megalith.ops import checks
from megalith.ps.recovery import Recovery
from megalith.routing import Router
from megalith.shards import Shards, ShardsPart
from megalith.storage.store import Store, open_store


def recovery(directory: str | os.PathLike[str], *, log: str = "sync") -> Recovery:
    """Describe how servers that end get their rows back, for `ServerShards(recovery=...)`.

    Args:
        directory: A directory that all servers reach, for their logs. Use a new one for each run.
        log: What a server records of its updates. "sync": each update is on the disk before it is applied,
            and nothing that was answered is lost. "async": at most the updates of the last 0.2 seconds are
            lost, after a power failure those since the last flush. "none": all updates since the last
            checkpoint.

    Returns:
        The description.

    Raises:
        InputError: An argument is wrong.
    """
    path = checks.path(directory, "recovery: directory").absolute()
    return Recovery(str(path), checks.one_of(log, ("none", "async", "sync"), "recovery: log"), restore_part)


def place_of(shards: Shards, store: Store, tables: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return where a checkpoint is, for the server that will restore its rows from it."""
    found = {}
    for path, name in tables:
        router = shards.router(name)
        assert router is not None
        routing = [router.mode, router.num_shards, router.block_size, router.skip_first]
        found[name] = {"table": full_name(path, name), "routing": routing}
    return {"store": store.address, "tables": found}


def restore_part(part: ShardsPart, place: Mapping[str, Any], *, only: str) -> str | None:
    """Load the rows of a server, if the checkpoint is that of a certain save."""
    store = open_store(place["store"])
    try:
        manifest = read_manifest(store)
    except (CheckpointError, FileNotFoundError):
        return None
    if manifest.tip != only:
        return manifest.tip
    saved = manifest.tables()
    for name, known in place["tables"].items():
        mode, count, block_size, skip_first = known["routing"]
        router = Router(mode, count, block_size=block_size, skip_first=skip_first)
        load_on_server(part, store, TableLoad(name, saved[known["table"]], router, True, False, None, False))
    return manifest.tip


def loaded_on_server(part: ShardsPart, id: str, place: Mapping[str, Any], exact: bool) -> None:
    """Record that rows were loaded: a server that ends starts again from this checkpoint."""
    if part.recovery is not None:
        id = id if exact else f"changed-{id}"
        part.recovery.frozen(id, place)
        part.recovery.ended(id, complete=True)
