"""Frozen rows: one table of an export, a memory-mapped file that never changes.

The file is safetensors:

    ids      int64 [n]          sorted by hash
    buckets  int64 [2^k + 1]    where the ids with each value of the leading k bits of the hash begin
    rows     [n, width]         in the order of the ids; see row_format.py

docs/formats/export.md specifies it.
"""

from __future__ import annotations

import mmap
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.bits import mix64, shift_right, signed
from megalith.errors import ExportError
from megalith.library import native_module
from megalith.serving.export.row_format import RowFormat
from megalith.storage.local_files import crc32
from megalith.storage.store import StoredFile, checksum, view_of
from megalith.storage.tensor_files import decode, plan_file

_IDS_PER_BUCKET = 4
_GOLDEN = signed(0x9E3779B97F4A7C15)


def slot_hash(ids: Tensor) -> Tensor:
    """Return the hash by which ids are sorted."""
    # ids: int64 [n]; returns: the 64 bits of each hash, int64 [n].
    return mix64(ids + _GOLDEN)


class FrozenRows:
    """The rows of a file, which is mapped into memory or read."""

    def __init__(self, path: Path, format: RowFormat, *, in_memory: bool = False) -> None:
        self._path = path
        self._format = format
        tensors = decode(_read(path) if in_memory else _mapped(path), str(path), ExportError)
        forms = {name: (tensor.dtype, tensor.dim()) for name, tensor in tensors.items()}
        wanted = {"ids": (torch.int64, 1), "buckets": (torch.int64, 1)}
        wanted["rows"] = (format.dtype, 2)
        if forms != wanted:
            dtype = str(format.dtype).removeprefix("torch.")
            raise ExportError(f"{path} holds {sorted(forms)}, not ids, buckets and rows of {dtype}")
        self.ids, self._buckets, self._rows = tensors["ids"], tensors["buckets"], tensors["rows"]
        shape = [self.ids.numel(), format.width]
        if list(self._rows.shape) != shape:
            raise ExportError(f"{path} holds rows {list(self._rows.shape)}, not {shape}")
        self._bits = _bits(self._buckets.numel(), path)
        self._check_buckets()
        native = native_module()
        self.native: Any = None  # The native reader; None without the native module
        if native is not None:
            parts, steps = format.native_parts, format.column_steps
            self.native = native.FrozenFile(self.ids, self._buckets, self._rows, parts, steps)

    def _check_buckets(self) -> None:
        """Raise ExportError for a bucket that reaches beyond the ids, which lookups would follow."""
        n, native = self.ids.numel(), native_module()
        if native is not None:
            fits = bool(native.frozen_fits(self._buckets, n))
        else:
            ends = (int(self._buckets[0]), int(self._buckets[-1]))
            fits = ends == (0, n) and not bool((self._buckets.diff() < 0).any())
        if not fits:
            raise ExportError(f"{self._path} is damaged: its buckets do not partition its {n} ids")

    def __len__(self) -> int:
        return self.ids.numel()

    def read(self, ids: Tensor, out: Tensor, skip: Tensor | None = None) -> int:
        """Read rows; an id without a row reads as zeros. All tensors are contiguous."""
        # ids: int64 [n]; out: where the rows go, float32 [n, dim]; skip: uint8 [n].
        if self.native is None:
            return self.read_reference(ids, out, skip)
        missing: int = self.native.read(ids, skip, out)
        return missing

    def read_reference(self, ids: Tensor, out: Tensor, skip: Tensor | None = None) -> int:
        """Read rows in torch; the reference implementation of `read`."""
        # ids: int64 [n]; out: where the rows go, float32 [n, dim]; skip: uint8 [n].
        found = self.find(ids)
        wanted = torch.ones_like(found, dtype=torch.bool) if skip is None else skip == 0
        has = wanted & (found >= 0)
        out[wanted & ~has] = 0.0
        out[has] = self._format.decode(self._rows[found[has]])
        return int((wanted & ~has).sum())

    def find(self, ids: Tensor) -> Tensor:
        """Return the row index of each id."""
        # ids: int64 [n]; returns: int64 [n].
        bucket = shift_right(slot_hash(ids), 64 - self._bits) if self._bits else torch.zeros_like(ids)
        begin, end = self._buckets[bucket], self._buckets[bucket + 1]
        found = torch.full_like(ids, -1)
        for k in range(int((end - begin).max()) if ids.numel() else 0):
            inside = begin + k < end
            at = (begin + k)[inside]
            found[inside] = torch.where(self.ids[at] == ids[inside], at, found[inside])
        return found


