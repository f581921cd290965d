"""Templar's gradient objects: what they become, what is written, and that nothing in them runs."""

from __future__ import annotations

import io
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


def pack(indices: Tensor) -> Tensor:
    """Two indices in three bytes, as the layout has it."""
    out = []
    flat = indices.flatten().tolist()
    for a, b in zip(flat[0::2], flat[1::2], strict=True):
        out += [a & 0xFF, (a >> 8) | ((b & 0xF) << 4), b >> 4]
    return torch.tensor(out, dtype=torch.uint8)


def baseline(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    make = torch.Generator().manual_seed(seed)
    state: dict[str, Any] = {"metadata": {"window": 3, "sample_digest": "abc", "sample_count": 5}}
    for spec in SCHEMA.parameters:
        shape = (*spec.bands, spec.keep) if len(spec.shape) > 1 else (spec.bands[1], spec.keep)
        order = torch.rand(spec.rows, spec.size, generator=make).argsort(dim=1)[:, : spec.keep]
        state[spec.name + "idxs"] = pack(order)
        state[spec.name + "vals"] = torch.randint(0, 4, shape, generator=make).to(torch.uint8)
        state[spec.name + "quant_params"] = (
            torch.randn((), generator=make),
            0.5,
            2,
            torch.randn(4, generator=make),
            dtype,
        )
    return {"state_dict": state, "global_step": 12}


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
    given_ = baseline(1, dtype)
    header, data = converted(saved(given_), block_rows=1)
    assert header.label.global_step == 12
    assert dict(header.label.metadata) == {"sample_digest": "abc", "sample_count": 5}
    ours = naive.read(data)
    for spec in SCHEMA.parameters:
        shift, _, _, lookup, _ = given_["state_dict"][spec.name + "quant_params"]
        codes = given_["state_dict"][spec.name + "vals"].view(-1, spec.keep)
        packed = bytes(given_["state_dict"][spec.name + "idxs"].tolist())
        p = ours.parameters[spec.name]
        for row in range(spec.rows):
            indices = naive.numbers(
                packed[row * spec.index_bytes : (row + 1) * spec.index_bytes], 12, spec.keep
            )
            values = (lookup[codes[row].long()] + shift).to(dtype).float().tolist()
            expected = dict(zip(indices, values, strict=True))
            found = {i: float(p.lookup[c]) for i, c in zip(p.indices[row], p.codes[row], strict=True)}
            assert found == expected
            assert p.indices[row] == sorted(indices)


def faulty(change: Any) -> Fault:
    value = baseline()
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
    value = baseline()
    value["state_dict"]["wquant_params"] = Evil()
    file = io.BytesIO()
    torch.save(value, file)
    with pytest.raises(Fault, match="calls PickledName") as caught:
        converted(file.getvalue())
    assert caught.value.status is Status.CORRUPT
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("protocol", [0, 1, 3, 4, 5])
def test_other_pickles_are_faults(protocol: int) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"state_dict": [Evil()]}, protocol))
    with pytest.raises(Fault):
        converted(file.getvalue())


def test_compressed_archives_are_refused() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10_000_000))
    with pytest.raises(Fault, match="compressed"):
        converted(file.getvalue())


DATA = saved(baseline())


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
