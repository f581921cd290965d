"""Gather: remote peers train independently; their compressed updates are fetched, checked and applied.

Peers `compress` and `publish`. A `GatherPlan` names the peers to fetch; `run_window` does everything for one
window, in one process or on `Ranks` that share the work. With `Artifacts`, several nodes follow one sequence
of decisions, and `catch_up` applies those that a node has missed. The parts of a window can be called one by
one: `gather` (or a `Gatherer` per rank and `merge`), `find_overlap`, `decide`, `OuterUpdate`. Stores need
obstore, the extra `remote`.
"""

from megalith.distributed.elastic_ranks import ElasticRanks
from megalith.gather.artifact import Artifacts, prune_artifacts, read_artifact_manifest
from megalith.gather.compress import ErrorFeedback, compress, decompress, peek, publish
from megalith.gather.fetch import Gatherer, RankOptions, gather
from megalith.gather.overlap import find_overlap
from megalith.gather.payload import Label
from megalith.gather.payload_schema import PayloadSchema
from megalith.gather.plan import (
    Fault,
    GatherConfig,
    GatherPlan,
    Location,
    OverlapConfig,
    Status,
    UpdateConfig,
    partition,
    payload_key,
)
from megalith.gather.result import GatherResult, Partial, SkipReason, decide, merge
from megalith.gather.table_rows import PeerTables
from megalith.gather.update import OuterUpdate
from megalith.gather.window import WindowReport, catch_up, metrics, run_window, write_artifact
from megalith.storage.object_store import ObjectStore, open_object_store

__all__ = [
    "Artifacts",
    "ElasticRanks",
    "ErrorFeedback",
    "Fault",
    "GatherConfig",
    "GatherPlan",
    "GatherResult",
    "Gatherer",
    "Label",
    "Location",
    "ObjectStore",
    "OuterUpdate",
    "OverlapConfig",
    "Partial",
    "PayloadSchema",
    "PeerTables",
    "RankOptions",
    "SkipReason",
    "Status",
    "UpdateConfig",
    "WindowReport",
    "catch_up",
    "compress",
    "decide",
    "decompress",
    "find_overlap",
    "gather",
    "merge",
    "metrics",
    "open_object_store",
    "partition",
    "payload_key",
    "peek",
    "prune_artifacts",
    "publish",
    "read_artifact_manifest",
    "run_window",
    "write_artifact",
]
