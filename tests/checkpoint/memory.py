"""A store in memory that records which files were read."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.storage.store import Store, StoredFile, checksum


class MemoryStore(Store):
    """Files by name. reads: the names of files in the order they were read, completely or in part."""

    def __init__(self, files: dict[str, bytes] | None = None, where: str = "memory") -> None:
        self.where = self.address = where
        self.files = {} if files is None else files
        self.reads: list[str] = []

    def write(self, name: str, parts: Sequence[Any], *, flush: bool = True) -> StoredFile:
        data = b"".join(bytes(memoryview(part).cast("B")) for part in parts)
        self.files[name] = data
        return StoredFile(path=name, bytes=len(data), checksum=checksum(zlib.crc32(data)))

    def size(self, name: str) -> int:
        return len(self._file(name))

    def read(self, name: str, size: int, start: int = 0) -> Tensor:
        self.reads.append(name)
        data = self._file(name)[start : start + size]
        if len(data) < size:
            raise OSError("the file ends early")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if size else torch.empty(0).byte()

    def read_whole(self, name: str, limit: int) -> bytes:
        data = self._file(name)
        if len(data) > limit:
            raise OSError("the file is too large")
        return data

    def upload(self, name: str, file: Path) -> None:
        self.files[name] = file.read_bytes()

    def inside(self, folder: str) -> MemoryStore:
        raise NotImplementedError

    def folders(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.files if "/" in name})

    def remove(self, name: str) -> None:
        for each in [n for n in self.files if n == name or n.startswith(f"{name}/")]:
            del self.files[each]

    def copy(self) -> MemoryStore:
        return MemoryStore(dict(self.files), self.where)

    def _file(self, name: str) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]


class HookedStore(MemoryStore):
    """The files of another store. It calls a function with the name of each file before it is written."""

    def __init__(self, store: MemoryStore, hook: Callable[[str], object]) -> None:
        super().__init__(store.files, store.where)
        self._hook = hook

    def write(self, name: str, parts: Sequence[Any], *, flush: bool = True) -> StoredFile:
        self._hook(name)
        return super().write(name, parts, flush=flush)
