"""Templar's gradient objects: what they become, what is written, and that nothing in them runs."""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith.compat.templar import convert_payload
from megalith.gather.payload import Header
from megalith.gather.payload_schema import PayloadSchema
from megalith.gather.plan import Fault, Status
from megalith.storage.bodies import MemoryBody
from tests.gather import naive

SHAPES = {"w": (128, 64), "b": (64,)}
SCHEMA = PayloadSchema.of({name: torch.zeros(shape) for name, shape in SHAPES.items()}, padding=False)


def templar_object(
    seed: int, window: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An object of Templar's format, encoded without Megalith's code, with the dense update it stands for."""
    make = torch.Generator().manual_seed(seed)
    state: dict[str, Any] = {"metadata": {"window": window, "sample_digest": "abc", "sample_count": 5}}
    dense = {}
    for name, shape in SHAPES.items():
        lines, columns = shape if len(shape) == 2 else (1, shape[0])
        down, across = math.ceil(lines / 64), math.ceil(columns / 64)
        height, width = lines // down, columns // across
        keep = min(64, height * width)
        chunks = torch.zeros(down * across, height * width)
        packed, codes = [], torch.randint(0, 4, (down * across, keep), generator=make)
        shift, lookup = torch.randn((), generator=make), torch.randn(4, generator=make)
        for row in range(down * across):
            indices = torch.randperm(height * width, generator=make)[:keep].tolist()  # in any order
            for a, b in zip(indices[0::2], indices[1::2], strict=True):  # two indices in three bytes
                packed += [a % 256, a // 256 + b % 16 * 16, b // 16]
            chunks[row, indices] = (lookup[codes[row]] + shift).to(dtype).float()
        kept = (down, across, keep) if len(shape) == 2 else (across, keep)
        state[name + "idxs"] = torch.tensor(packed, dtype=torch.uint8)
        state[name + "vals"] = codes.to(torch.uint8).view(kept)
        state[name + "quant_params"] = (shift, 0.5, 2, lookup, dtype)
        tiles = chunks.view(down, across, height, width).permute(0, 2, 1, 3)
        dense[name] = tiles.reshape(shape)
    return {"state_dict": state, "global_step": 40 + seed}, dense


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def converted(data: bytes, **other: Any) -> tuple[Header, bytes]:
    file = io.BytesIO()
    where = {"run": "r", "window": 3, "uid": 9, **other}
    return convert_payload(MemoryBody(data), SCHEMA, file, **where), file.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_the_layout_describes(dtype: torch.dtype) -> None:
    value, dense = templar_object(1, dtype=dtype)
    header, data = converted(saved(value), block_rows=1)
    assert header.label.global_step == 41
    assert dict(header.label.metadata) == {"sample_digest": "abc", "sample_count": 5}
    ours = naive.read(data)
    for spec in SCHEMA.parameters:
        parameter = ours.parameters[spec.name]
        chunks = torch.zeros(spec.rows, spec.size)
        for row, (indices, codes) in enumerate(zip(parameter.indices, parameter.codes, strict=True)):
            assert indices == sorted(indices)
            chunks[row, indices] = torch.tensor([float(parameter.lookup[code]) for code in codes])
        assert torch.equal(chunks.reshape(dense[spec.name].shape), dense[spec.name])


def faulty(change: Any) -> Fault:
    value, _ = templar_object(0)
    change(value["state_dict"])
    with pytest.raises(Fault) as caught:
        converted(saved(value))
    return caught.value


def test_wrong_content_is_named() -> None:
    invalid = Status.INVALID_SCHEMA
    assert faulty(lambda s: s.pop("bvals")).status is invalid
    assert "'zz'" in faulty(lambda s: s.update(zz=torch.zeros(1))).detail
    assert "five parts" in faulty(lambda s: s.update(wquant_params=(1, 2))).detail
    assert "one number" in faulty(lambda s: s.update(wquant_params=(None, 1, 2, None, None))).detail
    assert "uint8" in faulty(lambda s: s.update(wvals=torch.zeros(2, 1, 64))).detail
    assert "do not match" in faulty(lambda s: s.update(wvals=torch.zeros(2, 64, dtype=torch.uint8))).detail
    assert "window" in faulty(lambda s: s["metadata"].update(window=4)).detail
    high = faulty(lambda s: s["wvals"].fill_(7))
    assert (high.status, high.detail) == (Status.INVALID_VALUE, "'w' has a code outside of its lookup")


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("this must not run",))


def test_nothing_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    value, _ = templar_object(0)
    value["state_dict"]["wquant_params"] = Evil()
    with pytest.raises(Fault, match="calls PickledName") as caught:
        converted(saved(value))
    assert caught.value.status is Status.CORRUPT
    assert capsys.readouterr().out == ""


def zipped(data: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data)
    return file.getvalue()


@pytest.mark.parametrize("protocol", [0, 1, 3, 4, 5])
def test_other_pickles_are_faults(protocol: int) -> None:
    with pytest.raises(Fault):
        converted(zipped(pickle.dumps({"state_dict": [Evil()]}, protocol)))


def test_compressed_archives_are_refused() -> None:
    with pytest.raises(Fault, match="compressed"):
        converted(zipped(bytes(10_000_000), zipfile.ZIP_DEFLATED))


DATA = saved(templar_object(0)[0])


@given(st.lists(st.tuples(st.integers(0, len(DATA) - 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_mutated_files_are_faults_or_payloads(changes: list[tuple[int, int]]) -> None:
    mutated = bytearray(DATA)
    for at, change in changes:
        mutated[at] ^= change
    with suppress(Fault):  # and nothing else
        converted(bytes(mutated))


PICKLE = zipfile.ZipFile(io.BytesIO(DATA)).read("archive/data.pkl")


@given(st.lists(st.tuples(st.integers(0, len(PICKLE) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_mutated_pickles_are_faults_or_payloads(changes: list[tuple[int, int]]) -> None:
    mutated = bytearray(PICKLE)
    for at, value in changes:
        mutated[at] = value
    at = DATA.index(PICKLE)
    with suppress(Fault):
        converted(DATA[:at] + bytes(mutated) + DATA[at + len(PICKLE) :])


@given(st.binary(max_size=200))
def test_random_bytes_are_faults(data: bytes) -> None:
    with pytest.raises(Fault):
        converted(data)


def test_every_byte_of_the_archive_is_covered_by_its_crc() -> None:
    name = "archive/data/0"
    archive = zipfile.ZipFile(io.BytesIO(DATA))
    names = [each for each in archive.namelist() if each.endswith(name.removeprefix("archive"))]
    at = DATA.index(archive.read(names[0]))
    with pytest.raises(Fault, match="wrong CRC") as caught:
        converted(DATA[:at] + bytes([DATA[at] ^ 1]) + DATA[at + 1 :])
    assert caught.value.status is Status.CORRUPT
