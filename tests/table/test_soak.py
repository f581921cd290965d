"""A long life of a large table: millions of rows come, are trained and go. Run by `make soak`."""

from __future__ import annotations

import pytest
import torch

from megalith import SGD, Table, TableConfig, Zeros

ROUNDS, CALL = 400, 50_000


@pytest.mark.soak
def test_every_id_keeps_its_own_sum_through_growth_and_removal() -> None:
    table = Table(TableConfig("t", dim=1, optimizer=SGD(1.0), initializer=Zeros()))
    generator = torch.Generator().manual_seed(0)
    expected = torch.zeros(8_000_000)
    present = torch.zeros(8_000_000, dtype=torch.bool)
    scatter = 0x9E3779B97F4A7C15 - (1 << 64)  # ids all over the 64-bit range
    for step in range(ROUNDS):
        picked = torch.randint(0, 20_000 * (step + 1), (CALL,), generator=generator)
        table.apply_gradients(picked * scatter, torch.full((CALL, 1), -1.0), step=step)
        expected.index_add_(0, picked, torch.ones(CALL))
        present[picked] = True
        if step % 5 == 4:
            gone = picked[: CALL // 2]
            assert table.remove(gone * scatter) == gone.unique().numel()
            expected[gone] = 0.0
            present[gone] = False
    assert len(table) == int(present.sum())
    for ids in torch.arange(8_000_000).split(1_000_000):
        assert torch.equal(table.lookup(ids * scatter).flatten(), expected[ids])
        assert torch.equal(table.find(ids * scatter) >= 0, present[ids])
