"""The states of a served model, with the numbers TF Serving gives them on the wire and in ZooKeeper."""

from __future__ import annotations

from enum import IntEnum


class ModelState(IntEnum):
    """Where a version of a model is in its life. Only AVAILABLE ones answer requests."""

    UNKNOWN = 0
    START = 10
    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50
