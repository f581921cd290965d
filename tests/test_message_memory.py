"""Memory of messages is used again when the last tensor that shares it is freed."""

from __future__ import annotations

import pytest
import torch

from megalith.library import MessageBuffers


@pytest.mark.parametrize("huge_pages", [False, True])
def test_memory_is_used_again(huge_pages: bool) -> None:
    buffers = MessageBuffers(1 << 22, huge_pages=huge_pages)
    first = buffers.new(1 << 20)
    part, place = first[5:], first.data_ptr()
    del first
    second = buffers.new(1 << 20)
    assert second.data_ptr() != place  # a view still has the first one
    del part
    assert buffers.new(1 << 20).data_ptr() == place
    assert buffers.floats(3, 5).shape == torch.Size([3, 5])
    assert buffers.new(1 << 23).numel() == 1 << 23
