"""Fuzzing what serving reads from outside: it is understood or refused, nothing else happens.

Exports (their lengths and checksums put right after each change, so that the damage reaches the parsers),
message headers, positions and parts of dense weights of parameter sync, and the tensors of requests.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.errors import ExportError, InputError, MegalithError
from megalith.routing import Router
from megalith.serving.export.row_format import RowFormat, RowPart
from megalith.serving.export.servable import Servable
from megalith.serving.export.signature import Signature, read_examples
from megalith.serving.server.inputs import InputReader
from megalith.serving.sync.protocol import (
    COMPLETE,
    PUBLISHER,
    SEQUENCE,
    SESSION,
    MessageHeader,
    ModelLayout,
    Position,
    TableLayout,
)
from megalith.serving.sync.push_messages import DenseAssembly, read_dense_parts
from tests.checkpoint.test_fuzz import flip, mutate, places
from tests.serving.exports import export_version

SIGNATURE = "signature.json"
Draw = Callable[[Any], Any]
IDS = torch.tensor([0, 1, 49, 50, -1, 2**62])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The files of a version of each part."""
    out = tmp_path_factory.mktemp("exports")
    export_version(out / "whole", version=1)
    export_version(out / "parts", version=1, num_shards=2)
    parts = {"standalone": out / "whole", **{part: out / "parts" / part for part in ("entry", "ps_0")}}
    return {
        part: {path.name: path.read_bytes() for path in (folder / "1").iterdir()}
        for part, folder in parts.items()
    }


def write(folder: Path, files: dict[str, bytes], name: str, content: bytes) -> Path:
    """The files of a version except one, whose length and checksum are in the signature."""
    files = {**files, name: content}
    if name != SIGNATURE:
        signature = json.loads(files[SIGNATURE])
        for container, key in places(signature):
            if key == "path" and container[key] == name:
                container["bytes"], container["checksum"] = len(content), f"crc32:{zlib.crc32(content):08x}"
        files[SIGNATURE] = json.dumps(signature).encode()
    for path, data in files.items():
        # A new file, not the old one with other bytes: an earlier one may still be mapped.
        (folder / path).unlink(missing_ok=True)
        (folder / path).write_bytes(data)
    return folder


def no_rows(ids: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(each.numel(), 5) for name, each in ids.items()}


def use(folder: Path, *, entry: bool = False) -> None:
    """Passes if the version opens and answers, or is refused in words."""
    try:
        servable = Servable(folder, fetch=no_rows if entry else None)
    except MegalithError:
        return
    shard = servable.signature.shard
    for name, table in servable.signature.tables.items():
        if not entry:
            own = IDS if shard is None else IDS[table.router().owner(IDS) == shard]
            assert servable.lookup(name, own).shape == (own.numel(), table.dim)
    servable.close()


def fuzz(examples: int, check: Callable[[st.DataObject], None]) -> None:
    settings(max_examples=examples)(given(st.data())(check))()


@pytest.mark.parametrize("part", ["standalone", "entry", "ps_0"])
def test_signatures(part: str, exported: dict[str, dict[str, bytes]]) -> None:
    def check(data: st.DataObject) -> None:
        changed = json.loads(exported[part][SIGNATURE])
        for _ in range(data.draw(st.integers(1, 3))):
            mutate(data.draw, changed)
        try:
            signature = Signature.from_dict(changed, "here")
        except ExportError:
            return
        assert Signature.from_dict(json.loads(signature.to_json()), "here") == signature
        assert signature.name
        assert all(table.router().num_shards > 0 and table.dim > 0 for table in signature.tables.values())

    fuzz(150, check)


