"""Tables of clients for parameter sync, and their responses."""

from __future__ import annotations

import json
from typing import Any

from megalith import SGD, LocalShards, TableConfig, Zeros


def shards_of(**dims: int) -> LocalShards:
    return LocalShards(
        [TableConfig(name, dim=dim, optimizer=SGD(0.1), initializer=Zeros()) for name, dim in dims.items()]
    )


def responses(text: str) -> list[dict[str, Any]]:
    return json.loads(text).get("responses", [])  # type: ignore[no-any-return]
