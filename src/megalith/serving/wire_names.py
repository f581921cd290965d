"""Wire names: the signatures that select what a PredictRequest does, and the default size limit."""

from __future__ import annotations

PREDICT = "serving_default"
LOOKUP, RAW_LOOKUP = "lookup", "raw_lookup"
HASHTABLE_ASSIGN, RAW_ASSIGN = "hashtable_assign", "raw_assign"
SYNC_POSITION, SYNC_BEGIN, SYNC_END, SYNC_RELOAD = "sync_position", "sync_begin", "sync_end", "sync_reload"
CONTROLS = (SYNC_POSITION, SYNC_BEGIN, SYNC_END, SYNC_RELOAD)
WRITES = (HASHTABLE_ASSIGN, RAW_ASSIGN, *CONTROLS)
SIGNATURES = (PREDICT, LOOKUP, RAW_LOOKUP, *WRITES)
MAX_REQUEST_BYTES = 64 * 2**20
"""Default limit of the bytes that the tensors of one request take."""


def write_signature(name: str) -> str | None:
    """Return the write signature that a name means, or None if it does not write."""
    if name.endswith(f"/{RAW_ASSIGN}"):
        return RAW_ASSIGN
    return name if name in WRITES else None
