"""Checkpoints: safetensors files and a JSON manifest, in a directory or an object store."""

from megalith.checkpoint.compare import Difference, diff
from megalith.checkpoint.listing import ListedCheckpoint, find_checkpoints
from megalith.checkpoint.loading import LoadReport, TableReport, load
from megalith.checkpoint.manifest import Manifest
from megalith.checkpoint.parquet_export import export
from megalith.checkpoint.rewrite import compact, reshard
from megalith.checkpoint.rng import rng_state, set_rng_state
from megalith.checkpoint.rotation import Rotation
from megalith.checkpoint.saved_rows import read_manifest
from megalith.checkpoint.saving import SaveHandle, async_save, save, save_delta
from megalith.checkpoint.server_restore import recovery
from megalith.checkpoint.verification import Verification, verify
from megalith.storage.object_store import ObjectStore

__all__ = [
    "Difference",
    "ListedCheckpoint",
    "LoadReport",
    "Manifest",
    "ObjectStore",
    "Rotation",
    "SaveHandle",
    "TableReport",
    "Verification",
    "async_save",
    "compact",
    "diff",
    "export",
    "find_checkpoints",
    "load",
    "read_manifest",
    "recovery",
    "reshard",
    "rng_state",
    "save",
    "save_delta",
    "set_rng_state",
    "verify",
]