class FrozenWriter:
    """Writes the rows of one table to a new file.

    Disk space is allocated first where the system supports it, so that a full disk raises OSError here
    instead of crashing later. Memory: 40 bytes a row at first, then 8 bytes a row and the rows of one `add`.
    """

    def __init__(self, path: Path, ids: Tensor, format: RowFormat) -> None:
        self._path, self._format = path, format
        hashes = slot_hash(ids)
        order = torch.argsort(hashes ^ signed(1 << 63))  # as unsigned numbers
        bits = max(0, (ids.numel() // _IDS_PER_BUCKET).bit_length() - 1)
        header, placed = plan_file(
            {
                "ids": (torch.int64, [ids.numel()]),
                "buckets": (torch.int64, [(1 << bits) + 1]),
                "rows": (format.dtype, [ids.numel(), format.width]),
            }
        )
        self._size = max(place.end for place in placed.values())
        with open(path, "xb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, self._size)
            file.write(header)
            file.truncate(self._size)
        self._data = torch.from_file(str(path), shared=True, size=self._size, dtype=torch.uint8)
        tensors = decode(self._data, str(path), ExportError)
        torch.index_select(ids, 0, order, out=tensors["ids"])
        tensors["buckets"].copy_(_buckets(hashes, bits))
        self._ids, self._rows = tensors["ids"], tensors["rows"]
        self._places = torch.empty_like(order)
        self._places[order] = torch.arange(order.numel(), device="cpu")
        self.rows = ids.numel()
        self._written = 0

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Write the next rows, in the order of the constructor's ids."""
        # ids: int64 [k]; rows: float32 [k, dim].
        places = self._places[self._written : self._written + ids.numel()]
        if not torch.equal(self._ids[places], ids):
            raise ExportError(f"{self._path}: the table changed while it was exported; save a checkpoint")
        self._rows[places] = self._format.encode(rows)
        self._written += ids.numel()

    def finish(self) -> None:
        """Check that all rows were written. Raise ExportError if rows are missing."""
        if self._written != self.rows:
            raise ExportError(f"{self._path}: {self._written} rows for {self.rows} ids")

    def close(self) -> StoredFile:
        """Flush the file to disk and return its entry. Raise ExportError if rows are missing."""
        self.finish()
        crc = crc32(view_of(self._data))
        with open(self._path, "rb") as file:
            os.fsync(file.fileno())
        return StoredFile(path=self._path.name, bytes=self._size, checksum=checksum(crc))


def _buckets(hashes: Tensor, bits: int) -> Tensor:
    own = shift_right(hashes, 64 - bits) if bits else torch.zeros_like(hashes)
    counts = torch.bincount(own, minlength=1 << bits)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _bits(buckets: int, path: Path) -> int:
    bits = (buckets - 1).bit_length() - 1 if buckets > 1 else -1
    if buckets != (1 << max(bits, 0)) + 1 or bits > 40:
        raise ExportError(f"{path} is damaged: it has {buckets} bucket bounds, not 2^k + 1")
    return bits


def _read(path: Path) -> Tensor:
    """Return the bytes of a file, uint8."""
    try:
        data = torch.empty(path.stat().st_size, dtype=torch.uint8, device="cpu")
        with open(path, "rb") as file:
            if file.readinto(data.numpy()) != data.numel():  # type: ignore[arg-type]
                raise OSError("it changed while it was read")
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error}") from None
    return data


def _mapped(path: Path) -> Tensor:
    """Map a file into memory; return its bytes, uint8, read-only."""
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ExportError(f"{path} cannot be mapped: {error}") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that the memory is read-only
        return torch.frombuffer(data, dtype=torch.uint8)