@pytest.mark.parametrize(
    ("part", "suffix", "limit", "examples"),
    [
        ("ps_0", SIGNATURE, 1 << 20, 60),
        ("ps_0", ".safetensors", 256, 80),
        ("ps_0", ".safetensors", 1 << 20, 80),
        ("entry", "dense.pt2", 1 << 20, 12),
    ],
    ids=["signature", "header of rows", "rows", "program"],
)
def test_bytes_of_files(
    part: str, suffix: str, limit: int, examples: int, exported: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    files = exported[part]
    name = next(name for name in sorted(files) if name.endswith(suffix))

    def check(data: st.DataObject) -> None:
        damaged = flip(data.draw, files[name], limit)
        use(write(tmp_path, files, name, damaged), entry=part == "entry")

    fuzz(examples, check)


def test_a_signature_of_other_files(exported: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    files = exported["ps_0"]

    def check(data: st.DataObject) -> None:
        changed = json.loads(files[SIGNATURE])
        mutate(data.draw, changed["tables"])
        with suppress(UnicodeEncodeError):
            use(write(tmp_path, files, SIGNATURE, json.dumps(changed).encode()))

    fuzz(60, check)


def test_examples(exported: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    path, good = tmp_path / "examples.json", exported["standalone"]["examples.json"]

    def check(data: st.DataObject) -> None:
        changed = json.loads(good)
        mutate(data.draw, changed)
        whole = data.draw(st.booleans())
        path.write_bytes(json.dumps(changed).encode() if whole else flip(data.draw, good, 1 << 20))
        with suppress(ExportError):
            assert isinstance(read_examples(path), list)

    fuzz(100, check)


# ---- requests

SHAPES = st.lists(st.integers(0, 4), max_size=3)
INTEGERS = [torch.int64, torch.int32, torch.uint64, torch.uint8, torch.bool]
DTYPES = st.sampled_from([*INTEGERS, torch.float32, torch.float64, torch.bfloat16])


@st.composite
def tensors(draw: Draw) -> Any:
    """A tensor, or strings, of a few numbers; the shapes are often those a request might have."""
    shape = draw(st.one_of(SHAPES, st.sampled_from([[2], [3], [2, 3], [3, 3]])))
    size = int(np.prod(shape))
    if draw(st.integers(0, 5)) == 0:
        strings = np.empty(size, dtype=object)
        strings[:] = [draw(st.binary(max_size=3)) for _ in range(size)]
        return strings.reshape(shape)
    values = [draw(st.sampled_from([0, 1, 2, 3, 49, 255])) for _ in range(size)]
    if draw(st.booleans()):
        values.sort()
    return torch.tensor(values, dtype=torch.int64).to(draw(DTYPES)).reshape(shape)


RAGGED = ["tags:row_splits", "tags:weights", "user:weights", "user:row_splits"]
NAMES = st.sampled_from(["user", "item", "tags", "dense", *RAGGED, "x", ""])


def test_inputs_of_requests(exported: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    files = exported["standalone"]
    servable = Servable(write(tmp_path, files, SIGNATURE, files[SIGNATURE]))
    reader = InputReader(servable.signature)
    good = {"user": torch.tensor([1, 2]), "dense": torch.zeros(2, 3)}
    answered = 0

    def check(data: st.DataObject) -> None:
        nonlocal answered
        inputs = data.draw(st.dictionaries(NAMES, tensors(), max_size=3))
        try:
            rows = reader.read({**good, **inputs} if data.draw(st.booleans()) else inputs)
        except InputError:
            return
        features, dense = reader.join([rows, rows])
        logits = servable.predict(features, dense)["logits"]
        assert logits.shape == (2 * rows.count,)
        answered += 1

    fuzz(300, check)
    assert answered > 0


# ---- parameter sync


HEADER_VALUES = ["0" * 32, "a" * 32, "0/1", "1/1", "99999/99999", "5", "9" * 18, "nan", "1e999", "\u0661"]


@given(
    st.dictionaries(
        st.sampled_from([SESSION, PUBLISHER, SEQUENCE, COMPLETE]),
        st.sampled_from(HEADER_VALUES) | st.text(max_size=40),
    )
)
def test_message_headers(metadata: dict[str, str]) -> None:
    try:
        header = MessageHeader.read(metadata)
    except InputError:
        return
    assert (header is None) == (SESSION not in metadata)
    if header is not None:
        assert MessageHeader.read(dict(header.metadata())) == header


CODES = RowFormat((RowPart("float32", 1), RowPart("fixed_point", 1, 0.5), RowPart("one_bit", 2, 0.25)))
LAYOUT = ModelLayout(
    "ps_1", 2, {"user": TableLayout(4, Router("continuous", 2, block_size=10), CODES)}, frozenset({"w"})
)


@settings(max_examples=200)
@given(st.data())
def test_layouts(data: st.DataObject) -> None:
    changed = json.loads(LAYOUT.to_json())
    mutate(data.draw, changed)
    whole = data.draw(st.booleans())
    text = json.dumps(changed).encode() if whole else flip(data.draw, LAYOUT.to_json(), 1 << 20)
    try:
        layout = ModelLayout.from_json(text)
    except InputError:
        return
    for table in layout.tables:
        assert layout.keep(table, IDS).dtype == torch.int64
    for name, codes in layout.codes.items():
        assert layout.tables[name].dim == codes.dim


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from(["session", "base", "sequence", "step", "layout"]), tensors()))
def test_positions(outputs: dict[str, Any]) -> None:
    good = Position("", "base", 3, 7, LAYOUT).outputs()
    try:
        position = Position.read({**good, **outputs})
    except InputError:
        return
    assert Position.read(position.outputs()) == position


PART_NAMES = st.sampled_from(["dense_part:w", "dense_begin:w", "dense_part:v", "dense_begin:v", "x"])
WEIGHTS = {"w": torch.zeros(2, 3), "v": torch.zeros(2, dtype=torch.float64)}
BEGINS = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 5, 6, 2**31, 2**63 - 1]).map(lambda n: torch.tensor([n]))
VALUES = st.lists(st.sampled_from([1.0, 2.0, -0.0, float("inf"), float("nan")]), max_size=7).map(torch.tensor)


@settings(max_examples=200)
@given(st.lists(st.dictionaries(PART_NAMES, st.one_of(tensors(), BEGINS, VALUES)), max_size=6))
def test_parts_of_dense_weights(messages: list[dict[str, Any]]) -> None:
    assembly = DenseAssembly()
    arrived: dict[str, list[torch.Tensor]] = {}
    for inputs in messages:
        left = dict(inputs)
        try:
            parts = read_dense_parts(left, WEIGHTS)
            complete = assembly.add(parts, WEIGHTS, is_last=False)
        except InputError:
            continue
        assert left.keys() <= {"x"}
        for name, part in parts.items():
            arrived[name] = [*(arrived[name] if part.begin else ()), part.values]
        for name, weight in complete.items():
            assert (weight.shape, weight.dtype) == (WEIGHTS[name].shape, WEIGHTS[name].dtype)
            assert bool(weight.isfinite().all())
            assert torch.equal(weight.view(-1), torch.cat(arrived.pop(name)))


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.booleans())
def test_parts_that_cover_a_weight_complete_it(sizes: list[int], again: bool) -> None:
    weight = torch.arange(float(sum(sizes)))
    assembly, found = DenseAssembly(), {}
    starts = [0, *np.cumsum(sizes)[:-1].tolist()]
    pieces = list(zip(starts, weight.split(sizes), strict=True))
    for begin, values in [*(pieces[:1] if again else ()), *pieces]:
        inputs: dict[str, Any] = {"dense_part:w": values, "dense_begin:w": torch.tensor([begin])}
        parts = read_dense_parts(inputs, {"w": weight})
        found = assembly.add(parts, {"w": weight}, is_last=False)
    assert torch.equal(found["w"], weight)
