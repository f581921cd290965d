"""crc32: the native checksum is zlib's."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith.storage.local_files import crc32
from megalith.storage.store import view_of


@given(data=st.binary(max_size=400), value=st.integers(0, 2**32 - 1), cut=st.integers(0, 400))
def test_it_is_zlibs_and_continues(data: bytes, value: int, cut: int) -> None:
    assert crc32(data, value) == zlib.crc32(data, value)
    assert crc32(data[cut:], crc32(data[:cut])) == zlib.crc32(data)


def test_it_takes_any_contiguous_buffer() -> None:
    tensor = torch.arange(1000, dtype=torch.int32).view(torch.uint8)
    expected = zlib.crc32(tensor.numpy().tobytes())
    for data in (view_of(tensor), tensor.numpy(), bytearray(tensor.numpy()), memoryview(tensor.numpy())):
        assert crc32(data) == expected
    assert crc32(view_of(tensor)[1:]) == zlib.crc32(tensor.numpy().tobytes()[1:])
    with pytest.raises((BufferError, ValueError)):
        crc32(np.zeros((4, 4), np.uint8)[:, ::2])
    with pytest.raises(TypeError):
        crc32("text")
