"""The payload: what one peer sends in one window, as a flat file.

Its specification is docs/formats/gather-payload.md.

A prelude of fixed size, a JSON header, then sections without gaps. The prelude's digest covers the header,
the header's digests cover the sections: after the first two are read, every range can be verified on its
own. Reading checks structure; what the bytes mean for a model is the business of `validate`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from megalith.errors import InputError, UsageError
from megalith.gather.body import Body
from megalith.gather.fields import canonical
from megalith.gather.schema import LOOKUP_BYTES, ParameterSpec, Schema, TableSpec
from megalith.gather.status import Fault, Status
from megalith.storage.strict_json import MAX_INT, JsonFields, parse_json_object

MAGIC = b"MEGAGATH"
VERSION = 1
FORMAT = "megalith-gather-payload"
PRELUDE_BYTES = 64
MAX_HEADER_BYTES = 1 << 24
_LABEL_BYTES = 20480  # what run, metadata and numbers can take at most, escapes included
_ENTRY_BYTES = 400  # two digests, an offset, a count and their names
_PRELUDE = struct.Struct("<8sIIQQ32s")
_EMPTY = "0" * 64


@dataclass(frozen=True)
class Label:
    """Whose payload it is. metadata: up to 16 short texts or whole numbers of the peer's own."""

    run: str
    window: int
    uid: int
    global_step: int = 0
    metadata: Mapping[str, str | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < len(self.run) <= 128:
            raise InputError(f"run must have 1 to 128 characters, got {len(self.run)}")
        for name in ("window", "uid", "global_step"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INT:
                raise InputError(f"{name} must be a whole number from 0 to 2^63-1, got {value!r}")
        if len(self.metadata) > 16:
            raise InputError(f"metadata must have at most 16 entries, got {len(self.metadata)}")
        for key, value in self.metadata.items():
            short = isinstance(value, str) and len(value) <= 128
            number = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INT
            if not isinstance(key, str) or len(key) > 32 or not (short or number):
                raise InputError(
                    f"metadata {key!r:.40} must be a text up to 128 characters or a whole number"
                )


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """Where a parameter's sections begin, and their digests."""

    spec: ParameterSpec
    offset: int
    indices_sha256: str = _EMPTY
    values_sha256: str = _EMPTY

    @property
    def sections(self) -> tuple[tuple[str, int], ...]:
        """Name and length of each section, in file order."""
        spec = self.spec
        return (
            ("indices", spec.rows * spec.index_bytes),
            ("values", spec.bins * LOOKUP_BYTES + spec.rows * spec.code_bytes),
        )

    def to_json(self) -> dict[str, Any]:
        """As the header has it."""
        return {
            **self.spec.to_json(),
            "offset": self.offset,
            "indices_sha256": self.indices_sha256,
            "values_sha256": self.values_sha256,
        }


@dataclass(frozen=True, slots=True)
class TableEntry:
    """Where a table's sections begin, how many rows it has, and their digests."""

    spec: TableSpec
    num_rows: int
    offset: int
    ids_sha256: str = _EMPTY
    rows_sha256: str = _EMPTY

    @property
    def sections(self) -> tuple[tuple[str, int], ...]:
        """Name and length of each section, in file order."""
        return (("ids", 8 * self.num_rows), ("rows", 4 * self.spec.dim * self.num_rows))

    def to_json(self) -> dict[str, Any]:
        """As the header has it."""
        return {
            **self.spec.to_json(),
            "num_rows": self.num_rows,
            "offset": self.offset,
            "ids_sha256": self.ids_sha256,
            "rows_sha256": self.rows_sha256,
        }


_Entry = ParameterEntry | TableEntry


@dataclass(frozen=True)
class Header:
    """All that is known before a section is read. digest: commits to every byte of the file."""

    label: Label
    schema_digest: str
    parameters: tuple[ParameterEntry, ...]
    tables: tuple[TableEntry, ...]
    header_bytes: int
    size: int
    digest: str = _EMPTY

    @cached_property
    def schema(self) -> Schema:
        """The schema its entries describe."""
        return Schema(tuple(p.spec for p in self.parameters), tuple(t.spec for t in self.tables))


def header_limit(schema: Schema) -> int:
    """Bytes that a header for this schema can have at most."""
    entries = len(schema.parameters) + len(schema.tables)
    return len(canonical(schema.to_json())) + _ENTRY_BYTES * entries + _LABEL_BYTES


def least_size(schema: Schema) -> int:
    """Bytes that a payload for this schema has at least, tables being empty."""
    return PRELUDE_BYTES + sum(n for spec in schema.parameters for _, n in ParameterEntry(spec, 0).sections)


# ---- reading


def header_span(prelude: bytes | bytearray) -> tuple[int, int]:
    """Bytes of the header and of the whole file, from the first 64 bytes. Raises Fault(CORRUPT)."""
    if len(prelude) != PRELUDE_BYTES:
        raise _corrupt(f"a payload has at least {PRELUDE_BYTES} bytes, this one {len(prelude)}")
    magic, version, header_bytes, size, spare, _ = _PRELUDE.unpack(prelude)
    if magic != MAGIC:
        raise _corrupt(f"starts with {bytes(magic)!r}, not {MAGIC!r}")
    if version != VERSION or spare != 0:
        raise _corrupt(f"has version {version}; this Megalith reads {VERSION}")
    if header_bytes > MAX_HEADER_BYTES or size < PRELUDE_BYTES + header_bytes:
        raise _corrupt(f"claims a header of {header_bytes} bytes in a file of {size}")
    return header_bytes, size


def parse_header(data: bytes | bytearray) -> Header:
    """The header, from prelude and header bytes. Raises Fault(CORRUPT) unless all of it is consistent."""
    header_bytes, size = header_span(data[:PRELUDE_BYTES])
    text = bytes(data[PRELUDE_BYTES:])
    if len(text) != header_bytes:
        raise _corrupt(f"its header has {len(text)} bytes, its prelude says {header_bytes}")
    claimed = bytes(data[32:PRELUDE_BYTES]).hex()
    found = hashlib.sha256(bytes(data[:32]) + text).hexdigest()
    if found != claimed:
        raise _corrupt("its header does not fit the digest in its prelude")
    fields = parse_json_object(text, _corrupt)
    fields.allow_only(
        "format", "run", "window", "uid", "global_step", "metadata", "schema", "parameters", "tables"
    )
    if fields.string("format") != FORMAT:
        fields.fail("format", f"must be {FORMAT!r}")
    try:
        label = Label(
            fields.string("run", 1024),
            fields.integer("window"),
            fields.integer("uid"),
            fields.integer("global_step"),
            fields.object("metadata").data,
        )
    except InputError as error:
        raise _corrupt(str(error)) from None
    header = Header(
        label,
        fields.sha256("schema"),
        tuple(_parameter_entry(each) for each in fields.objects("parameters")),
        tuple(_table_entry(each) for each in fields.objects("tables")),
        header_bytes,
        size,
        found,
    )
    _check_layout(header)
    return header


def read_header(body: Body, limit: int = MAX_HEADER_BYTES) -> Header:
    """The header of a body. Raises Fault(CORRUPT), also if the body is not as long as its prelude says."""
    header_bytes, size = header_span(body.read(0, min(PRELUDE_BYTES, body.size)))
    if size != body.size:
        raise _corrupt(f"has {body.size} bytes, its prelude says {size}")
    if header_bytes > limit:
        raise _corrupt(f"claims a header of {header_bytes} bytes where {limit} are enough")
    return parse_header(body.read(0, PRELUDE_BYTES + header_bytes))


class Payload:
    """A payload to read by parameter and row range. It can be trusted as far as it was checked."""

    def __init__(self, header: Header, body: Body) -> None:
        self.header = header
        self.body = body

    @classmethod
    def open(cls, body: Body) -> Payload:
        """Reads the header of a body. Raises Fault(CORRUPT)."""
        return cls(read_header(body), body)

    def indices(self, number: int, start: int, stop: int) -> Tensor:
        """Packed indices of rows start to stop of parameter `number`: uint8 [n, index_bytes]."""
        entry = self.header.parameters[number]
        return self._bytes(entry.offset, entry.spec.index_bytes, start, stop)

    def lookup(self, number: int) -> Tensor:
        """The value of each code of parameter `number`: float32 [bins]."""
        entry = self.header.parameters[number]
        offset = entry.offset + entry.spec.rows * entry.spec.index_bytes
        return _numbers(self.body.read(offset, LOOKUP_BYTES * entry.spec.bins), "<f4")

    def codes(self, number: int, start: int, stop: int) -> Tensor:
        """Packed codes of rows start to stop of parameter `number`: uint8 [n, code_bytes]."""
        entry = self.header.parameters[number]
        spec = entry.spec
        offset = entry.offset + spec.rows * spec.index_bytes + LOOKUP_BYTES * spec.bins
        return self._bytes(offset, spec.code_bytes, start, stop)

    def ids(self, number: int, start: int, stop: int) -> Tensor:
        """Ids start to stop of table `number`: int64 [n]."""
        entry = self.header.tables[number]
        return _numbers(self.body.read(entry.offset + 8 * start, 8 * (stop - start)), "<i8")

    def rows(self, number: int, start: int, stop: int) -> Tensor:
        """Rows start to stop of table `number`: float32 [n, dim]."""
        entry = self.header.tables[number]
        width = 4 * entry.spec.dim
        data = self.body.read(entry.offset + 8 * entry.num_rows + width * start, width * (stop - start))
        return _numbers(data, "<f4").view(stop - start, entry.spec.dim)

    def close(self) -> None:
        """Gives its bytes up."""
        self.body.close()

    def _bytes(self, offset: int, width: int, start: int, stop: int) -> Tensor:
        data = self.body.read(offset + width * start, width * (stop - start))
        return _numbers(data, "u1").view(stop - start, width)


# ---- writing


class PayloadWriter:
    """Writes a payload to a seekable file: sections in schema order, in pieces; then the header."""

    def __init__(
        self, file: BinaryIO, schema: Schema, label: Label, table_rows: Mapping[str, int] | None = None
    ) -> None:
        self._file = file
        self._schema = schema
        self._label = label
        self._entries, self._size = _place(schema, label, dict(table_rows or {}))
        self._sections = [
            (number, name, length)
            for number, entry in enumerate(self._entries)
            for name, length in entry.sections
        ]
        self._at = 0
        self._left = self._sections[0][2] if self._sections else 0
        self._hash = hashlib.sha256()
        self._file.write(bytes(self._size))
        self._close_full_sections()

    def write(self, data: Tensor | bytes | bytearray | memoryview) -> None:
        """Appends to the current section; uint8, int64 or float32 tensors. Raises UsageError past its end."""
        view = _raw(data)
        if self._at == len(self._sections) or len(view) > self._left:
            raise UsageError(f"{len(view)} bytes do not fit the current section ({self._left} are missing)")
        self._file.write(view)
        self._hash.update(view)
        self._size += len(view)
        self._left -= len(view)
        self._close_full_sections()

    def finish(self) -> Header:
        """Writes prelude and header. Raises UsageError while a section is not full."""
        if self._at != len(self._sections):
            number, name, _ = self._sections[self._at]
            where = f"{self._entries[number].spec.name!r}, section {name}"
            raise UsageError(f"{where}: {self._left} bytes are missing")
        text = _header_text(self._schema, self._label, self._entries)
        prelude = _PRELUDE.pack(MAGIC, VERSION, len(text), self._size, 0, bytes(32))[:32]
        digest = hashlib.sha256(prelude + text).digest()
        self._file.seek(0)
        self._file.write(prelude + digest + text)
        self._file.flush()
        return parse_header(prelude + digest + text)

    def _close_full_sections(self) -> None:
        while self._at < len(self._sections) and self._left == 0:
            number, name, _ = self._sections[self._at]
            done: dict[str, Any] = {f"{name}_sha256": self._hash.hexdigest()}
            self._entries[number] = replace(self._entries[number], **done)
            self._at += 1
            self._left = self._sections[self._at][2] if self._at < len(self._sections) else 0
            self._hash = hashlib.sha256()


# ---- helpers


def _corrupt(detail: str) -> Fault:
    return Fault(Status.CORRUPT, detail)


def _parameter_entry(fields: JsonFields) -> ParameterEntry:
    fields.allow_only(
        "name", "shape", "chunk", "keep", "bins", "dct", "offset", "indices_sha256", "values_sha256"
    )
    return ParameterEntry(
        ParameterSpec.from_json(fields),
        fields.integer("offset"),
        fields.sha256("indices_sha256"),
        fields.sha256("values_sha256"),
    )


def _table_entry(fields: JsonFields) -> TableEntry:
    fields.allow_only("name", "dim", "num_rows", "offset", "ids_sha256", "rows_sha256")
    return TableEntry(
        TableSpec.from_json(fields),
        fields.integer("num_rows", most=1 << 48),
        fields.integer("offset"),
        fields.sha256("ids_sha256"),
        fields.sha256("rows_sha256"),
    )


def _check_layout(header: Header) -> None:
    """Sections follow each other from the header to the end of the file, and the schema digest is theirs."""
    at = PRELUDE_BYTES + header.header_bytes
    entries: list[_Entry] = [*header.parameters, *header.tables]
    for entry in entries:
        if entry.offset != at:
            raise _corrupt(f"{entry.spec.name!r:.80} lies at {entry.offset}, the section before ends at {at}")
        at += sum(length for _, length in entry.sections)
    if at != header.size:
        raise _corrupt(f"its sections end at {at}, the file at {header.size}")
    try:
        found = header.schema.digest
    except InputError as error:
        raise _corrupt(str(error)) from None
    if found != header.schema_digest:
        raise _corrupt("its entries do not fit its schema digest")


def _place(schema: Schema, label: Label, table_rows: dict[str, int]) -> tuple[list[_Entry], int]:
    """Entries with their offsets and without digests, and where the first section starts."""
    unknown = sorted(set(table_rows) - {table.name for table in schema.tables})
    if unknown:
        raise InputError(f"rows of table {unknown[0]!r}, which the schema does not have")
    start, found = 0, PRELUDE_BYTES
    # A header that starts later has longer offsets in it; a few rounds settle that.
    while start != found:
        start = at = found
        entries: list[_Entry] = []
        for spec in schema.parameters:
            entries.append(ParameterEntry(spec, at))
            at += sum(length for _, length in entries[-1].sections)
        for table in schema.tables:
            entries.append(TableEntry(table, table_rows.get(table.name, 0), at))
            at += sum(length for _, length in entries[-1].sections)
        found = max(start, PRELUDE_BYTES + len(_header_text(schema, label, entries)))
    return entries, start


def _header_text(schema: Schema, label: Label, entries: Sequence[_Entry]) -> bytes:
    count = len(schema.parameters)
    return canonical(
        {
            "format": FORMAT,
            "run": label.run,
            "window": label.window,
            "uid": label.uid,
            "global_step": label.global_step,
            "metadata": dict(label.metadata),
            "schema": schema.digest,
            "parameters": [entry.to_json() for entry in entries[:count]],
            "tables": [entry.to_json() for entry in entries[count:]],
        }
    )


def _raw(data: Tensor | bytes | bytearray | memoryview) -> memoryview:
    if not isinstance(data, Tensor):
        return memoryview(data).cast("B")
    array = data.detach().contiguous().cpu().numpy()
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return little.reshape(-1).view(np.uint8).data


def _numbers(data: bytearray, kind: str) -> Tensor:
    array = np.frombuffer(data, dtype=kind)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
