"""Bits to bytes and back; tensors to chunks and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith.errors import InputError
from megalith.gather.payload_schema import ParameterSpec, PayloadSchema
from megalith.ops.matrix_chunks import (
    as_matrix,
    forward_dct,
    from_chunks,
    inverse_dct,
    pack_codes,
    pack_indices,
    to_chunks,
    unpack_codes,
    unpack_indices,
)
from tests.gather import naive


def test_two_indices_fill_three_bytes() -> None:
    packed = pack_indices(torch.tensor([[0xABC, 0x123]]))
    assert packed.tolist() == [[0xBC, 0x3A, 0x12]]


@given(st.integers(0, 5), st.integers(1, 9), st.integers(0, 2**31))
def test_indices_come_back(rows: int, keep: int, seed: int) -> None:
    indices = torch.randint(0, 4096, (rows, keep), generator=torch.Generator().manual_seed(seed))
    packed = pack_indices(indices)
    assert packed.shape == (rows, -(-12 * keep // 8))
    assert torch.equal(unpack_indices(packed, keep).long(), indices)
    for row, line in enumerate(packed):
        assert naive.numbers(bytes(line.tolist()), 12, keep) == indices[row].tolist()


@given(st.integers(0, 5), st.integers(1, 9), st.sampled_from([2, 4, 8]), st.integers(0, 2**31))
def test_codes_come_back(rows: int, keep: int, bits: int, seed: int) -> None:
    codes = torch.randint(0, 1 << bits, (rows, keep), generator=torch.Generator().manual_seed(seed))
    packed = pack_codes(codes.to(torch.uint8), bits)
    assert packed.shape == (rows, -(-bits * keep // 8))
    assert torch.equal(unpack_codes(packed, keep, bits).long(), codes)
    for row, line in enumerate(packed):
        assert naive.numbers(bytes(line.tolist()), bits, keep) == codes[row].tolist()


@pytest.mark.parametrize(
    ("shape", "chunk"),
    [
        ((128, 192), (64, 64)),  # the largest divisors up to 64
        ((100, 6), (50, 6)),
        ((130,), (1, 26)),
        ((67,), (1, 64)),  # a prime: padded
        ((3, 5, 7), (3, 35)),
        ((), (1, 1)),
        ((0, 4), (1, 4)),
    ],
)
def test_chunks_of_a_shape(shape: tuple[int, ...], chunk: tuple[int, int]) -> None:
    assert PayloadSchema.of({"w": torch.zeros(shape)}).parameters[0].chunk == chunk


def test_without_padding_a_prime_is_cut_into_single_positions() -> None:
    (spec,) = PayloadSchema.of({"w": torch.zeros(67)}, padding=False).parameters
    assert (spec.chunk, spec.rows, spec.keep) == ((1, 1), 67, 1)


def test_keep_is_even_and_fits_the_chunk() -> None:
    keeps = {
        n: PayloadSchema.of({"w": torch.zeros(n)}, keep=64).parameters[0].keep for n in (1, 2, 3, 63, 64)
    }
    assert keeps == {1: 1, 2: 2, 3: 2, 63: 62, 64: 64}


def test_schema_digest_tells_models_apart() -> None:
    a = PayloadSchema.of({"w": torch.zeros(8, 8)})
    assert a.digest == PayloadSchema.of({"w": torch.ones(8, 8)}).digest
    others = [
        PayloadSchema.of({"v": torch.zeros(8, 8)}),
        PayloadSchema.of({"w": torch.zeros(8, 4)}),
        PayloadSchema.of({"w": torch.zeros(8, 8)}, keep=8),
        PayloadSchema.of({"w": torch.zeros(8, 8)}, bins=16),
        PayloadSchema.of({"w": torch.zeros(8, 8)}, dct=True),
        PayloadSchema.of({"w": torch.zeros(8, 8)}, tables={"t": 4}),
    ]
    assert len({a.digest, *(other.digest for other in others)}) == 7


def test_schema_says_what_cannot_be() -> None:
    with pytest.raises(InputError, match="only floating point can be sent"):
        PayloadSchema.of({"w": torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(InputError, match="keep must be an integer from 1 to 4"):
        ParameterSpec("w", (4,), (1, 4), 5)
    with pytest.raises(InputError, match="same name"):
        PayloadSchema((ParameterSpec("w", (4,), (1, 4), 2), ParameterSpec("w", (4,), (1, 4), 2)))


shapes = st.sampled_from([(8, 12), (7, 5), (13,), (), (2, 3, 4), (1, 9), (9, 1), (0,), (5, 0)])


@given(shapes, st.integers(1, 6), st.booleans())
def test_chunks_come_back(shape: tuple[int, ...], chunk: int, padding: bool) -> None:
    tensor = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.float32)
    tensor = tensor[: torch.Size(shape).numel()].reshape(shape)
    (spec,) = PayloadSchema.of({"w": tensor}, chunk=chunk, padding=padding).parameters
    assert as_matrix(tensor).shape == spec.matrix
    chunks = to_chunks(as_matrix(tensor), spec.chunk)
    assert chunks.shape == (spec.rows, spec.size)
    assert torch.equal(from_chunks(chunks, spec.matrix, spec.chunk).reshape(shape), tensor)


@pytest.mark.parametrize("shape", [(8, 8), (6, 10), (12,), (7, 64)])
def test_transform_is_orthonormal_and_invertible(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    (spec,) = PayloadSchema.of({"w": tensor}, dct=True).parameters
    chunks = to_chunks(as_matrix(tensor), spec.chunk)
    there = forward_dct(chunks, spec.chunk)
    torch.testing.assert_close(there.norm(), chunks.norm())
    torch.testing.assert_close(inverse_dct(there, spec.chunk), chunks, atol=1e-5, rtol=1e-5)
    height, width = spec.chunk
    expected = naive.basis(height) @ chunks[0].view(height, width).double().numpy() @ naive.basis(width).T
    torch.testing.assert_close(
        there[0].view(height, width).double(), torch.from_numpy(expected), atol=1e-5, rtol=1e-5
    )
