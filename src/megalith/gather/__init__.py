"""Gather: remote peers train independently; their compressed updates are fetched, checked and applied.

Peers `compress` and `publish`. A `GatherPlan` names the peers to fetch; `run_window` does everything for one
window, in one process or on `Ranks` that share the work, and `catch_up` replays windows from their artifacts.
Its parts can be called one by one: `gather` (or a `Gatherer` per rank and `merge`), `find_overlap`, `decide`,
`OuterUpdate`. Stores need obstore, the extra `remote`.
"""

from megalith.distributed.elastic_ranks import ElasticRanks
from megalith.distributed.tensor_parts import Fingerprint, fingerprint
from megalith.gather.artifact import (
    ArtifactManifest,
    CatchUp,
    catch_up,
    load_artifact,
    prune_artifacts,
    read_artifact_manifest,
)
from megalith.gather.compress import Compressed, ErrorFeedback, Published, compress, decompress, peek, publish
from megalith.gather.fetch import FetchOptions, Gatherer, gather
from megalith.gather.overlap import Overlap, excluded_uids, find_overlap
from megalith.gather.payload import Header, Label, Payload
from megalith.gather.payload_schema import ParameterSpec, PayloadSchema, TableSpec
from megalith.gather.plan import (
    OUR_FAULTS,
    PEER_FAULTS,
    Fault,
    GatherPlan,
    Location,
    OverlapConfig,
    Status,
    UpdateConfig,
    backfill,
    deal,
    partition,
    payload_key,
)
from megalith.gather.result import (
    Decision,
    GatherResult,
    Partial,
    Record,
    SkipReason,
    decide,
    lines,
    merge,
    norm_medians,
    to_penalise,
)
from megalith.gather.table_rows import PeerTables, TableShards
from megalith.gather.update import OuterUpdate, UpdateReport
from megalith.gather.window import WindowReport, metrics, run_window
from megalith.storage.object_store import ObjectStore, open_object_store

__all__ = [
    "OUR_FAULTS",
    "PEER_FAULTS",
    "ArtifactManifest",
    "CatchUp",
    "Compressed",
    "Decision",
    "ElasticRanks",
    "ErrorFeedback",
    "Fault",
    "FetchOptions",
    "Fingerprint",
    "GatherPlan",
    "GatherResult",
    "Gatherer",
    "Header",
    "Label",
    "Location",
    "ObjectStore",
    "OuterUpdate",
    "Overlap",
    "OverlapConfig",
    "ParameterSpec",
    "Partial",
    "Payload",
    "PayloadSchema",
    "PeerTables",
    "Published",
    "Record",
    "SkipReason",
    "Status",
    "TableShards",
    "TableSpec",
    "UpdateConfig",
    "UpdateReport",
    "WindowReport",
    "backfill",
    "catch_up",
    "compress",
    "deal",
    "decide",
    "decompress",
    "excluded_uids",
    "find_overlap",
    "fingerprint",
    "gather",
    "lines",
    "load_artifact",
    "merge",
    "metrics",
    "norm_medians",
    "open_object_store",
    "partition",
    "payload_key",
    "peek",
    "prune_artifacts",
    "publish",
    "read_artifact_manifest",
    "run_window",
    "to_penalise",
]
