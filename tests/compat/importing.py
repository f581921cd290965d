"""Files of other systems built by hand (protobuf, TFRecords, Monolith's entries), and tables as values."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from megalith import EmbeddingCollection, Feature, TableConfig
from megalith.compat.monolith.importer import EntryLayout, SegmentLayout
from megalith.data.record_files import masked_crc32c
from megalith.table import Chunk
from tests.table.support import whole

ADAGRAD = EntryLayout(2, 4, True, True, (SegmentLayout(1, False, ((1, 2, 2),)),))
"""Two weights and Adagrad's two sums."""


def collection(*tables: TableConfig, engine: str = "cpu") -> EmbeddingCollection:
    """A collection of these tables, a feature for each."""
    return EmbeddingCollection(list(tables), [Feature(t.name, t.name) for t in tables], engine=engine)


def rows(of: EmbeddingCollection, table: str) -> dict[int, list[float]]:
    """Weights by id."""
    chunk = contents(of, table)
    return dict(zip(chunk.ids.tolist(), chunk.rows.tolist(), strict=True))


def state(of: EmbeddingCollection, table: str, key: str) -> dict[int, list[float]]:
    """One optimizer state by id."""
    chunk = contents(of, table)
    return dict(zip(chunk.ids.tolist(), chunk.state[key].tolist(), strict=True))


def times(of: EmbeddingCollection, table: str) -> dict[int, int]:
    """Last-update times by id."""
    chunk = contents(of, table)
    return dict(zip(chunk.ids.tolist(), chunk.time.tolist(), strict=True))


def contents(of: EmbeddingCollection, table: str) -> Chunk:
    """All of a table, by ascending id."""
    return whole(of.shards.local[table])


# ---- protobuf


def varint(number: int) -> bytes:
    rest, out = number % (1 << 64), bytearray()
    while rest >= 0x80:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*out, rest])


def message(field: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return varint(field << 3 | 2) + varint(len(body)) + body


def floats(field: int, *values: float) -> bytes:
    """Unpacked, as proto2 writes a repeated float."""
    return b"".join(varint(field << 3 | 5) + struct.pack("<f", value) for value in values)


def packed(field: int, *values: float) -> bytes:
    """Packed, as proto3 does."""
    return message(field, struct.pack(f"<{len(values)}f", *values))


# ---- Monolith's entries


def entry(id: int, weights: Sequence[float], *dumps: bytes, time: int | None = None) -> bytes:
    """An EntryDump. dumps: a SingleOptimizerDump of each segment; without any, no opt at all."""
    out = varint(1 << 3 | 1) + struct.pack("<q", id) + floats(2, *weights)
    if dumps:
        out += message(3, *(message(1, dump) for dump in dumps))
    return out + (b"" if time is None else varint(4 << 3) + varint(time))


def adagrad(*norm: float) -> bytes:
    return message(1, floats(1, *norm))


def sgd() -> bytes:
    return message(2)


def ftrl(zero: Sequence[float], norm: Sequence[float]) -> bytes:
    return message(3, floats(1, *zero), floats(2, *norm))


def adam(m: Sequence[float], v: Sequence[float], power1: float, power2: float) -> bytes:
    return message(7, floats(1, *m), floats(2, *v), floats(3, power1), floats(4, power2))


def momentum(*n: float) -> bytes:
    return message(9, floats(1, *n))


def meta(table: str, entries: int) -> bytes:
    """A MultiHashTableMetadata."""
    return message(1, table.encode()) + varint(2 << 3) + varint(entries)


# ---- TFRecords


def checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))  # tests/data/test_record_files.py has an oracle of it


def record(body: bytes) -> bytes:
    length = struct.pack("<Q", len(body))
    return length + checksum(length) + body + checksum(body)


def tfrecords(*bodies: bytes) -> bytes:
    return b"".join(map(record, bodies))


def snappy(data: bytes, block: int = 1 << 18) -> bytes:
    """Blocks as TensorFlow writes them, compressed by another implementation of Snappy."""
    out = b""
    for at in range(0, len(data), block):
        packed_block = pa.compress(data[at : at + block], codec="snappy", asbytes=True)
        out += struct.pack(">I", len(packed_block)) + packed_block
    return out


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
