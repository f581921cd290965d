"""Router: every id has one owner, the same in native code and plain torch, whatever its sign or type."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith import Router
from megalith.errors import InputError
from megalith.routing import MODES, mix

EDGES = [0, 1, -1, 2, -2, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 2**62, -(2**62)]
IDS = st.lists(st.one_of(st.sampled_from(EDGES), st.integers(-(2**63), 2**63 - 1)), max_size=40)
SHARDS = st.one_of(st.integers(1, 17), st.sampled_from([255, 256, 257, 2**31 - 2]))


def unsigned(x: int) -> int:
    return x % 2**64


def murmur(x: int) -> int:
    x ^= x >> 33
    x = x * 0xFF51AFD7ED558CCD % 2**64
    x ^= x >> 33
    x = x * 0xC4CEB9FE1A85EC53 % 2**64
    return x ^ x >> 33


def make(mode: str, shards: int, *, skip_first: bool = False, block: int = 10) -> Router:
    if mode == "continuous":
        return Router(mode, shards, block_size=block, skip_first=skip_first)
    return Router(mode, shards, skip_first=skip_first)


def test_golden_hashes() -> None:
    golden = {
        0: 0x0,
        1: 0xB456BCFC34C2CB2C,
        7: 0x740729CBE468D1DD,
        8: 0x46ABCCA593A3C687,
        12345: 0x17D2ABFBF90BAEF9,
    }
    mixed = mix(torch.tensor(list(golden))).tolist()
    assert [unsigned(x) for x in mixed] == list(golden.values())


@given(ids=IDS, shards=SHARDS, mode=st.sampled_from(MODES), skip=st.booleans(), block=st.integers(1, 2**31))
def test_native_and_reference_follow_the_formula(
    ids: list[int], shards: int, mode: str, skip: bool, block: int
) -> None:
    shards += skip
    owners = shards - skip
    router = make(mode, shards, skip_first=skip, block=block)
    tensor = torch.tensor(ids, dtype=torch.int64)

    def expected(u: int) -> int:
        if mode == "hash_roundrobin":
            return murmur(u) % owners + skip
        if mode == "continuous" and u < block * owners:
            return u // block + skip
        return u % owners + skip

    wanted = [expected(unsigned(i)) for i in ids]
    assert router.owner(tensor).tolist() == wanted
    assert router.owner_reference(tensor).tolist() == wanted
    assert router.owner(tensor).dtype == torch.int32


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shards", [2, 3, 5, 6, 8])
def test_an_id_routes_alike_as_int32_and_int64(mode: str, shards: int) -> None:
    ids = torch.randint(-(2**31), 2**31 - 1, (2000,), dtype=torch.int32)
    router = make(mode, shards)
    assert torch.equal(router.owner(ids), router.owner(ids.long()))


@given(ids=IDS, shards=st.integers(1, 9), block=st.integers(1, 50))
def test_owner_and_local_index_identify_an_id(ids: list[int], shards: int, block: int) -> None:
    router = Router("continuous", shards, block_size=block)
    tensor = torch.tensor(sorted({*ids, *range(200)}), dtype=torch.int64)
    places = set(zip(router.owner(tensor).tolist(), router.local_index(tensor).tolist(), strict=True))
    assert len(places) == tensor.numel()


# ---- a pattern and thresholds of DynamicEmb's own tests


# ---- remainders without a division

HARD = [*EDGES, *(s * 2**k + d for k in (31, 32, 33, 61, 62) for s in (1, -1) for d in (-1, 0, 1))]


@pytest.mark.parametrize(
    "owners", [range(1, 301), [2**k + d for k in range(9, 31) for d in (-1, 0, 1)], [2**31 - 1]]
)
def test_remainders_are_exact(owners: Iterable[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    some = torch.randint(-(2**63), 2**63 - 1, (40,), generator=generator).tolist()
    for n in owners:
        top = 2**64 // n * n  # the last multiples: where a rounded reciprocal goes wrong first
        ids = [
            *HARD,
            *some,
            *(x - 2**64 if x >= 2**63 else x for x in (top - 1, top - n, top - n - 1, n, n - 1)),
        ]
        owner = Router("roundrobin", n).owner(torch.tensor(ids))
        assert owner.tolist() == [unsigned(x) % n for x in ids], n


@pytest.mark.parametrize("block", [1, 2, 3, 7, 641, 2**31 - 1, 2**31 + 1, 2**40 + 1, 2**60 - 1])
def test_blocks_are_exact(block: int) -> None:
    router = Router("continuous", 7, block_size=block)
    ids = sorted({k * block + d for k in range(9) for d in (-1, 0, 1)} | {2**63 - 1, -(2**63), -1})
    ids = [x for x in ids if x < 2**63]
    wanted = [u // block if u < 7 * block else u % 7 for u in map(unsigned, ids)]
    assert router.owner(torch.tensor(ids)).tolist() == wanted
    assert router.owner_reference(torch.tensor(ids)).tolist() == wanted


def test_threads_do_not_show(restore_threads: None) -> None:
    ids = torch.randint(-(2**63), 2**63 - 1, (200_000,), generator=torch.Generator().manual_seed(0))
    router = Router("hash_roundrobin", 7)
    expected = router.owner_reference(ids)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(router.owner(ids), expected)


def test_shapes_strides_empty_ids_and_equality() -> None:
    router = Router("roundrobin", 3)
    ids = torch.arange(12).view(3, 4)
    assert router.owner(ids.t()).tolist() == (ids.t() % 3).tolist()
    assert router.owner(torch.empty(0, dtype=torch.int64)).shape == (0,)
    assert router == Router("roundrobin", 3) != Router("roundrobin", 4)
    assert repr(Router("continuous", 4, block_size=100)) == "Router('continuous', 4, block_size=100)"
    assert Router("roundrobin", 7).owner(torch.tensor([-1])).tolist() == [(2**64 - 1) % 7]


def test_unknown_modes_and_ids_of_another_type_raise() -> None:
    with pytest.raises(ValueError, match=r"'modulo'.*continuous, roundrobin, hash_roundrobin"):
        Router("modulo", 2)

    with pytest.raises(InputError, match="ids must be"):
        Router("roundrobin", 2).owner(torch.ones(3))
    with pytest.raises(InputError, match="local"):
        Router("roundrobin", 2).local_index(torch.arange(3))


@pytest.mark.parametrize(
    ("mode", "shards", "options"),
    [
        ("roundrobin", 0, {}),
        ("roundrobin", 1, {"skip_first": True}),
        ("roundrobin", True, {}),
        ("roundrobin", 2, {"block_size": 4}),
        ("continuous", 2, {}),
        ("continuous", 2, {"block_size": 0}),
        ("continuous", 2, {"block_size": 2**62}),
    ],
)
def test_sizes_that_make_no_sense(mode: str, shards: int, options: dict[str, int]) -> None:
    with pytest.raises(InputError, match="Router"):
        Router(mode, shards, **options)  # type: ignore[arg-type]
