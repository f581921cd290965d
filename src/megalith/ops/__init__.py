"""Ops on ids and rows: pure functions, differentiable where a gradient makes sense.

Each op runs native code on CPU tensors and plain torch on other devices. Ops know neither tables nor engines.
"""

from megalith.hashing import hash_bytes, hash_strings
from megalith.ops.bucketing import Bucketized, Deduped, bucketize, dedup, match, place_rows, split_rows
from megalith.ops.gather_rows import gather, gather_pieces, scatter_pieces, scatter_sum
from megalith.ops.ids import fid, fid_v1_to_v2, slot_of
from megalith.ops.move_runs import move_runs, pad_rows, take
from megalith.ops.pooling import Bags, OutputSlice, Pooling, pool, pool_rows, segment_sum, unpool

__all__ = [
    "Bags",
    "Bucketized",
    "Deduped",
    "OutputSlice",
    "Pooling",
    "bucketize",
    "dedup",
    "fid",
    "fid_v1_to_v2",
    "gather",
    "gather_pieces",
    "hash_bytes",
    "hash_strings",
    "match",
    "move_runs",
    "pad_rows",
    "place_rows",
    "pool",
    "pool_rows",
    "scatter_pieces",
    "scatter_sum",
    "segment_sum",
    "slot_of",
    "split_rows",
    "take",
    "unpool",
]
