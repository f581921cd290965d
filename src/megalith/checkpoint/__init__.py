"""Checkpoints: safetensors files and a JSON manifest, in a directory or an object store."""

from megalith.checkpoint.compare import Difference, diff
from megalith.checkpoint.json_state import rng_state, set_rng_state
from megalith.checkpoint.loading import LoadReport, TableReport, load
from megalith.checkpoint.manifest import ListedCheckpoint, Manifest, find_checkpoints, read_manifest
from megalith.checkpoint.parquet_export import export
from megalith.checkpoint.parts import recovery
from megalith.checkpoint.rewrite import compact, reshard
from megalith.checkpoint.rotation import Rotation
from megalith.checkpoint.saving import SaveHandle, async_save, save, save_delta
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
