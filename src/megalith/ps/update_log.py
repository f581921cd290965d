"""UpdateLog: files of everything that changes the tables of one server, in the order of the changes.

A server that exits starts again from a checkpoint and this log (`recovery.py`). The log is a sequence of
segments; a save begins a new one, so the rows of the save and the segments from that one on are the state of
the server:

    file                   content
    log-SEGMENT.bin        records
    point-ID.json          written when save ID freezes the rows: its segment, the numbers of all workers, and
                           where the checkpoint will be; it counts if the checkpoint there is save ID

A record is "MLOG", the CRC-32 of its body (uint32), the size of the body (uint64), the CRC-32 of these 16
bytes (uint32), 4 zero bytes, and the body: the size of the JSON text (uint64), the text, then the arrays,
each padded to 8 bytes. Numbers are little-endian. The last record may be incomplete if the server exited
while writing it: it was not applied, and reading the log removes it from the file. With a wrong size,
complete records after it would look like a part of it; so the size has a checksum of its own.

    mode     a record is                                                lost if the process or machine ends
    async    written after at most FLUSH_SECONDS or FLUSH_BYTES,        updates of that time; after a power
             then flushed to the disk in another thread                 failure also what was not yet flushed
    sync     flushed to the disk before the update is applied           nothing that was answered

If the disk is full, records of mode "async" stay in the buffer and are written again later. The next call
of a worker raises the error, and no update is accepted as long as it lasts, so not more than the buffer is
lost.
"""

from __future__ import annotations

import json
import logging
import os
import re
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from megalith.errors import CheckpointError
from megalith.ps.messages import ServerWrite
from megalith.storage.json_codec import parse_json
from megalith.storage.local_files import crc32, sync_path, write_atomically

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.2
FLUSH_BYTES = 4 << 20
MAX_TEXT = 64 << 20
_HEAD = struct.Struct("<4sIQ")
_CHECK = struct.Struct("<I4x")  # of the head
_HEAD_BYTES = _HEAD.size + _CHECK.size
_MAGIC = b"MLOG"
_SEGMENT = re.compile(r"log-(\d{8})\.bin")
_DTYPES = {name: np.dtype(name) for name in ("int64", "int32", "float32", "uint8")}


