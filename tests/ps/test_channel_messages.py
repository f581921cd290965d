"""What arrives over sockets: frames in any pieces, broken bytes, wrong requests and wrong files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith import errors
from megalith.errors import InputError, MegalithError, UnknownNameError
from megalith.ps import channel_messages
from megalith.ps.channel_messages import (
    FrameReader,
    PushRequest,
    ReadRequest,
    WireFrame,
    decode_error,
    decode_request,
    error_text,
    forgotten,
    frame_bytes,
    place_arrays,
    segment_fields,
)
from megalith.ps.shared_memory import SegmentPool, map_segment

NOTHING = np.empty(0, np.uint8)


def feed(data: bytes, sizes: Iterator[int] | None = None) -> list[WireFrame]:
    reader, found, at = FrameReader(), [], 0
    while at < len(data):
        wanted = reader.wanted()
        assert len(wanted) > 0
        count = min(len(wanted), len(data) - at, next(sizes) if sizes else 1 << 30)
        wanted[:count] = data[at : at + count]
        at += count
        frame = reader.advance(count)
        if frame is not None:
            found.append(frame)
    return found


def some_frames() -> list[tuple[dict[str, Any], bytes]]:
    return [({"a": 1}, b""), ({}, b"xyz"), ({"call": "read", "deep": [[1], {"b": None}]}, bytes(1000))]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_frames_are_the_same_whatever_the_pieces_in_which_they_arrive(sizes: list[int]) -> None:
    pieces = [frame_bytes(text, [np.frombuffer(more, np.uint8)]) for text, more in some_frames()]
    data = b"".join(bytes(piece) for each in pieces for piece in each)
    found = feed(data, iter(sizes * len(data)))
    assert [(frame.text, frame.payload.tobytes()) for frame in found] == some_frames()


@given(st.data())
def test_broken_frames_raise_and_nothing_else(data: st.DataObject) -> None:
    pieces = [frame_bytes(text, [np.frombuffer(more, np.uint8)]) for text, more in some_frames()]
    sent = bytearray(b"".join(bytes(piece) for each in pieces for piece in each))
    for _ in range(data.draw(st.integers(1, 6))):
        sent[data.draw(st.integers(0, 120))] = data.draw(st.integers(0, 255))
    with suppress(InputError):
        feed(bytes(sent[: data.draw(st.integers(0, len(sent)))]))


def requests() -> list[tuple[dict[str, Any], np.ndarray[Any, Any]]]:
    """Valid requests: a read from a segment, a read and a push with everything in the payload."""
    ids = np.arange(4)
    described, pieces = place_arrays({"ids": ids}, {"ids": None})
    read = {"call": "read", "id": 1, "name": "t", "worker": 0, "session": "s", "after": 0, "counts": [4]}
    read |= {"step": None, "arrays": described, "rows": None}
    inside = read | {"arrays": [["ids", "int64", 4, 3, 64]], "rows": [3, 128, 16], "step": 5}
    header = {
        "counts": [1, 3],
        "step": 0,
        "time": None,
        "scale": 1.0,
        "clip_norm": None,
        "rates": {"t": [1.0]},
    }
    arrays = {"ids": ids, "grads": np.zeros(16, np.uint8), "seen": np.ones(4, np.int64)}
    several, more = place_arrays(arrays, dict.fromkeys(arrays))
    push = {"call": "push", "id": 2, "name": "t", "worker": 0, "session": "s", "number": 1}
    push |= {"header": header, "arrays": several}
    return [(inside, NOTHING), (read, np.concatenate(pieces)), (push, np.concatenate(more))]


SEGMENTS = {3: np.zeros(256, np.uint8)}


def test_requests_are_what_was_sent() -> None:
    inside, read, sent = (decode_request(WireFrame(text, payload), SEGMENTS) for text, payload in requests())
    assert isinstance(inside, ReadRequest)
    assert isinstance(read, ReadRequest)
    assert isinstance(sent, PushRequest)
    assert (inside.ids.tolist(), inside.step) == ([0] * 4, 5)
    assert inside.out is not None
    assert inside.out.size == 16
    assert (read.ids.tolist(), read.counts, read.out) == ([0, 1, 2, 3], [4], None)
    assert sent.write.arrays["seen"].tolist() == [1] * 4
    assert sent.write.header["counts"] == [1, 3]


VALUES = st.sampled_from(
    [None, True, -1, 0, 1, 2**62, 2**70, 1.5, "", "ids", "int64", "float64", [], {}, [1], ["ids"], [[]]]
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        yield (*path, key)
        if isinstance(child, dict | list):
            yield from _paths(child, (*path, key))


@given(st.data())
def test_wrong_requests_raise_and_nothing_else(data: st.DataObject) -> None:
    text, payload = data.draw(st.sampled_from(range(3)).map(lambda number: requests()[number]))
    text = json.loads(json.dumps(text))
    for _ in range(data.draw(st.integers(1, 2))):
        *path, last = data.draw(st.sampled_from(list(_paths(text))))
        place: Any = text
        for key in path:
            place = place[key]
        if data.draw(st.booleans()):
            place[last] = data.draw(VALUES)
        else:
            del place[last]
        if not list(_paths(text)):
            break
    cut = data.draw(st.integers(0, payload.size))
    try:
        found = decode_request(WireFrame(text, payload[:cut]), SEGMENTS)
    except InputError:
        return
    arrays = {"ids": found.ids} if isinstance(found, ReadRequest) else found.write.arrays
    counts = found.counts if isinstance(found, ReadRequest) else found.write.header["counts"]
    assert sum(counts) == arrays["ids"].size  # what was accepted is consistent
    for array in arrays.values():
        array.sum()  # and in memory that exists


@pytest.mark.parametrize("text", [{}, {"number": -1, "size": 5}, {"number": 0, "size": 0}, {"number": 0.5}])
def test_wrong_segments_are_refused(text: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        segment_fields(text)
    with pytest.raises(InputError):
        forgotten({"numbers": [text]})
    with pytest.raises(InputError):
        forgotten(text)


def test_files_that_are_no_segments_are_refused(tmp_path: Any) -> None:
    pool = SegmentPool()
    kept = pool.new(300_000)
    (segment,) = pool.segments.values()
    assert map_segment(os.dup(segment.file), segment.size).size == segment.size == 512 << 10
    with pytest.raises(InputError, match="announced"):
        map_segment(os.dup(segment.file), segment.size - 1)
    (tmp_path / "x").write_bytes(bytes(4096))
    with pytest.raises(InputError):  # it could be truncated while it is mapped
        map_segment(os.open(tmp_path / "x", os.O_RDWR), 4096)
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(InputError):
        map_segment(unsealed, 4096)
    with pytest.raises(OSError):  # noqa: PT011 - EPERM: it is sealed
        os.ftruncate(segment.file, 1)
    assert pool.find(kept.numpy()[5:]) == (segment, 5)


def test_a_message_that_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_messages, "MAX_PAYLOAD", 100)
    with pytest.raises(InputError, match="use smaller batches"):
        frame_bytes({}, [np.zeros(101, np.uint8)])


def test_numbers_that_are_not_finite_are_not_sent() -> None:
    with pytest.raises(InputError, match="infinite or NaN"):
        frame_bytes({"scale": float("inf")}, [])


def test_a_pool_that_is_freed_closes_its_files() -> None:
    pool = SegmentPool()
    kept = pool.new(20_000)
    (file,) = [segment.file for segment in pool.segments.values()]
    del pool
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    assert kept.fill_(1).sum() == 20_000  # the memory stays


def test_errors_keep_their_class_and_message() -> None:
    for name in dir(errors):
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, MegalithError):
            found = decode_error(error_text(kind("what and where"))).error
            assert (type(found), str(found)) == (kind, "what and where")
    assert isinstance(decode_error(error_text(PermissionError(13, "denied"))).error, OSError)
    assert str(decode_error(error_text(UnknownNameError("'x'"))).error) == "'x'"
    unknown = decode_error(error_text(ZeroDivisionError("oh"))).error
    assert (type(unknown), str(unknown)) == (MegalithError, "on a server: ZeroDivisionError: oh")
    for wrong in (None, [], ["OSError"], ["KeyError", "x"], ["InputError", 5], "x"):
        with pytest.raises(InputError):
            decode_error(wrong)
