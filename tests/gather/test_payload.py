"""The payload format: its bytes, reading by range, and what hostile bytes lead to."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith.errors import InputError, StoreError, UsageError
from megalith.gather.payload import (
    PRELUDE_BYTES,
    Header,
    Label,
    Payload,
    header_limit,
    least_size,
    read_header,
    write_payload_file,
)
from megalith.gather.payload_schema import PayloadSchema
from megalith.gather.plan import Fault, Status
from megalith.storage.bodies import FileBody, MemoryBody, SpoolWriter
from tests.gather import naive
from tests.gather.support import RUN, opened, peer_bytes, peer_update, small_schema

SCHEMA = small_schema(users=3, items=1)
DATA = peer_bytes(SCHEMA, 7)


def resigned(header: dict[str, Any] | bytes, data: bytes = DATA) -> bytes:
    """The payload with another header, its prelude made to fit."""
    old = struct.unpack_from("<I", data, 12)[0]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    sections = data[PRELUDE_BYTES + old :]
    prelude = struct.pack("<8sIIQQ", b"MEGAGATH", 1, len(text), 64 + len(text) + len(sections), 0)
    return prelude + hashlib.sha256(prelude + text).digest() + text + sections


def header_of(data: bytes = DATA) -> dict[str, Any]:
    return naive.read(data).header


def test_header_says_what_the_file_holds() -> None:
    header = opened(DATA).header
    assert header.label == Label(RUN, 3, 7, global_step=107)
    assert header.schema == SCHEMA
    assert header.schema_digest == SCHEMA.digest
    assert (
        header.size == len(DATA) == header.tables[-1].offset + sum(n for _, n in header.tables[-1].sections)
    )
    assert header.digest == DATA[32:64].hex()
    assert header.header_bytes <= header_limit(SCHEMA)
    assert least_size(SCHEMA) <= len(DATA)


def test_ranges_are_parts_of_the_whole() -> None:
    payload, spec = opened(DATA), SCHEMA.parameters[0]
    whole = payload.indices(0, 0, spec.rows)
    assert torch.equal(payload.indices(0, 2, 5), whole[2:5])
    assert payload.indices(0, 4, 4).shape == (0, spec.index_bytes)
    assert torch.equal(payload.rows(0, 3, 6), payload.rows(0, 0, 12)[3:6])
    assert torch.equal(payload.ids(1, 3, 6), payload.ids(1, 0, 12)[3:6])


def test_file_and_memory_read_alike(tmp_path: Any) -> None:
    spool = SpoolWriter(tmp_path / "spool")
    spool.write(DATA)
    file = Payload.open(spool.finish())
    memory = opened(DATA)
    assert file.header == memory.header
    assert torch.equal(file.codes(0, 1, 4), memory.codes(0, 1, 4))
    assert isinstance(file.body, FileBody)
    file.close()
    file.close()
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_spool_cut_short_is_noticed(tmp_path: Any) -> None:
    path = tmp_path / "x"
    path.write_bytes(DATA)
    payload = Payload.open(FileBody(path.open("rb")))
    path.write_bytes(DATA[:-40])
    with pytest.raises(StoreError, match="ends before byte"):
        payload.rows(1, 0, 12)
    with pytest.raises(StoreError, match="of a body of 3 bytes"):
        MemoryBody(b"abc").read(2, 2)


def test_writer_takes_pieces_and_counts_bytes() -> None:
    schema = PayloadSchema.of({"w": torch.zeros(8)}, chunk=4, keep=2)
    three, values, codes = (torch.zeros(n, dtype=torch.uint8) for n in (3, 16, 2))

    def write(*pieces: torch.Tensor) -> tuple[Header, bytes]:
        file = io.BytesIO()
        return write_payload_file(file, schema, Label(RUN, 0, 0), pieces), file.getvalue()

    with pytest.raises(UsageError, match=r"'w', section indices: 3 bytes are missing"):
        write(three)
    with pytest.raises(UsageError, match="section indices: 3 bytes are missing, the next piece has 16"):
        write(three, values)
    with pytest.raises(UsageError, match="a piece of 2 bytes after the last section"):
        write(three, three, values, codes, codes)
    header, data = write(three, three, values.view(torch.float32), codes[:0], codes.view(2, 1))
    assert header == read_header(MemoryBody(data))


def test_schema_without_sections_is_a_payload() -> None:
    file = io.BytesIO()
    header = write_payload_file(file, PayloadSchema(()), Label(RUN, 0, 0), [])
    assert header.size == len(file.getvalue())


def test_labels_are_bounded() -> None:
    with pytest.raises(InputError, match="window must be"):
        Label(RUN, -1, 0)
    with pytest.raises(InputError, match="run must have"):
        Label("", 0, 0)
    with pytest.raises(InputError, match="at most 16"):
        Label(RUN, 0, 0, metadata={str(i): 1 for i in range(17)})
    with pytest.raises(InputError, match="metadata 'a'"):
        Label(RUN, 0, 0, metadata={"a": 1.5})  # type: ignore[dict-item]
    label = Label("ä" * 128, 2**63 - 1, 2**63 - 1, 2**63 - 1, {f"{i:032}": "ä" * 128 for i in range(16)})
    data = peer_update(SCHEMA, 1).to_bytes(label)
    assert opened(data).header.label == label
    assert opened(data).header.header_bytes <= header_limit(SCHEMA)


# ---- hostile input


def fault(data: bytes) -> Fault:
    with pytest.raises(Fault) as caught:
        opened(data)
    assert caught.value.status is Status.CORRUPT
    return caught.value


def test_damaged_preludes() -> None:
    assert "at least 64 bytes" in str(fault(b""))
    assert "at least 64 bytes" in str(fault(DATA[:63]))
    assert "not b'MEGAGATH'" in str(fault(b"PK\x03\x04" + DATA[4:]))
    assert "version 9" in str(fault(DATA[:8] + b"\x09" + DATA[9:]))
    assert "claims a header" in str(fault(DATA[:12] + b"\xff\xff\xff\xff" + DATA[16:]))
    assert "its prelude states" in str(fault(DATA + b"x"))
    assert "its prelude states" in str(fault(DATA[:-1]))
    assert "digest in its prelude" in str(fault(DATA[:100] + b"#" + DATA[101:]))
    with pytest.raises(Fault, match="at most 10 are used"):
        read_header(MemoryBody(DATA), limit=10)


def changed(path: str, value: Any) -> dict[str, Any]:
    """The header with one field set, or deleted (...)."""
    header = header_of()
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    at: Any = header
    for step in way:
        at = at[step]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return header


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "other", "field format must be"),
        ("run", ..., "field run is missing"),
        ("run", 5, "field run must be a string"),
        ("window", True, "field window must be an integer"),
        ("uid", -1, "uid must be"),
        ("uid", 2**63, "uid must be"),
        ("global_step", 1.5, "field global_step must be"),
        ("metadata", [], "field metadata must be an object"),
        ("metadata", {"a": [[]]}, "metadata.a must be an integer"),
        ("more", 1, "field more is not known"),
        ("schema", "x", "field schema must be 64"),
        ("schema", "0" * 64, "do not fit its schema digest"),
        ("parameters", {}, "field parameters must be a list"),
        ("parameters.0", 3, r"parameters\[0\] must be an object"),
        ("parameters.0.name", "", "name must have 1 to 1024"),
        ("parameters.0.name", "odd", "same name"),
        ("parameters.0.name", "x" * 2000, "name must have 1 to 1024"),
        ("parameters.0.keep", 0, r"parameters\[0\]: .* keep must be"),
        ("parameters.0.keep", 65, "keep must be an integer from 1 to 64"),
        ("parameters.0.bins", 257, "bins must be an integer from 2 to 256"),
        ("parameters.0.chunk", [64], "must have 2 items"),
        ("parameters.0.chunk", [4096, 4096], "a chunk of"),
        ("parameters.0.shape", [1 << 47, 1 << 47], "not usable"),
        ("parameters.0.shape", [-1, 3], "not usable"),
        ("parameters.0.shape", [1] * 17, "shape must be"),
        ("parameters.0.shape", [1 << 40], "the section before ends"),
        ("parameters.0.offset", 5, "is at 5"),
        ("parameters.0.dct", 1, "must be true or false"),
        ("parameters.0.indices_sha256", "A" * 64, "64 hexadecimal digits"),
        ("tables.0.num_rows", 1 << 49, "num_rows must be an integer from 0"),
        ("tables.1.num_rows", 11, "its sections end at"),
        ("tables.0.dim", 0, "dim must be"),
        ("tables.0.extra", 0, "extra is not known"),
    ],
)
def test_signed_but_wrong_headers(path: str, value: Any, message: str) -> None:
    header = changed(path, value)
    first = header["parameters"]
    if path not in ("parameters.0.offset", "parameters", "parameters.0"):
        # the header's length moved: put sections where they now are, so that only the change is wrong
        for _ in range(3):
            start = 64 + len(json.dumps(header).encode())
            move = start - first[0]["offset"]
            for entry in (*header["parameters"], *header["tables"]):
                entry["offset"] += move
    with pytest.raises(Fault, match=message) as caught:
        opened(resigned(header))
    assert caught.value.status is Status.CORRUPT


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b'{"window": NaN}',
        b'{"run": "a", "run": "b"}',
        b"[" * 100_000,
        b'{"window": ' + b"9" * 10_000 + b"}",
        b'"\xff\xfe"',
        b'{"a": ' + b"{}" * 3 + b"}",
    ],
    ids=lambda text: text[:12],
)
def test_headers_that_are_no_json(text: bytes) -> None:
    fault(resigned(text))


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_every_changed_byte_of_prelude_and_header_is_noticed(at: int, change: int) -> None:
    end = PRELUDE_BYTES + opened(DATA).header.header_bytes
    mutated = bytearray(DATA)
    mutated[at] ^= change
    if at < end:
        fault(bytes(mutated))
    else:
        assert opened(bytes(mutated)).header == opened(DATA).header


@given(st.binary(max_size=300))
def test_random_bytes_are_corrupt(data: bytes) -> None:
    fault(data)


@given(st.data())
def test_random_json_changes_are_faults_or_headers(data: st.DataObject) -> None:
    header = header_of()
    at: Any = header
    for _ in range(data.draw(st.integers(1, 4))):
        keys = sorted(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        at[key] = data.draw(
            st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([]))
        )
        break
    with suppress(Fault):  # and nothing else
        opened(resigned(json.dumps(header).encode()))
