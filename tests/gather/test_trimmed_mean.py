"""Medians and trimmed means of positions, against plain loops."""

from __future__ import annotations

from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith.gather.reduce import trimmed_mean

SIZE = 6
senders = st.lists(st.dictionaries(st.integers(0, SIZE - 1), st.integers(-8, 8), max_size=SIZE), max_size=7)


def tensors(sent: list[dict[int, int]]) -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.tensor(list(each), dtype=torch.int64), torch.tensor(list(each.values())).float())
        for each in sent
    ]


def expected(sent: list[dict[int, int]], trim: float | None, zeros: bool) -> list[float]:
    found = []
    for place in range(SIZE):
        values = sorted(each.get(place, 0) for each in sent if zeros or place in each)
        cut = 0 if trim is None else int(trim * len(values) + 1e-9)
        kept = values[cut : len(values) - cut]
        found.append(0.0 if not kept else float(median(kept)) if trim is None else sum(kept) / len(kept))
    return found


@given(senders, st.sampled_from([None, 0.0, 0.2, 0.4]), st.booleans())
def test_positions_have_their_middle(sent: list[dict[int, int]], trim: float | None, zeros: bool) -> None:
    found = trimmed_mean(tensors(sent), SIZE, trim=trim, senders=len(sent) if zeros else None)
    assert found.tolist() == pytest.approx(expected(sent, trim, zeros))


@given(senders, st.sampled_from([None, 0.2]))
def test_positions_do_not_depend_on_others(sent: list[dict[int, int]], trim: float | None) -> None:
    whole = trimmed_mean(tensors(sent), SIZE, trim=trim)
    for place in range(SIZE):
        alone = trimmed_mean(tensors([{0: e[place]} if place in e else {} for e in sent]), 1, trim=trim)
        assert alone.tolist() == whole[place : place + 1].tolist()
