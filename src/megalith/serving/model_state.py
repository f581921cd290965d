"""The states of a served model, with TF Serving's numbers, which are used on the wire and in ZooKeeper."""

from __future__ import annotations

from enum import IntEnum


class ModelState(IntEnum):
    """The state of a version of a model. Only an AVAILABLE version answers requests."""

    UNKNOWN = 0
    START = 10
    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50