class UpdateLog:
    def __init__(self, folder: Path, *, flushed: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._flushed = flushed
        self._buffer: list[bytes] = []
        self._size = 0
        self._file: int | None = None
        self._thread = ThreadPoolExecutor(1, "megalith log") if not flushed else None
        self._flush: Future[None] | None = None
        self._unflushed = False
        self._failure: OSError | None = None
        self.segment = max(self.segments(), default=-1)

    def segments(self) -> list[int]:
        found = (_SEGMENT.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match is not None)

    def begin_segment(self) -> int:
        self.flush()
        if self._file is not None:
            os.close(self._file)
        self.segment += 1
        path = self._path(self.segment)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        sync_path(self._folder)
        return self.segment

    def append(self, worker: int, number: int, write: ServerWrite) -> None:
        record = encode_record(worker, number, write)
        if self._flushed:
            assert self._file is not None
            _write_all(self._file, record)
            _sync(self._file)
            return
        self.check()
        if self._size >= FLUSH_BYTES:
            self.flush()
        self._buffer += record
        self._size += sum(map(len, record))

    def flush(self) -> None:
        """Write what is buffered, and start to flush it to the disk."""
        if self._file is None:
            return
        if self._buffer:
            _write_all(self._file, self._buffer)
            self._buffer, self._size, self._unflushed = [], 0, True
        if self._thread is None or (self._flush is not None and not self._flush.done()):
            return
        failed = None if self._flush is None else self._flush.exception()
        if isinstance(failed, OSError):
            self._failure, self._unflushed = failed, True
        if self._unflushed:
            self._unflushed = False
            self._flush = self._thread.submit(_flush_file, os.dup(self._file))

    def flush_in_background(self) -> None:
        """Flush as `flush` does, every FLUSH_SECONDS. An error is raised by `check`."""
        try:
            self.flush()
        except OSError as error:
            if self._failure is None:
                logger.warning("%s: updates cannot be written and stay in memory: %s", self._folder, error)
            self._failure = error

    def check(self) -> None:
        """Raise the error of a flush in the background once, and write what has stayed in the buffer."""
        failure, self._failure = self._failure, None
        if failure is not None:
            self.flush_in_background()
            raise self._failure or failure

    def sync(self) -> None:
        self.flush()
        if self._file is not None:
            _sync(self._file)

    def close(self) -> None:
        try:
            self.flush()
            if self._flush is not None:
                self._flush.result()  # no limit: a flush of this process to its disk
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            if self._file is not None:
                os.close(self._file)
                self._file = None

    # ---- points

    def write_point(self, id: str, point: Mapping[str, Any]) -> None:
        write_atomically(self._point(id), [json.dumps(point).encode()])

    def remove_point(self, id: str) -> None:
        self._point(id).unlink(missing_ok=True)

    def points(self) -> dict[str, dict[str, Any]]:
        """Return the recorded states by the id of their save, the newest first."""
        found = {}
        for path in self._folder.glob("point-*.json"):
            data: Any = parse_json(path.read_bytes(), CheckpointError)
            if isinstance(data, dict) and isinstance(data.get("segment"), int):
                found[path.stem.removeprefix("point-")] = data
        return dict(sorted(found.items(), key=lambda item: -item[1]["segment"]))

    def keep_from(self, id: str) -> None:
        """Delete what a complete checkpoint has replaced."""
        points = self.points()
        if id not in points:
            return
        for other in points:
            if other != id:
                self.remove_point(other)
        for segment in self.segments():
            if segment < points[id]["segment"]:
                self._path(segment).unlink(missing_ok=True)

    # ---- reading

    def records(self, first: int) -> Iterator[tuple[int, int, ServerWrite]]:
        known = [segment for segment in self.segments() if segment >= first]
        if known != list(range(first, first + len(known))):
            raise CheckpointError(f"{self._folder}: segments of the log are missing: there are {known}")
        for segment in known:
            yield from read_records(self._path(segment), last=segment == known[-1])

    def _path(self, segment: int) -> Path:
        return self._folder / f"log-{segment:08}.bin"

    def _point(self, id: str) -> Path:
        return self._folder / f"point-{id}.json"


def encode_record(worker: int, number: int, write: ServerWrite) -> list[bytes]:
    arrays = {name: np.ascontiguousarray(array) for name, array in write.arrays.items()}
    text = json.dumps(
        {
            "worker": worker,
            "number": number,
            "kind": write.kind,
            "header": write.header,
            "arrays": [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()],
        }
    ).encode()
    body = [struct.pack("<Q", len(text)), _padded(text), *(_padded(x.tobytes()) for x in arrays.values())]
    crc = 0
    for piece in body:
        crc = crc32(piece, crc)
    head = _HEAD.pack(_MAGIC, crc, sum(map(len, body)))
    return [head + _CHECK.pack(crc32(head)), *body]


def read_records(path: Path, *, last: bool) -> Iterator[tuple[int, int, ServerWrite]]:
    size, at = path.stat().st_size, 0
    with path.open("rb") as file:
        while at < size:
            head = file.read(_HEAD_BYTES)
            if len(head) < _HEAD_BYTES:
                crc = length = 0
                valid = head[:4] == _MAGIC[: len(head)]
            else:
                magic, crc, length = _HEAD.unpack_from(head)
                valid = magic == _MAGIC and head[_HEAD.size :] == _CHECK.pack(crc32(head[: _HEAD.size]))
            end = at + _HEAD_BYTES + length
            body = file.read(length) if valid and end <= size else b""
            if not valid or end > size or crc32(body) != crc:
                # Of the last record, blocks may be missing, or they reached the disk in another order.
                if valid and last and end >= size:
                    os.truncate(path, at)
                    return
                raise CheckpointError(f"{path}: the record at byte {at} is damaged")
            try:
                yield _decode_record(body)
            except (KeyError, TypeError, ValueError, struct.error) as error:
                raise CheckpointError(f"{path}: the record at byte {at} is damaged: {error!r}") from None
            at = end


def _decode_record(body: bytes) -> tuple[int, int, ServerWrite]:
    (length,) = struct.unpack_from("<Q", body)
    if length > min(MAX_TEXT, len(body)):
        raise ValueError(f"a text of {length} bytes")
    found: Any = parse_json(body[8 : 8 + length], CheckpointError)
    at = 8 + _pad(length)
    arrays = {}
    for name, dtype, shape in found["arrays"]:
        kind = _DTYPES[dtype]
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(body, kind, count, at).reshape(shape)
        at += _pad(count * kind.itemsize)
    return found["worker"], found["number"], ServerWrite(found["kind"], found["header"], arrays)


def _pad(size: int) -> int:
    return -(-size // 8) * 8


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (_pad(len(data)) - len(data))


def _write_all(file: int, pieces: list[bytes]) -> None:
    data, end = memoryview(b"".join(pieces)), os.fstat(file).st_size
    try:
        while data:
            data = data[os.write(file, data) :]
    except OSError:
        os.ftruncate(file, end)  # records after a part of one could not be read
        raise


def _sync(file: int) -> None:
    getattr(os, "fdatasync", os.fsync)(file)  # macOS has only fsync


def _flush_file(file: int) -> None:
    try:
        _sync(file)
    finally:
        os.close(file)
