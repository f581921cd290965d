"""validate: what a payload must be, which status each wrong one gets, and that memory is a block."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalith.errors import BudgetError
from megalith.gather.payload_schema import PayloadSchema, TableSpec
from megalith.gather.plan import Fault, Status
from megalith.gather.validate import least_work_bytes, validate
from megalith.ops.matrix_chunks import pack_codes, pack_indices, unpack_codes, unpack_indices
from megalith.storage import bodies
from megalith.storage.bodies import Ledger, MemoryBody
from tests.gather import naive
from tests.gather.support import checked, forged, opened, peer_bytes, peer_update, plan_of, small_schema

SCHEMA = small_schema(users=3)
DATA = peer_bytes(SCHEMA, 7)


def fault(data: bytes, schema: PayloadSchema = SCHEMA, **expected: Any) -> Fault:
    with pytest.raises(Fault) as caught:
        checked(data, schema, expected.pop("uid", 7), **expected)
    return caught.value


def indices(number: int = 0) -> Tensor:
    return unpack_indices(peer_update(SCHEMA, 7).parameters[number].indices, SCHEMA.parameters[number].keep)


def codes(number: int = 0) -> Tensor:
    spec = SCHEMA.parameters[number]
    return unpack_codes(peer_update(SCHEMA, 7).parameters[number].codes, spec.keep, spec.bits)


def test_a_good_payload_passes_with_its_norms() -> None:
    found, reference = checked(DATA, SCHEMA, 7), naive.read(DATA)
    expected = [naive.norm(reference.parameters[spec.name]) for spec in SCHEMA.parameters]
    assert list(found.norms[:-1]) == expected
    assert found.norms[-1] == pytest.approx(naive.table_norm(reference.tables["users"][1]), rel=1e-14)
    assert found.header.label.global_step == 107


@given(st.integers(1, 10_000))
def test_blocks_change_nothing(work_bytes: int) -> None:
    whole, parts = checked(DATA, SCHEMA, 7), checked(DATA, SCHEMA, 7, work_bytes=work_bytes)
    assert whole.norms == parts.norms


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"uid": 8}, "is of uid 7, not 8"),
        ({"window": 4}, "is of window 3, not 4"),
        ({"run": "other"}, "is of run 'run-a', not 'other'"),
    ],
)
def test_a_payload_for_somewhere_else_is_refused(expected: dict[str, Any], message: str) -> None:
    found = fault(DATA, **expected)
    assert (found.status, found.detail) == (Status.INVALID_SCHEMA, message)


def test_a_payload_of_another_model_is_refused() -> None:
    first, *rest = SCHEMA.parameters
    others = {
        "lacks 'more'": PayloadSchema((first, *rest, replace(first, name="more")), SCHEMA.tables),
        "has 'linear.weight', which the model lacks": PayloadSchema(tuple(rest), SCHEMA.tables),
        "the model as": PayloadSchema((replace(first, keep=4), *rest), SCHEMA.tables),
        "other tables": PayloadSchema(SCHEMA.parameters, (TableSpec("users", 4),)),
        "another order": PayloadSchema((*rest, first), SCHEMA.tables),
    }
    for message, schema in others.items():
        found = fault(DATA, schema)
        assert found.status is Status.INVALID_SCHEMA
        assert message in found.detail


def test_indices_ascend_and_stay_in_their_chunk() -> None:
    good = indices()
    repeated, high, swapped = good.clone(), good.clone(), good.clone()
    repeated[3, 1] = repeated[3, 0]
    high[2, -1] = SCHEMA.parameters[0].size
    swapped[1, :2] = good[1, [1, 0]]
    for wrong, message in ((repeated, "repeat"), (high, "not below 64"), (swapped, "do not ascend")):
        found = fault(forged(SCHEMA, 7, indices=pack_indices(wrong)))
        assert found.status is Status.INVALID_INDEX
        assert message in found.detail


def test_bits_that_mean_nothing_are_zero() -> None:
    number = next(i for i, spec in enumerate(SCHEMA.parameters) if spec.keep % 2)
    packed = peer_update(SCHEMA, 7).parameters[number]
    stray = packed.indices.clone()
    stray[0, -1] |= 0x80
    assert fault(forged(SCHEMA, 7, number, indices=stray)).status is Status.INVALID_INDEX
    stray = packed.codes.clone()
    stray[0, -1] |= 0x80
    assert fault(forged(SCHEMA, 7, number, codes=stray)).status is Status.INVALID_VALUE


def test_codes_have_values() -> None:
    schema = small_schema(bins=5)
    spec = schema.parameters[0]
    wrong = unpack_codes(peer_update(schema, 7).parameters[0].codes, spec.keep, 4).clone()
    wrong[0, 0] = 5
    found = fault(forged(schema, 7, codes=pack_codes(wrong, 4)), schema)
    assert (found.status, found.detail) == (Status.INVALID_VALUE, "'linear.weight': a code is not below 5")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2e6, -1.1e6])
def test_values_are_finite_and_bounded(value: float) -> None:
    lookup = torch.tensor([0.0, value, 0.0, 0.0])
    assert fault(forged(SCHEMA, 7, lookup=lookup)).status is Status.INVALID_VALUE
    rows = torch.zeros(12, 3)
    rows[5, 1] = value
    assert fault(forged(SCHEMA, 7, rows=rows)).status is Status.INVALID_VALUE


def test_table_ids_ascend_across_blocks() -> None:
    schema = PayloadSchema((), (TableSpec("wide", 1 << 15),))
    rows = torch.zeros(5, 1 << 15)
    assert checked(forged(schema, 7, ids=torch.arange(5), rows=rows), schema, 7).norms == (0.0,)
    for wrong in ([0, 1, 1, 2, 3], [0, 1, 2, 2, 3], [4, 3, 2, 1, 0], [0, 5, -1, 6, 7]):
        found = fault(forged(schema, 7, ids=torch.tensor(wrong), rows=rows), schema)
        assert (found.status, found.detail) == (
            Status.INVALID_INDEX,
            "table 'wide': ids repeat or do not ascend",
        )


def test_a_wrong_digest_goes_before_what_the_bytes_say() -> None:
    sections = opened(DATA).header.parameters[0].offset
    for at in (sections, len(DATA) - 1, sections + 200):
        damaged = bytearray(DATA)
        damaged[at] ^= 0xFF
        assert fault(bytes(damaged)).status is Status.CORRUPT


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_every_changed_byte_is_noticed(at: int, change: int) -> None:
    damaged = bytearray(DATA)
    damaged[at] ^= change
    assert fault(bytes(damaged)).status is Status.CORRUPT


@given(st.integers(0, 2**32 - 1), st.data())
@settings(max_examples=200)
def test_forged_sections_are_faults_or_pass(seed: int, data: st.DataObject) -> None:
    """Digests fit, contents are noise: a status, or values within bounds; nothing else."""
    make = torch.Generator().manual_seed(seed)
    number = data.draw(st.integers(0, len(SCHEMA.parameters) - 1))
    part = data.draw(st.sampled_from(["indices", "codes", "lookup"]))
    packed = peer_update(SCHEMA, 7).parameters[number]
    good: Tensor = getattr(packed, part)
    noise = torch.randint(0, 256, (good.numel() * good.element_size(),), generator=make, dtype=torch.uint8)
    share = data.draw(st.sampled_from([0.02, 1.0]))
    raw = good.contiguous().view(torch.uint8).flatten()
    mixed = torch.where(torch.rand(raw.shape, generator=make) < share, noise, raw)
    changed = mixed.view(good.dtype).view(good.shape)
    payload = forged(SCHEMA, 7, number, **{part: changed})
    with suppress(Fault):
        found = checked(payload, SCHEMA, 7)
        assert all(math.isfinite(norm) for norm in found.norms)
        for p in naive.read(payload).parameters.values():
            assert all(row == sorted(set(row)) and row[-1] < p.size for row in p.indices)
            assert all(code < p.bins for row in p.codes for code in row)


def test_memory_is_a_block_whatever_the_size() -> None:
    peaks = []
    for lines in (1024, 8192):
        schema = PayloadSchema.of({"w": torch.zeros(lines, 64)}, chunk=8, keep=8)
        ledger = Ledger(1 << 20, "test")
        body, plan = MemoryBody(peer_bytes(schema, 1)), plan_of(schema, [1])
        validate(body, schema, plan, 1, ledger=ledger, work_bytes=10_000)
        peaks.append(ledger.peak)
        assert ledger.used == 0
    assert (
        peaks[0]
        == peaks[1]
        <= least_work_bytes(PayloadSchema.of({"w": torch.zeros(8192, 64)}, chunk=8, keep=8))
    )


def test_a_ledger_refuses_what_its_budget_does_not_allow() -> None:
    ledger = Ledger(100, "the update")
    with ledger.hold(60, "a tile"):
        with pytest.raises(BudgetError, match=re.escape("the update: a sum takes 41 bytes, but 60 bytes of")):
            ledger.take(41, "a sum")
        ledger.take(40, "a sum")
        ledger.give(40)
    assert (ledger.used, ledger.peak) == (0, 100)


def test_freed_memory_is_returned_before_it_and_what_is_used_exceed_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    returned: list[int] = []
    ledger = Ledger(100, "the update", freed=30)
    monkeypatch.setattr(bodies, "return_freed_memory", lambda: returned.append(ledger.used))
    ledger.take(70, "a tile")
    assert returned == []
    ledger.give(70)
    with ledger.hold(1, "a sum"):
        assert returned == [0]
        for _ in range(5):
            with ledger.hold(33, "a tile"):
                pass
    assert returned == [0, 1]
