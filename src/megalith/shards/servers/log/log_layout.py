"""log_layout: which of the logs in a directory are those of the servers that have the tables now.

    file                                  content
    DIRECTORY/NAME/layout.json            {"servers": N}: the tables are on N servers
    DIRECTORY/NAME/server-I-of-N/         the log of server I; see `update_log.py`
    .../server-I-of-M/moving              the id of a move of the tables to M servers

A move writes all rows into the logs of M servers, then server 0 of them replaces layout.json, which ends the
move. Before that, the tables are on N servers, and the next move discards what M servers have. After it,
N servers that start again raise.
"""

from __future__ import annotations

import json
from pathlib import Path
from shutil import rmtree

from megalith.errors import CheckpointError, UsageError
from megalith.shards.servers.log.recovery import Recovery
from megalith.storage.json_codec import parse_json
from megalith.storage.local_files import write_atomically

LAYOUT = "layout.json"
MOVING = "moving"


def claim_folder(recovery: Recovery, name: str, index: int, count: int) -> Path:
    """Return the folder of the log of a server that starts."""
    folder = recovery.folder(name, index, count)
    now = _servers(folder.parent / LAYOUT)
    if now == count:
        return folder
    if recovery.move is not None:
        if not (folder / MOVING).exists() or (folder / MOVING).read_text() != recovery.move:
            rmtree(folder, ignore_errors=True)
            write_atomically(folder / MOVING, [recovery.move.encode()])
    elif now is not None:
        raise UsageError(
            f"ServerShards {name!r}: the tables of the logs in {recovery.directory} are on {now} servers, "
            f"not on {count}: call reconnect with the Servers that resize returned, or start {now} servers; "
            "a new run needs a new directory"
        )
    elif index == 0:
        write_layout(folder, count)
    return folder


def write_layout(folder: Path, count: int) -> None:
    """Record on how many servers the tables are."""
    write_atomically(folder.parent / LAYOUT, [json.dumps({"servers": count}).encode()])


def _servers(path: Path) -> int | None:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    data = parse_json(text, CheckpointError)
    if not isinstance(data, dict) or not isinstance(data.get("servers"), int):
        raise CheckpointError(f"{path} does not name a number of servers: {text[:100]!r}")
    return int(data["servers"])
