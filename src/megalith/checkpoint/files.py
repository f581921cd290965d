"""Files of a checkpoint: written whole or not at all, read only after their length and checksum fit.

A file is written under a temporary name, flushed to the disk and renamed. Tensors are stored as safetensors.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from megalith.checkpoint.manifest import FileEntry
from megalith.errors import CheckpointError

_BLOCK = 1 << 22


def write_tensors(root: Path, name: str, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Writes a safetensors file below `root` and returns its entry for the manifest."""
    return write_bytes(root, name, to_bytes({k: v.detach().cpu().contiguous() for k, v in tensors.items()}))


def write_bytes(root: Path, name: str, data: bytes) -> FileEntry:
    """Writes a file below `root`: temporary name, fsync, rename."""
    target = root / name
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, target)
    sync_directory(target.parent)
    return FileEntry(path=name, bytes=len(data), checksum=checksum(data))


def sync_directory(directory: Path) -> None:
    """Makes a rename in this directory last."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(data: bytes) -> str:
    """A checksum as the manifest has it."""
    return f"crc32:{zlib.crc32(data):08x}"


def verify(root: Path, entry: FileEntry) -> None:
    """Raises CheckpointError unless the file is there with the length and checksum of its entry."""
    path = locate(root, entry)
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            raise CheckpointError(f"{path} has {size} bytes, its manifest says {entry.bytes}")
        found = 0
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                found = zlib.crc32(block, found)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if f"crc32:{found:08x}" != entry.checksum:
        raise CheckpointError(f"{path} is damaged: its checksum is crc32:{found:08x}, not {entry.checksum}")


def locate(root: Path, entry: FileEntry) -> Path:
    """Where an entry's file lies; never outside the checkpoint."""
    relative = PurePosixPath(entry.path)
    if relative.is_absolute() or ".." in relative.parts or not relative.parts:
        raise CheckpointError(
            f"{root / 'manifest.json'}: file path {entry.path!r} leads out of the checkpoint"
        )
    return root / relative


class TensorFile:
    """An open safetensors file; tensors are read when asked for."""

    def __init__(self, root: Path, entry: FileEntry) -> None:
        self.path = locate(root, entry)
        try:
            self._file = safe_open(self.path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path} is no safetensors file: {error}") from None

    def keys(self) -> list[str]:
        """The names of its tensors."""
        return list(self._file.keys())

    def get(self, name: str) -> Tensor:
        """One tensor."""
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        return tensor

    def all(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        return {name: self.get(name) for name in self.keys()}


def remove_tree(directory: Path) -> None:
    """Deletes a directory that no manifest names any more."""
    shutil.rmtree(directory, ignore_errors=True)
