"""Malformed safetensors files, compared with the safetensors library."""

from __future__ import annotations

import json

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith.errors import CheckpointError, InputError
from megalith.storage.tensor_files import decode, encode
from tests.storage.malformed_headers import HEADERS, raw

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
ONLY_WE_REJECT = {"a key twice", "sixty-five dimensions"}


def ours(data: bytes) -> dict[str, Tensor]:
    return decode(torch.tensor(list(data), dtype=torch.uint8), "some/file", CheckpointError)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        x.dtype == b[name].dtype
        and x.shape == b[name].shape
        and bytes(x.contiguous().reshape(-1).view(torch.uint8))
        == bytes(b[name].contiguous().reshape(-1).view(torch.uint8))
        for name, x in a.items()
    )


@pytest.mark.parametrize("name", HEADERS)
def test_a_malformed_file_raises_with_its_name(name: str) -> None:
    data, words = HEADERS[name]
    with pytest.raises(CheckpointError, match=f"^some/file.*{words}"):
        ours(data)


@pytest.mark.parametrize("name", sorted(HEADERS.keys() - ONLY_WE_REJECT))
def test_the_safetensors_library_rejects_it_too(name: str) -> None:
    with pytest.raises((safetensors.SafetensorError, ValueError, RuntimeError)):
        safetensors.torch.load(HEADERS[name][0])


@pytest.mark.parametrize("name", sorted(ONLY_WE_REJECT))
def test_where_we_are_stricter_than_the_library(name: str) -> None:
    assert safetensors.torch.load(HEADERS[name][0]).keys() == {"x"}


tensors = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name != "__metadata__"),
    st.builds(
        lambda dtype, shape, seed: torch.randint(
            0, 2, shape, generator=torch.Generator().manual_seed(seed)
        ).to(dtype),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 4), max_size=4),
        st.integers(0, 99),
    ),
    max_size=5,
)


@given(tensors)
def test_each_reads_what_the_other_writes(tensors: dict[str, Tensor]) -> None:
    written = b"".join(bytes(memoryview(part).cast("B")) for part in encode(tensors))
    assert equal(safetensors.torch.load(written), tensors)
    assert equal(ours(safetensors.torch.save(tensors)), tensors)
    assert equal(ours(written), tensors)


@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from(list(b'{}[]":,0123456789-. eEfFIU\\\x00\xff'))),
        min_size=1,
        max_size=4,
    )
)
def test_a_file_that_we_accept_the_library_reads_equally(changes: list[tuple[int, int]]) -> None:
    data = bytearray(safetensors.torch.save({"ids": torch.arange(3), "rows": torch.ones(3, 2)}))
    for at, byte in changes:
        data[at % len(data)] = byte
    try:
        found = ours(bytes(data))
    except CheckpointError:
        return
    assert equal(found, safetensors.torch.load(bytes(data)))


def test_tensors_that_the_format_cannot_hold_raise() -> None:
    with pytest.raises(InputError, match="complex64"):
        encode({"x": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(InputError, match="65 dimensions"):
        encode({"x": torch.zeros([1] * 65)})


def test_an_unaligned_tensor_is_read() -> None:
    entries = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "I64", "shape": [1], "data_offsets": [3, 11]},
    }
    found = ours(raw(json.dumps(entries).encode(), b"abc" + (7).to_bytes(8, "little")))
    assert found["b"].tolist() == [7]
