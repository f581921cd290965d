"""Frozen rows: native code, its reference and a dict agree; damaged files are refused."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalith.errors import CheckpointError, ExportError
from megalith.serving.export import frozen_rows as module
from megalith.serving.export.frozen_rows import FrozenRows, FrozenWriter, slot_hash
from megalith.serving.export.row_format import KINDS, RowFormat, RowPart
from tests.table.support import assert_same_bits

IDS = st.one_of(st.integers(0, 60), st.integers(-(2**63), 2**63 - 1))


def write(
    path: Path, ids: Tensor, rows: Tensor, format: RowFormat | None = None, piece: int = 7
) -> FrozenRows:
    format = RowFormat.uniform("float32", [rows.shape[1]], [1.0]) if format is None else format
    writer = FrozenWriter(path, ids, format)
    for at in range(0, ids.numel(), piece):
        writer.add(ids[at : at + piece], rows[at : at + piece])
    entry = writer.close()
    assert (entry.path, entry.bytes) == (path.name, path.stat().st_size)
    return FrozenRows(path, format)


@pytest.fixture
def table(tmp_path: Path) -> FrozenRows:
    """200 ids, row [id, -id]."""
    ids = torch.arange(200)
    return write(tmp_path / "t.safetensors", ids, torch.stack([ids, -ids], 1).float())


PARTS = st.builds(RowPart, st.sampled_from(KINDS), st.integers(1, 20), st.sampled_from([0.25, 0.3, 1.0]))


@settings(max_examples=80)
@given(
    st.lists(IDS, unique=True, max_size=80),
    st.lists(IDS, max_size=80),
    st.lists(PARTS, min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_native_reference_and_a_dict_agree(
    known: list[int], asked: list[int], parts: list[RowPart], random: Any
) -> None:
    format = RowFormat(tuple(parts))
    asked += random.sample(known, len(known) // 2)
    ids, queries = (torch.tensor(each, dtype=torch.int64) for each in (known, asked))
    rows = torch.randn(len(known), format.dim, generator=torch.Generator().manual_seed(len(asked)))
    skip = torch.tensor([random.random() < 0.3 for _ in asked], dtype=torch.uint8)
    stored = dict(zip(known, format.decode(format.encode(rows)), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        frozen = write(Path(folder) / "t.safetensors", ids, rows, format)
        for chosen in (None, skip):
            expected = torch.full((len(asked), format.dim), 7.5)
            missing = 0
            for number, id in enumerate(asked):
                if chosen is None or not chosen[number]:
                    expected[number] = stored.get(id, torch.zeros(format.dim))
                    missing += id not in stored
            for read in (frozen.read, frozen.read_reference):
                out = torch.full((len(asked), format.dim), 7.5)
                assert read(queries, out, chosen) == missing
                assert_same_bits(out, expected)
    assert RowFormat.from_data(format.to_data()) == format


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 63, 64, 65])
def test_blocks_of_every_size(table: FrozenRows, size: int) -> None:
    ids = torch.arange(size) * 5
    out = torch.empty(size, 2)
    assert table.read(ids, out) == int((ids >= 200).sum())
    wanted = torch.where(ids < 200, ids, 0).float()
    assert torch.equal(out, torch.stack([wanted, -wanted], 1))


def test_the_order_is_that_of_the_hash_as_an_unsigned_number(table: FrozenRows) -> None:
    hashes = [h % 2**64 for h in slot_hash(table.ids).tolist()]
    assert hashes == sorted(hashes)


def test_without_native_code_the_reference_answers(
    table: FrozenRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "native_module", lambda: None)
    again = FrozenRows(table._path, RowFormat((RowPart("float32", 2),)))
    out = torch.empty(2, 2)
    assert again.read(torch.tensor([3, 999]), out) == 1
    assert out.tolist() == [[3, -3], [0, 0]]


def test_native_code_refuses_what_it_cannot_read(table: FrozenRows) -> None:
    ids, out = torch.arange(4), torch.empty(4, 2)
    wrong: list[tuple[Tensor, Tensor, Tensor | None]] = [
        (ids.int(), out, None),
        (torch.arange(8)[::2], out, None),
        (ids, torch.empty(3, 2), None),
        (ids, torch.empty(4, 3), None),
        (ids, out.double(), None),
        (ids, out, torch.zeros(3, dtype=torch.uint8)),
        (ids, out, torch.zeros(4)),
    ]
    for arguments in wrong:
        with pytest.raises((ValueError, TypeError)):
            table.read(*arguments)


def test_the_file_is_safetensors_and_read_only(table: FrozenRows) -> None:
    tensors = load_file(table._path)
    assert {name: (t.dtype, list(t.shape)) for name, t in tensors.items()} == {
        "ids": (torch.int64, [200]),
        "buckets": (torch.int64, [33]),
        "rows": (torch.float32, [200, 2]),
    }
    assert torch.equal(tensors["rows"][:, 0].long(), tensors["ids"])


# ---- writing


def test_rows_come_in_the_order_of_the_ids(tmp_path: Path) -> None:
    writer = FrozenWriter(tmp_path / "t", torch.arange(4), RowFormat((RowPart("float32", 1),)))
    with pytest.raises(ExportError, match="changed while it was exported"):
        writer.add(torch.tensor([0, 2]), torch.zeros(2, 1))
    writer.add(torch.arange(3), torch.zeros(3, 1))
    with pytest.raises(ExportError, match="3 rows for 4 ids"):
        writer.close()
    with pytest.raises(ExportError, match="changed while it was exported"):
        writer.add(torch.tensor([3, 4]), torch.zeros(2, 1))


# ---- damage


def stored(path: Path) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def with_bucket(at: int, value: int) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["buckets"][at] = value

    return change


def replaced(**tensors: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda old: old.update(tensors)


@pytest.mark.parametrize(
    "change",
    [
        with_bucket(0, 1),
        with_bucket(0, -1),
        with_bucket(5, 2**62),
        with_bucket(5, -(2**63)),
        with_bucket(-1, 199),
        with_bucket(-1, 201),
        replaced(buckets=torch.tensor([0, 100, 150, 200])),
        replaced(buckets=torch.tensor([200])),
        replaced(buckets=torch.empty(0, dtype=torch.int64)),
        replaced(ids=torch.arange(199)),
        replaced(ids=torch.arange(200).int()),
        replaced(ids=torch.arange(200)[:, None].clone()),
        replaced(rows=torch.zeros(200, 3)),
        replaced(rows=torch.zeros(199, 2)),
        replaced(rows=torch.zeros(200, 2).half()),
        replaced(rows=torch.zeros(400)),
        replaced(more=torch.zeros(1)),
        lambda tensors: tensors.pop("buckets"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    table: FrozenRows, change: Callable[[dict[str, Tensor]], None]
) -> None:
    tensors = stored(table._path)
    change(tensors)
    path = table._path.with_name("other.safetensors")
    save_file(tensors, path)
    with pytest.raises(ExportError):
        FrozenRows(path, RowFormat((RowPart("float32", 2),)))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100, 2000])
def test_a_file_that_ends_early_is_refused(table: FrozenRows, size: int) -> None:
    path = table._path.with_name("short.safetensors")
    path.write_bytes(table._path.read_bytes()[:size])
    with pytest.raises((ExportError, CheckpointError)):
        FrozenRows(path, RowFormat((RowPart("float32", 2),)))


def test_a_header_of_huge_numbers_is_refused(tmp_path: Path) -> None:
    header = {"ids": {"dtype": "I64", "shape": [2**62], "data_offsets": [0, 2**65]}}
    text = json.dumps(header).encode()
    path = tmp_path / "t.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    with pytest.raises(ExportError):
        FrozenRows(path, RowFormat((RowPart("float32", 2),)))


def test_a_large_file_is_mapped_and_not_read(tmp_path: Path) -> None:
    """Opening counts no row's bytes against the process: the mapping is the file's own pages."""
    ids = torch.arange(50_000)
    frozen = write(tmp_path / "t.safetensors", ids, torch.ones(50_000, 16), piece=10_000)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no list of mappings here")
    (line,) = [
        each
        for each in maps.read_text().splitlines()
        if each.endswith(str(frozen._path)) and " r--s " in each
    ]
    begin, end = (int(each, 16) for each in line.split()[0].split("-"))
    assert end - begin >= 50_000 * 16 * 4
    assert begin <= np.asarray(frozen.ids).ctypes.data < end
