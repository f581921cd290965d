"""compress: what is sent, how values are coded, what stays in the feedback."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.errors import InputError
from megalith.gather.compress import Compressed, ErrorFeedback, compress, decompress
from megalith.gather.payload import Label
from megalith.gather.payload_schema import PayloadSchema
from megalith.ops.matrix_chunks import quantise, unpack_indices
from tests.gather import naive
from tests.gather.support import RUN, opened, small_schema, table_rows, weights


def kept(compressed: Compressed, number: int) -> torch.Tensor:
    return unpack_indices(compressed.parameters[number].indices, compressed.schema.parameters[number].keep)


def test_largest_magnitudes_of_each_chunk_are_kept_in_ascending_order() -> None:
    schema = PayloadSchema.of({"w": torch.zeros(8)}, chunk=4, keep=2)
    update = {"w": torch.tensor([1.0, -5.0, 2.0, 0.5, 0.1, 0.2, -9.0, 8.0])}
    assert kept(compress(update, schema), 0).tolist() == [[1, 2], [2, 3]]


def test_codes_stand_for_the_mean_of_their_bin() -> None:
    # mean 0, deviation sqrt(20/3); a bin is 6 * deviation / 4 = 3.87 wide: -3 in bin 1, -1 and 1 in 2, 3 in 3
    codes, lookup = quantise(torch.tensor([-3.0, -1.0, 1.0, 3.0]), 4)
    assert codes.tolist() == [1, 2, 2, 3]
    assert lookup.tolist() == [0.0, -3.0, 0.0, 3.0]


def test_equal_values_are_coded_exactly() -> None:
    codes, lookup = quantise(torch.full((5,), 0.25), 16)
    assert lookup[codes.long()].tolist() == [0.25] * 5
    assert quantise(torch.tensor([7.0]), 4)[1][2] == 7.0
    assert quantise(torch.zeros(0, 3), 4)[0].shape == (0, 3)


@settings(max_examples=30)
@given(st.sampled_from([4, 6, 16, 256]), st.booleans(), st.integers(1, 8), st.integers(0, 10**6))
def test_payload_decompresses_to_what_was_compressed(bins: int, dct: bool, keep: int, seed: int) -> None:
    schema = small_schema(bins=bins, dct=dct, keep=keep, users=3)
    compressed = compress(weights(seed), schema, tables={"users": table_rows(seed, 3)})
    data = compressed.to_bytes(Label(RUN, 1, 2))
    payload, reference = opened(data), naive.read(data)
    sent, received = decompress(compressed), decompress(payload)
    for spec in schema.parameters:
        assert torch.equal(sent[spec.name], received[spec.name])
        p = reference.parameters[spec.name]
        chunks = torch.zeros(len(p.indices), p.size)
        for row, (indices, codes) in enumerate(zip(p.indices, p.codes, strict=True)):
            assert indices == sorted(set(indices))
            for index, code in zip(indices, codes, strict=True):
                chunks[row, index] = float(p.lookup[code])
        expected = torch.from_numpy(naive.place(chunks.numpy(), p))
        torch.testing.assert_close(received[spec.name], expected, atol=1e-5, rtol=1e-5)
    ids, rows = reference.tables["users"]
    assert torch.equal(payload.ids(0, 0, len(ids)), torch.from_numpy(ids.copy()))
    assert torch.equal(payload.rows(0, 0, len(ids)), torch.from_numpy(rows.copy()))


def test_feedback_keeps_what_was_not_sent() -> None:
    schema = small_schema()
    feedback = ErrorFeedback(decay=0.5)
    first = compress(weights(1), schema, feedback=feedback)
    left = {name: weights(1)[name] - sent for name, sent in decompress(first).items()}
    for name, tensor in feedback.state_dict().items():
        assert torch.equal(tensor, left[name])
    second = compress(weights(2), schema, feedback=feedback)
    for name, sent in decompress(second).items():
        torch.testing.assert_close(feedback.left[name] + sent, 0.5 * left[name] + weights(2)[name])


def test_feedback_takes_back_what_did_not_arrive() -> None:
    schema, feedback = small_schema(), ErrorFeedback()
    feedback.give_back(compress(weights(1), schema, feedback=feedback))
    for name, tensor in weights(1).items():
        torch.testing.assert_close(feedback.left[name], tensor)


def test_feedback_state_can_be_saved() -> None:
    schema, a, b = small_schema(), ErrorFeedback(), ErrorFeedback()
    compress(weights(1), schema, feedback=a)
    b.load_state_dict({name: tensor.clone() for name, tensor in a.state_dict().items()})
    label = Label(RUN, 1, 2)
    again = [compress(weights(2), schema, feedback=each).to_bytes(label) for each in (a, b)]
    assert again[0] == again[1]


def test_wrong_updates_are_named_before_the_feedback_changes() -> None:
    schema, feedback = small_schema(users=2), ErrorFeedback()
    good = weights()
    bad = {
        "has no update": {k: v for k, v in good.items() if k != "odd"},
        "not in the schema": {**good, "more": torch.zeros(2)},
        r"its schema has floating point \(7, 5\)": {**good, "odd": torch.zeros(5, 7)},
        "not finite": {**good, "odd": torch.full((7, 5), float("nan"))},
    }
    for message, update in bad.items():
        with pytest.raises(InputError, match=message):
            compress(update, schema, feedback=feedback)
    rows = {
        "an id appears twice": (torch.tensor([1, 1]), torch.zeros(2, 2)),
        "rows must have the shape": (torch.tensor([1, 2]), torch.zeros(2, 3)),
        "not finite": (torch.tensor([1]), torch.full((1, 2), float("inf"))),
    }
    for message, pair in rows.items():
        with pytest.raises(InputError, match=message):
            compress(good, schema, tables={"users": pair}, feedback=feedback)
    with pytest.raises(InputError, match="which the schema does not have"):
        compress(good, schema, tables={"items": (torch.tensor([1]), torch.zeros(1, 2))}, feedback=feedback)
    assert not feedback.left
