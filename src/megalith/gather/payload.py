"""The payload: what one peer sends in one window, as a flat file.

Its specification is docs/formats/gather-payload.md.

A prelude of fixed size, a JSON header, then sections without gaps. The prelude's digest covers the header,
the header's digests cover the sections: after the first two are read, every range can be verified on its
own. Reading checks structure; `validate` checks what the bytes mean for a model.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch
from torch import Tensor

from megalith.errors import InputError, UsageError
from megalith.gather.payload_schema import LOOKUP_BYTES, ParameterSpec, PayloadSchema, TableSpec
from megalith.gather.plan import Fault, Status
from megalith.ops import checks
from megalith.storage.bodies import Body
from megalith.storage.json_codec import (
    INLINE,
    MAX_INT,
    NOT_SAVED,
    Sha256,
    canonical_json,
    from_json,
    parse_json_object,
    saved_as,
    to_json,
)
from megalith.storage.tensor_files import raw_bytes, tensor_of

MAGIC = b"MEGAGATH"
VERSIONS = (1, 2)  # 2 states the weights; 1 does not
FORMAT = "megalith-gather-payload"
PRELUDE_BYTES = 64
MAX_HEADER_BYTES = 1 << 24
_LABEL_BYTES = 20480  # what run, metadata and numbers can take at most, escapes included
_ENTRY_BYTES = 400  # two digests, an offset, a count and their names
_PRELUDE = struct.Struct("<8sIIQQ32s")
_EMPTY = "0" * 64


@dataclass(frozen=True)
class Label:
    """Whose payload it is."""

    run: str
    """The name of the run: up to 128 characters."""
    window: int
    """The number of the window."""
    uid: int
    """The peer."""
    global_step: int = 0
    """The step counter of the peer."""
    metadata: Mapping[str, str | int] = field(default_factory=dict)
    """Up to 16 short texts or integers that the peer defines."""
    weights: str | None = field(default=None, metadata=NOT_SAVED)
    """The hash of the weights that the update was computed from: `schema.fingerprint(model).hash`."""

    def __post_init__(self) -> None:
        checks.text(self.run, "label: run", 128)
        if self.weights is not None and len(checks.text(self.weights, "label: weights")) != 64:
            raise InputError(f"label: weights must be the hash of a fingerprint, got {self.weights!r:.80}")
        for name in ("window", "uid", "global_step"):
            checks.integer(getattr(self, name), f"label: {name}", 0, MAX_INT)
        if not isinstance(self.metadata, Mapping) or len(self.metadata) > 16:
            raise InputError("label: metadata must be a dict with at most 16 entries")
        for key, value in self.metadata.items():
            short = isinstance(value, str) and len(value) <= 128
            number = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INT
            if not isinstance(key, str) or len(key) > 32 or not (short or number):
                raise InputError(
                    f"label: metadata {key!r:.40} must be a text up to 128 characters or an integer"
                )


@dataclass(frozen=True, slots=True)
class ParameterSections:
    """Where the sections of a parameter begin, and their digests."""

    spec: ParameterSpec = field(metadata=INLINE)
    offset: int
    indices_sha256: Sha256 = _EMPTY
    values_sha256: Sha256 = _EMPTY

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.spec.rows

    @property
    def sections(self) -> tuple[tuple[str, int], ...]:
        """Name and length of each section, in file order."""
        spec = self.spec
        return (
            ("indices", spec.rows * spec.index_bytes),
            ("values", spec.bins * LOOKUP_BYTES + spec.rows * spec.code_bytes),
        )


@dataclass(frozen=True, slots=True)
class TableSections:
    """Where the sections of a table begin, the number of rows, and digests."""

    spec: TableSpec = field(metadata=INLINE)
    num_rows: int
    offset: int
    ids_sha256: Sha256 = _EMPTY
    rows_sha256: Sha256 = _EMPTY

    def __post_init__(self) -> None:
        checks.integer(self.num_rows, "num_rows", 0, 1 << 48)

    @property
    def sections(self) -> tuple[tuple[str, int], ...]:
        """Name and length of each section, in file order."""
        return (("ids", 8 * self.num_rows), ("rows", 4 * self.spec.dim * self.num_rows))


_Sections = ParameterSections | TableSections
E = TypeVar("E", ParameterSections, TableSections)


@dataclass(frozen=True)
class Header:
    """Everything that is known before a section is read. Its JSON is the header of the file.

    Attributes:
        label: Whose payload it is.
        schema_digest: The digest of its schema.
        parameters: The sections of each parameter.
        tables: The sections of each table.
        format: FORMAT.
        header_bytes: The length of the header.
        size: The length of the file.
        digest: The digest of the payload, which covers every byte of the file.
    """

    label: Label = field(metadata=INLINE)
    schema_digest: Sha256 = field(metadata=saved_as("schema"))
    parameters: tuple[ParameterSections, ...]
    tables: tuple[TableSections, ...]
    format: str = FORMAT
    header_bytes: int = field(default=0, metadata=NOT_SAVED)
    size: int = field(default=0, metadata=NOT_SAVED)
    digest: str = field(default=_EMPTY, metadata=NOT_SAVED)

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise InputError(f"field format must be {FORMAT!r}")

    @cached_property
    def schema(self) -> PayloadSchema:
        """The schema that its sections describe."""
        return PayloadSchema(tuple(p.spec for p in self.parameters), tuple(t.spec for t in self.tables))


def header_limit(schema: PayloadSchema) -> int:
    """Return the number of bytes that a header can have at most."""
    entries = len(schema.parameters) + len(schema.tables)
    return len(canonical_json(to_json(schema))) + _ENTRY_BYTES * entries + _LABEL_BYTES


def least_size(schema: PayloadSchema) -> int:
    """Return the number of bytes that a payload has at least, with empty tables."""
    return PRELUDE_BYTES + sum(
        n for spec in schema.parameters for _, n in ParameterSections(spec, 0).sections
    )


# ---- reading


def read_header(body: Body, limit: int = MAX_HEADER_BYTES) -> Header:
    prelude = bytes(body.read(0, min(PRELUDE_BYTES, body.size)))
    if len(prelude) != PRELUDE_BYTES:
        raise _corrupt(f"a payload has at least {PRELUDE_BYTES} bytes, this one {len(prelude)}")
    magic, version, header_bytes, size, spare, claimed = _PRELUDE.unpack(prelude)
    if magic != MAGIC:
        raise _corrupt(f"starts with {magic!r}, not {MAGIC!r}")
    if version not in VERSIONS or spare != 0:
        raise _corrupt(f"has version {version}; this Megalith reads {VERSIONS[0]} to {VERSIONS[-1]}")
    if header_bytes > limit or size < PRELUDE_BYTES + header_bytes:
        raise _corrupt(
            f"claims a header of {header_bytes} bytes in a file of {size}; at most {limit} are used"
        )
    if size != body.size:
        raise _corrupt(f"has {body.size} bytes, its prelude states {size}")
    text = bytes(body.read(PRELUDE_BYTES, header_bytes))
    found = hashlib.sha256(prelude[:32] + text)
    if found.digest() != claimed:
        raise _corrupt("its header does not fit the digest in its prelude")
    known = {"header_bytes": header_bytes, "size": size, "digest": found.hexdigest()}
    fields, weights = parse_json_object(text, _corrupt), None
    if version > 1:
        weights = fields.sha256("weights")
        del fields.data["weights"]
    header = from_json(Header, fields, **known)
    _check_layout(header)
    return replace(header, label=replace(header.label, weights=weights))


class PackedRows(NamedTuple):
    """Rows of a parameter as they are sent."""

    indices: Tensor  # uint8 [rows, index_bytes]
    lookup: Tensor  # float32 [bins], the value of each code
    codes: Tensor  # uint8 [rows, code_bytes]


class Payload:
    """A payload that is read by parameter and row range. Only checked parts can be trusted.

    Args:
        header: Its header.
        body: Its bytes.
        norms: The norm of each parameter, then of each table, if `validate` accepted it.
    """

    def __init__(self, header: Header, body: Body, norms: tuple[float, ...] = ()) -> None:
        self.header = header
        self.body = body
        self.norms = norms
        self._closed = False

    @classmethod
    def open(cls, body: Body) -> Payload:
        """Read the header of a body."""
        if not isinstance(body, Body):
            raise InputError(f"body must be a Body, such as MemoryBody(data), got {checks.kind(body)}")
        return cls(read_header(body), body)

    def indices(self, number: int, start: int, stop: int) -> Tensor:
        """Read packed indices of a parameter."""
        entry = self._entry(self.header.parameters, number, start, stop)
        return self._bytes(entry.offset, entry.spec.index_bytes, start, stop)

    def lookup(self, number: int) -> Tensor:
        """Read the value of each code of a parameter."""
        entry = self._entry(self.header.parameters, number, 0, 0)
        offset = entry.offset + entry.spec.rows * entry.spec.index_bytes
        return tensor_of(self._read(offset, LOOKUP_BYTES * entry.spec.bins), torch.float32)

    def codes(self, number: int, start: int, stop: int) -> Tensor:
        """Read packed codes of a parameter."""
        entry = self._entry(self.header.parameters, number, start, stop)
        spec = entry.spec
        offset = entry.offset + spec.rows * spec.index_bytes + LOOKUP_BYTES * spec.bins
        return self._bytes(offset, spec.code_bytes, start, stop)

    def ids(self, number: int, start: int, stop: int) -> Tensor:
        """Read ids of a table."""
        entry = self._entry(self.header.tables, number, start, stop)
        return tensor_of(self._read(entry.offset + 8 * start, 8 * (stop - start)), torch.int64)

    def rows(self, number: int, start: int, stop: int) -> Tensor:
        """Read rows of a table."""
        entry = self._entry(self.header.tables, number, start, stop)
        width = 4 * entry.spec.dim
        data = self._read(entry.offset + 8 * entry.num_rows + width * start, width * (stop - start))
        return tensor_of(data, torch.float32).view(stop - start, entry.spec.dim)

    def close(self) -> None:
        """Release its bytes."""
        self._closed = True
        self.body.close()

    def _read(self, offset: int, length: int) -> bytearray:
        if self._closed:
            label = self.header.label
            raise UsageError(
                f"the payload of uid {label.uid}, window {label.window}, was closed: read payloads before "
                "their result is closed (`run_window` closes its own)"
            )
        return self.body.read(offset, length)

    @staticmethod
    def _entry(entries: Sequence[E], number: int, start: int, stop: int) -> E:
        """The sections of a parameter or table, if it has these rows."""
        if checks.integer(number, "number", 0) >= len(entries):
            raise InputError(f"number must be below {len(entries)}, got {number}")
        rows = entries[number].num_rows
        if not 0 <= checks.integer(start, "start", 0) <= checks.integer(stop, "stop", 0) <= rows:
            raise InputError(f"rows must be a range of 0 to {rows}, got {start} to {stop}")
        return entries[number]

    def _bytes(self, offset: int, width: int, start: int, stop: int) -> Tensor:
        data = self._read(offset + width * start, width * (stop - start))
        return tensor_of(data, torch.uint8).view(stop - start, width)


# ---- writing


def write_payload_file(
    file: BinaryIO,
    schema: PayloadSchema,
    label: Label,
    pieces: Iterable[Tensor],
    table_rows: Mapping[str, int] | None = None,
) -> Header:
    """Write a payload: its sections, then prelude and header, which come first in the file."""
    entries, size = _place(schema, label, dict(table_rows or {}))
    file.write(bytes(size))
    source = filter(len, map(raw_bytes, pieces))
    for number, entry in enumerate(entries):
        for name, length in entry.sections:
            left, hashed = length, hashlib.sha256()
            while left:
                piece = next(source, b"")
                if not 0 < len(piece) <= left:
                    where = f"{entry.spec.name!r}, section {name}"
                    raise UsageError(f"{where}: {left} bytes are missing, the next piece has {len(piece)}")
                file.write(piece)
                hashed.update(piece)
                left -= len(piece)
            digest: dict[str, Any] = {f"{name}_sha256": hashed.hexdigest()}
            entries[number] = replace(entries[number], **digest)
            size += length
    if (rest := next(source, None)) is not None:
        raise UsageError(f"there is a piece of {len(rest)} bytes after the last section")
    header = _header(schema, label, entries)
    text = _text(header)
    version = VERSIONS[label.weights is not None]
    prelude = _PRELUDE.pack(MAGIC, version, len(text), size, 0, bytes(32))[:32]
    signed = hashlib.sha256(prelude + text)
    file.seek(0)
    file.write(prelude + signed.digest() + text)
    file.flush()
    return replace(header, header_bytes=len(text), size=size, digest=signed.hexdigest())


# ---- helpers


def _corrupt(detail: str) -> Fault:
    return Fault(Status.CORRUPT, detail)


def _check_layout(header: Header) -> None:
    """Sections follow each other from the header to the end of the file, and the schema digest is theirs."""
    at = PRELUDE_BYTES + header.header_bytes
    entries: list[_Sections] = [*header.parameters, *header.tables]
    for entry in entries:
        if entry.offset != at:
            raise _corrupt(f"{entry.spec.name!r:.80} is at {entry.offset}, the section before ends at {at}")
        at += sum(length for _, length in entry.sections)
    if at != header.size:
        raise _corrupt(f"its sections end at {at}, the file at {header.size}")
    try:
        found = header.schema.digest
    except InputError as error:
        raise _corrupt(str(error)) from None
    if found != header.schema_digest:
        raise _corrupt("its entries do not fit its schema digest")


def _place(schema: PayloadSchema, label: Label, table_rows: dict[str, int]) -> tuple[list[_Sections], int]:
    """Entries with their offsets and without digests, and where the first section starts."""
    unknown = sorted(set(table_rows) - {table.name for table in schema.tables})
    if unknown:
        raise InputError(f"rows of table {unknown[0]!r}, which the schema does not have")
    start, found = 0, PRELUDE_BYTES
    # A header that starts later has longer offsets in it; a few rounds are enough.
    while start != found:
        start = at = found
        entries: list[_Sections] = []
        for spec in schema.parameters:
            entries.append(ParameterSections(spec, at))
            at += sum(length for _, length in entries[-1].sections)
        for table in schema.tables:
            entries.append(TableSections(table, table_rows.get(table.name, 0), at))
            at += sum(length for _, length in entries[-1].sections)
        text = _text(_header(schema, label, entries))
        found = max(start, PRELUDE_BYTES + len(text))
    return entries, start


def _header(schema: PayloadSchema, label: Label, entries: Sequence[_Sections]) -> Header:
    parameters = tuple(each for each in entries if isinstance(each, ParameterSections))
    tables = tuple(each for each in entries if isinstance(each, TableSections))
    return Header(label, schema.digest, parameters, tables)


def _text(header: Header) -> bytes:
    weights = header.label.weights
    return canonical_json(to_json(header) | ({} if weights is None else {"weights": weights}))
