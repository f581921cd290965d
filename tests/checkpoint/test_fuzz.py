"""Fuzzing the reader: a checkpoint of any bytes either loads or raises CheckpointError.

Lengths and checksums are put right after each change, so that the damage reaches the parsers.
"""

from __future__ import annotations

import copy
import json
import resource
import struct
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith import checkpoint
from megalith.errors import CheckpointError, InputError
from tests.checkpoint.malformed.checkpoints import good, new_optimizer
from tests.checkpoint.memory import MemoryStore
from tests.checkpoint.support import Model

MANIFEST = "manifest.json"
FILES = sorted(name for name in good() if name != MANIFEST)
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 7, 2**31, 2**53, 2**62, 2**63, 2**64, 10**30, -(2**63), 0.5, 1e308]),
    st.sampled_from(["", ".", "..", "../x", "/", "a\\b", "\0", "\ud800", "x" * 300, "crc32:", "continuous"]),
    st.builds(lambda: []),
    st.builds(lambda: {}),
    st.integers(),
    st.text(max_size=5),
    st.builds(lambda depth: json.loads("[" * depth + "]" * depth), st.integers(1, 150)),
)


def places(data: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of some JSON."""
    found: list[tuple[Any, Any]] = []
    todo = [data]
    while todo:
        node = todo.pop()
        keys: Any = node.keys() if isinstance(node, dict) else range(len(node))
        for key in keys:
            found.append((node, key))
            if isinstance(node[key], dict | list):
                todo.append(node[key])
    return found


def mutate(draw: Callable[[Any], Any], data: Any) -> None:
    """Change one field of some JSON: another value, a value from elsewhere in it, removed, or duplicated."""
    if not places(data):
        return
    container, key = draw(st.sampled_from(places(data)))
    how = draw(st.sampled_from(["junk", "elsewhere", "gone", "twice"]))
    if how == "junk":
        container[key] = draw(JUNK)
    elif how == "elsewhere":
        other, its_key = draw(st.sampled_from(places(data)))
        container[key] = copy.deepcopy(other[its_key])
    elif how == "gone":
        del container[key]
    elif isinstance(container, list):
        container.append(copy.deepcopy(container[key]))
    else:
        container[draw(st.text(max_size=3))] = copy.deepcopy(container[key])


def flip(draw: Callable[[Any], Any], data: bytes, limit: int) -> bytes:
    """Overwrites some bytes among the first `limit`, cuts the end off, or adds to it."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        changed[draw(st.integers(0, min(limit, len(data)) - 1))] = draw(st.integers(0, 255))
    if draw(st.integers(0, 5)) == 0:
        changed = changed[: draw(st.integers(0, len(changed)))] + bytes(draw(st.integers(0, 16)))
    return bytes(changed)


def store_with(name: str, content: bytes) -> MemoryStore:
    """The good checkpoint with one file replaced; the manifest has the new length and checksum."""
    files = {**good(), name: content}
    if name != MANIFEST:
        manifest = json.loads(files[MANIFEST])
        for container, key in places(manifest):
            if key == "path" and container[key] == name:
                container["bytes"], container["checksum"] = len(content), f"crc32:{zlib.crc32(content):08x}"
        files[MANIFEST] = json.dumps(manifest).encode()
    return MemoryStore(files)


def read_in_all_ways(store: MemoryStore) -> None:
    """Pass if each way of reading succeeds or reports that the checkpoint is damaged."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = Model()
    ways: list[Callable[[], object]] = [
        lambda: checkpoint.load(model, store, optimizer=new_optimizer(model)),
        lambda: checkpoint.load(
            model, store, drop_optimizer_state=True, allow_missing=True, reroute=True, deltas=False
        ),
        lambda: checkpoint.reshard(store, MemoryStore(where="other"), num_shards=2),
        lambda: checkpoint.compact(store.copy()),
    ]
    for way in ways:
        message = ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                way()
            except (CheckpointError, InputError) as error:
                message = str(error)
        message.encode()  # it can be printed
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert grown < 200_000, f"{grown} kB for a checkpoint of a few"


def test_the_good_checkpoint_is_read_in_all_ways() -> None:
    store = store_with(FILES[0], good()[FILES[0]])
    read_in_all_ways(store)
    assert checkpoint.load(Model(), store).rows.keys() == {"embeddings.user", "embeddings.item"}


def other_json(data: st.DataObject) -> MemoryStore:
    manifest = json.loads(good()[MANIFEST])
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(data.draw, manifest)
    return store_with(MANIFEST, json.dumps(manifest).encode())


def other_text(data: st.DataObject) -> MemoryStore:
    text = good()[MANIFEST]
    return store_with(MANIFEST, flip(data.draw, text, len(text)))


def other_header(data: st.DataObject) -> MemoryStore:
    name = data.draw(st.sampled_from(FILES))
    content = good()[name]
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    for _ in range(data.draw(st.integers(1, 2))):
        mutate(data.draw, header)
    text = json.dumps(header).encode()
    return store_with(name, struct.pack("<Q", len(text)) + text + content[8 + length :])


def other_bytes(data: st.DataObject) -> MemoryStore:
    name = data.draw(st.sampled_from(FILES))
    content = good()[name]
    limit = data.draw(st.sampled_from([8, 300, len(content)]))
    return store_with(name, flip(data.draw, content, limit))


DAMAGE = {
    "a manifest of other JSON": other_json,
    "a manifest of other bytes": other_text,
    "a file with another header": other_header,
    "a file of other bytes": other_bytes,
}


@pytest.mark.parametrize("kind", DAMAGE)
@settings(max_examples=30)
@given(data=st.data())
def test_damage_raises_or_changes_nothing(kind: str, data: st.DataObject) -> None:
    read_in_all_ways(DAMAGE[kind](data))


@pytest.mark.soak
@pytest.mark.parametrize("kind", DAMAGE)
@settings(max_examples=1000)
@given(data=st.data())
def test_much_damage_raises_or_changes_nothing(kind: str, data: st.DataObject) -> None:
    read_in_all_ways(DAMAGE[kind](data))
