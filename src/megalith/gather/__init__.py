"""Gather: peers far away train on their own; their compressed updates are fetched, checked and applied
together.

Peers `compress` and `publish`. A `Plan` says whom to fetch; `gather` (or a `Gatherer` per rank and `merge`)
fetches and checks; `find_overlap` finds copies; `OuterUpdate` steps the weights within a memory budget;
artifacts let others `catch_up`. `run_window` is all of it, in one process or on `Ranks` that share the work.
Stores need obstore, the extra `remote`.
"""

from megalith.gather.artifact import CatchUp, catch_up, load_artifact, read_artifact_manifest
from megalith.gather.compress import Compressed, ErrorFeedback, compress, decompress
from megalith.gather.decision import Decision, SkipReason, decide
from megalith.gather.fetch import FetchOptions, Record
from megalith.gather.fingerprint import Fingerprint, fingerprint
from megalith.gather.gatherer import Gatherer, gather
from megalith.gather.joint import WindowReport
from megalith.gather.manifest import Manifest
from megalith.gather.merge import GatherResult, merge
from megalith.gather.metrics import lines, metrics, norm_medians, to_penalise
from megalith.gather.overlap import Overlap, excluded_uids, find_overlap
from megalith.gather.partial import Partial
from megalith.gather.partition import backfill, partition, redeal
from megalith.gather.payload import Header, Label, Payload
from megalith.gather.plan import Location, Plan, payload_key
from megalith.gather.publish import Published, peek, publish
from megalith.gather.ranks import Ranks
from megalith.gather.schema import ParameterSpec, Schema, TableSpec
from megalith.gather.settings import OverlapConfig, UpdateConfig
from megalith.gather.status import OUR_FAULTS, PEER_FAULTS, Fault, Status
from megalith.gather.store import Store, local_store, memory_store, open_store, s3_store
from megalith.gather.update import OuterUpdate, UpdateReport
from megalith.gather.window import run_window

__all__ = [
    "OUR_FAULTS",
    "PEER_FAULTS",
    "CatchUp",
    "Compressed",
    "Decision",
    "ErrorFeedback",
    "Fault",
    "FetchOptions",
    "Fingerprint",
    "GatherResult",
    "Gatherer",
    "Header",
    "Label",
    "Location",
    "Manifest",
    "OuterUpdate",
    "Overlap",
    "OverlapConfig",
    "ParameterSpec",
    "Partial",
    "Payload",
    "Plan",
    "Published",
    "Ranks",
    "Record",
    "Schema",
    "SkipReason",
    "Status",
    "Store",
    "TableSpec",
    "UpdateConfig",
    "UpdateReport",
    "WindowReport",
    "backfill",
    "catch_up",
    "compress",
    "decide",
    "decompress",
    "excluded_uids",
    "find_overlap",
    "fingerprint",
    "gather",
    "lines",
    "load_artifact",
    "local_store",
    "memory_store",
    "merge",
    "metrics",
    "norm_medians",
    "open_store",
    "partition",
    "payload_key",
    "peek",
    "publish",
    "read_artifact_manifest",
    "redeal",
    "run_window",
    "s3_store",
    "to_penalise",
]
