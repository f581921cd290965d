"""Names and numbers of the wire protocols: signatures, states of a version, and the default size limit.

Clients, servers, parameter sync and discovery share them. The signature of a PredictRequest selects what it
does. The states have TF Serving's numbers, which are used on the wire and in ZooKeeper. This module needs
neither protobuf nor gRPC.
"""

from __future__ import annotations

from enum import IntEnum

PREDICT = "serving_default"
LOOKUP, RAW_LOOKUP = "lookup", "raw_lookup"
HASHTABLE_ASSIGN, RAW_ASSIGN = "hashtable_assign", "raw_assign"
SYNC_POSITION, SYNC_BEGIN, SYNC_END, SYNC_RELOAD = "sync_position", "sync_begin", "sync_end", "sync_reload"
CONTROLS = (SYNC_POSITION, SYNC_BEGIN, SYNC_END, SYNC_RELOAD)
WRITES = (HASHTABLE_ASSIGN, RAW_ASSIGN, *CONTROLS)
SIGNATURES = (PREDICT, LOOKUP, RAW_LOOKUP, *WRITES)
MAX_REQUEST_BYTES = 64 * 2**20  # Default limit of the bytes that the tensors of one request take


def write_signature(name: str) -> str | None:
    """Return the write signature that a name means, or None if it does not write."""
    if name.endswith(f"/{RAW_ASSIGN}"):
        return RAW_ASSIGN
    return name if name in WRITES else None


class ModelState(IntEnum):
    """The state of a version of a model. Only an AVAILABLE version answers requests."""

    UNKNOWN = 0
    START = 10
    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50
