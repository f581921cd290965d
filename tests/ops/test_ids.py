"""Ids: published hash values, the same hash for every container, and slots of fids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith.errors import InputError
from megalith.hashing import hash_bytes, hash_strings, hash_strings_reference
from megalith.ops.ids import fid, fid_v1_to_v2, slot_of
from megalith.routing import mix
from tests.fixed_examples import fixed_examples

# Of the bytes 1, 8, 15, ... (mod 256), by length; made by python-xxhash 4.1.0.
SEED = 0x9E3779B97F4A7C15
VECTORS = {
    0: (0xEF46DB3751D8E999, 0xC4349FC93C010000),
    1: (0x8A4127811B21E730, 0x32888F619F930A8F),
    3: (0xB6E6C910C2FD373A, 0xAC68126D7ACFCE15),
    4: (0x22EDA2CF6AF4C124, 0xD8D778DED6EE56B4),
    7: (0x34084D91A233A751, 0x320E869C7A22C2BA),
    8: (0xC6F1803A5E0B3222, 0x81C06E0C87CA2C12),
    14: (0xFF34EE32A5C9ECFE, 0xABC4AAC3E9F9721E),
    31: (0x6AB1C40E29F50073, 0x407E1B0246AA4C89),
    32: (0x5A0756FBE9ECD3D1, 0x0FDBC75CBF63F5BD),
    33: (0xDC50CDC37BB9C183, 0x199870762697AE29),
    64: (0x90083DA9CDB9D795, 0x93205AFC5DF112B2),
    100: (0xD248BFC5208B0B16, 0x8D818C65AB873D61),
}
WORDS = {
    "": 0xEF46DB3751D8E999,
    "a": 0xD24EC4F1A98C6E5B,
    "user:42": 0xDC1FEA7DA8D2D1C2,
    "héllo": 0x3BD06310388EBBE4,
    "日本語": 0x7179A19F3719F5E1,
}
STRINGS = st.lists(st.one_of(st.text(max_size=40), st.binary(max_size=70)), max_size=20)
SEEDS = st.one_of(st.just(0), st.integers(0, 2**64 - 1))

Hash = Callable[..., Tensor]


@pytest.fixture(params=[hash_strings, hash_strings_reference], ids=["fast", "reference"])
def hashing(request: pytest.FixtureRequest) -> Hash:
    function: Hash = request.param
    return function


def unsigned(x: Tensor) -> list[int]:
    return [value % 2**64 for value in x.tolist()]


# ---- strings


def test_published_values(hashing: Hash) -> None:
    strings = [bytes((i * 7 + 1) % 256 for i in range(n)) for n in VECTORS]
    assert unsigned(hashing(strings)) == [plain for plain, _ in VECTORS.values()]
    assert unsigned(hashing(strings, seed=SEED)) == [seeded for _, seeded in VECTORS.values()]


def test_words(hashing: Hash) -> None:
    assert unsigned(hashing(list(WORDS))) == list(WORDS.values())
    assert unsigned(hashing(tuple(word.encode() for word in WORDS))) == list(WORDS.values())
    assert (
        unsigned(hashing(["a", b"a", "héllo", "héllo".encode()])) == [WORDS["a"]] * 2 + [WORDS["héllo"]] * 2
    )
    assert hashing(["a"]).dtype == torch.int64
    assert unsigned(hashing(["a"], seed=2**64 - 1)) == [0x60C43759873ECE62]


@fixed_examples(40)
@given(strings=STRINGS, seed=SEEDS)
def test_fast_and_reference_agree(strings: list[str | bytes], seed: int) -> None:
    assert torch.equal(hash_strings(strings, seed=seed), hash_strings_reference(strings, seed=seed))


def test_without_native_code_the_references_hash_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.hashing.native_module", lambda: None)
    assert unsigned(hash_strings(list(WORDS))) == list(WORDS.values())
    assert hash_strings([]).shape == (0,)


@pytest.mark.parametrize(
    "array",
    [
        np.array([["a", ""], ["user:42", "héllo"]]),
        np.array([["a", ""], ["user:42", "héllo"]], dtype=object),
        np.array([[b"a", b""], [b"user:42", "héllo".encode()]]),
        np.array([["a", b""], [b"user:42", "héllo"]], dtype=object),
        np.array([["a", "user:42"], ["", "héllo"]]).T,
    ],
    ids=["str", "object", "bytes", "mixed", "transposed"],
)
def test_numpy_arrays_keep_their_shape(array: Any, hashing: Hash) -> None:
    hashes = hashing(array)
    assert hashes.shape == (2, 2)
    assert unsigned(hashes.view(-1)) == [WORDS[word] for word in ("a", "", "user:42", "héllo")]


def test_empty_input(hashing: Hash) -> None:
    for nothing in ([], (), np.array([]), np.array([], dtype=object)):
        assert hashing(nothing).tolist() == []
    assert hashing(np.zeros((0, 3), dtype="U1")).shape == (0, 3)


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        ("user:42", r"is a single string; pass a list: \[string\]"),
        (["a", None], r"strings\[1\] must be a str or bytes, got NoneType: None"),
        (["a", "\ud800"], r"strings\[1\] cannot be encoded as UTF-8"),
        (np.array(["a", None], dtype=object), r"strings\[1\] must be a str or bytes, got NoneType"),
        (np.array([1, 2]), "must be an array of str or bytes, got int64"),
        ({"a": 1}, "must be a list, a tuple or a numpy array, got dict"),
    ],
)
def test_invalid_strings(strings: Any, message: str, hashing: Hash) -> None:
    with pytest.raises(InputError, match=message):
        hashing(strings)


# ---- strings in one buffer

DATA = b"..auser:42"
OFFSETS = torch.tensor([2, 3, 3, 10])
HASHES = [WORDS["a"], WORDS[""], WORDS["user:42"]]


@pytest.mark.parametrize("data", [DATA, bytearray(DATA), memoryview(DATA), np.frombuffer(DATA, np.int8)])
def test_strings_in_any_buffer(data: Any) -> None:
    assert unsigned(hash_bytes(data, OFFSETS)) == HASHES
    assert unsigned(hash_bytes(data, OFFSETS.int())) == HASHES
    assert unsigned(hash_bytes(data, torch.stack([OFFSETS, OFFSETS], 1)[:, 0])) == HASHES
    assert hash_bytes(data, OFFSETS[:1]).shape == (0,)
    assert torch.equal(hash_bytes(data, OFFSETS[:2], seed=9), hash_strings(["a"], seed=9))


@pytest.mark.parametrize(
    ("data", "offsets", "message"),
    [
        (DATA, torch.tensor([-1, 3]), "must ascend within 0 .. 10"),
        (DATA, torch.tensor([0, 11, 10]), "must ascend within"),
        (DATA, torch.tensor([0, 2**62, -(2**62), 10]), "must ascend within"),
        (DATA, torch.tensor([[0, 1]]), r"must be \[n \+ 1\] on the CPU, got \[1, 2\]"),
        (DATA, torch.zeros(2, dtype=torch.int64, device="meta"), "on the CPU, got .* on meta"),
        (DATA, torch.tensor([0.0, 1.0]), "int64 or int32 tensor"),
        ("text", torch.tensor([0, 1]), "data must be bytes or a contiguous buffer, got str"),
        (np.zeros((4, 4), np.uint8)[:, ::2], torch.tensor([0, 1]), "contiguous"),
    ],
)
def test_invalid_offsets(data: Any, offsets: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        hash_bytes(data, offsets)


# ---- slots

SLOTS = st.one_of(st.sampled_from([0, 1, 32767]), st.integers(0, 32767))
IDS = st.one_of(st.sampled_from([0, 2**48 - 1, 2**48, -1, -(2**63)]), st.integers(-(2**63), 2**63 - 1))


def test_a_fid_is_the_slot_before_the_id() -> None:
    assert fid(1, 2) == 0x0001_0000_0000_0002
    assert fid(32767, 2**48 - 1) == 2**63 - 1
    assert fid(0, 0) == 0
    assert fid(3, torch.tensor([0, 5])).tolist() == [3 << 48, 3 << 48 | 5]
    assert fid(torch.tensor([1, 2]), 5).tolist() == [1 << 48 | 5, 2 << 48 | 5]
    assert fid(np.int64(1), np.int32(2)) == fid(1, 2)  # type: ignore[call-overload]


def test_ids_beyond_48_bits_are_folded() -> None:
    mixed = int(mix(torch.tensor(2**48))) % 2**48
    assert fid(7, 2**48) == 7 << 48 | mixed
    assert fid(7, torch.tensor([2**48])).tolist() == [7 << 48 | mixed]
    assert fid(7, -1) == fid(7, 2**64 - 1) != fid(7, 2**48 - 1)
    hashed = hash_strings([f"user:{i}" for i in range(1000)])
    assert fid(7, hashed).unique().numel() == 1000


@fixed_examples(40)
@given(slot=SLOTS, ids=st.lists(IDS, min_size=1, max_size=8))
def test_ints_and_tensors_agree_and_slots_come_back(slot: int, ids: list[int]) -> None:
    tensor = torch.tensor(ids)
    wanted = [fid(slot, i) for i in ids]
    assert all(0 <= each < 2**63 and slot_of(each) == slot for each in wanted)
    assert fid(slot, tensor).tolist() == wanted
    assert fid(torch.tensor(slot), tensor).tolist() == wanted
    assert fid(torch.full((len(ids),), slot, dtype=torch.int32), tensor).tolist() == wanted
    assert slot_of(fid(slot, tensor)).tolist() == [slot] * len(ids)


def test_slots_and_ids_broadcast() -> None:
    out = fid(torch.tensor([[1], [2]], dtype=torch.int32), torch.tensor([3, -4, 5], dtype=torch.int32))
    assert out.dtype == torch.int64
    assert out.tolist() == [[fid(slot, i) for i in (3, -4, 5)] for slot in (1, 2)]
    assert fid(4, torch.empty(0, dtype=torch.int64)).shape == (0,)


def test_the_first_layout_becomes_the_second() -> None:
    first = (1023 << 54) | (2**54 - 1)
    second = (1023 << 48) | (2**48 - 1)
    assert fid_v1_to_v2(first) == second
    assert fid_v1_to_v2(-1) == second
    assert fid_v1_to_v2((5 << 54) | 77) == fid(5, 77)
    assert fid_v1_to_v2(torch.tensor([-1, (5 << 54) | 77])).tolist() == [second, fid(5, 77)]
    assert slot_of(fid_v1_to_v2(torch.tensor(-(2**63)))).item() == 512


@pytest.mark.parametrize(
    ("slot", "id", "message"),
    [
        (-1, 0, "slot must be in 0 .. 32767, got -1"),
        (32768, 0, "slot must be in 0 .. 32767, got 32768"),
        (torch.tensor([0, 40000]), 0, "got 40000"),
        (0.5, 0, "slot must be an int or an int64 or int32 tensor, got float"),
        (0, "a", "id must be an int or an int64 or int32 tensor, got str"),
        (0, torch.tensor([0.5]), "id must be an int64 or int32 tensor, got torch.float32"),
        (0, 2**64, "id must fit in 64 bits"),
        (torch.tensor([1, 2]), torch.tensor([1, 2, 3]), r"slot \[2\] and id \[3\] do not broadcast"),
        (
            torch.tensor([1]),
            torch.zeros(1, dtype=torch.int64, device="meta"),
            "slot is on cpu, id is on meta",
        ),
    ],
)
def test_invalid_fids(slot: Any, id: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fid(slot, id)


@pytest.mark.parametrize("function", [slot_of, fid_v1_to_v2])
def test_invalid_fids_for_slots(function: Callable[[Any], Any]) -> None:
    with pytest.raises(InputError, match=f"{function.__name__}: fid must be an int64 or int32 tensor"):
        function(torch.tensor([1.0]))
    with pytest.raises(InputError, match=f"{function.__name__}: fid must be an int"):
        function(None)
