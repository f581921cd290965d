"""Checkpoints: safetensors files and a JSON manifest, in a directory or an object store."""

from megalith.checkpoint.manifest import Manifest
from megalith.checkpoint.reader import LoadReport, TableReport, load
from megalith.checkpoint.rewrite import compact, reshard
from megalith.checkpoint.rng import rng_state, set_rng_state
from megalith.checkpoint.rotation import Rotation
from megalith.checkpoint.rows import read_manifest
from megalith.checkpoint.writer import SaveHandle, async_save, save, save_delta

__all__ = [
    "LoadReport",
    "Manifest",
    "Rotation",
    "SaveHandle",
    "TableReport",
    "async_save",
    "compact",
    "load",
    "read_manifest",
    "reshard",
    "rng_state",
    "save",
    "save_delta",
    "set_rng_state",
]
