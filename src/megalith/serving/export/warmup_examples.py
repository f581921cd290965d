"""Warm-up requests of an export: a server computes them before a version answers."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import torch
from torch import Tensor

from megalith.errors import ExportError
from megalith.ragged import Ragged
from megalith.storage.json_codec import parse_json
from megalith.storage.store import StoredFile, checksum

_MAX_BYTES = 1 << 24

Example = tuple[dict[str, Ragged], Tensor | None]
"""Features by name, and dense values float32 [B, num_dense]."""


def read_examples(path: Path) -> list[Example]:
    """Read the warm-up requests of an export."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError("too long")
        examples = []
        for each in parse_json(path.read_text())["examples"]:
            features = {name: Ragged.from_lists(lists) for name, lists in each["features"].items()}
            dense = (
                None
                if each["dense"] is None
                else torch.tensor(each["dense"], dtype=torch.float32, device="cpu")
            )
            examples.append((features, dense))
        return examples
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ExportError(f"{path} holds no valid examples: {error}") from None


def write_examples(path: Path, examples: list[Example]) -> StoredFile:
    """Write the warm-up requests of an export."""
    data = {
        "examples": [
            {
                "features": {name: column.to_lists() for name, column in features.items()},
                "dense": None if dense is None else dense.tolist(),
            }
            for features, dense in examples
        ]
    }
    text = json.dumps(data, allow_nan=False).encode()
    path.write_bytes(text)
    return StoredFile(path.name, len(text), checksum(zlib.crc32(text)))
