"""Checkpoints: a directory of safetensors files and a JSON manifest. `save`, `load`."""

from megalith.checkpoint.manifest import Manifest, read_manifest
from megalith.checkpoint.reader import LoadReport, load
from megalith.checkpoint.rng import rng_state, set_rng_state
from megalith.checkpoint.writer import save

__all__ = ["LoadReport", "Manifest", "load", "read_manifest", "rng_state", "save", "set_rng_state"]
