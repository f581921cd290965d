"""The search for low scores on the device chooses the rows of the reference engine's search."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from megalith.table.engines import reference_policies
from megalith.table.engines.cuda import cuda_policies
from megalith.table.engines.cuda.cuda_policies import DeviceVictimSearch, ordered
from megalith.table.engines.reference_policies import VictimSearch


class Rows:
    """A table of scores, of which both searches remove rows."""

    def __init__(self, size: int, chance: random.Random) -> None:
        few = chance.choice([3, 50, 2**64])  # many equal scores, or none
        self.scores = [chance.randrange(few) for _ in range(size)]
        self.live = [chance.random() < 0.9 for _ in range(size)]

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        live = torch.tensor([self.live[row] for row in rows.tolist()], dtype=torch.bool)
        signed = [score - 2**64 if score >= 2**63 else score for score in self.scores]
        scores = torch.tensor([signed[row] for row in rows.tolist()], dtype=torch.int64)
        return live, ordered(scores)


def run(seed: int, calls: int) -> int:
    """Compare the searches of some calls; return the number of removed rows."""
    chance = random.Random(seed)
    table = Rows(chance.choice([5, 40, 300]), chance)
    searches = VictimSearch(), DeviceVictimSearch()
    removed = 0
    for _ in range(calls):
        live = [row for row, used in enumerate(table.live) if used]
        kept = chance.sample(live, chance.randrange(len(live) // 2 + 1)) if live else []
        need = chance.randrange(len(live) - len(kept) + 1)
        need = min(need, chance.choice([1, 5, 300]))
        if not need:
            continue
        expected = searches[0].choose(need, table.live, table.scores, set(kept), len(live))
        chosen = torch.tensor(kept, dtype=torch.int64)
        got = searches[1].choose(need, len(table.live), table.read, chosen, len(live))
        assert got.tolist() == expected
        removed += need
        for row in expected:  # new rows take some of the places, other rows are written
            table.live[row] = chance.random() < 0.7
            table.scores[row] = chance.randrange(2**64)
    return removed


@pytest.mark.parametrize("sample", [4, 2048])
def test_the_rows_of_the_reference(sample: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reference_policies, cuda_policies):
        monkeypatch.setattr(module, "SAMPLE", sample)  # a small one often ends the walk
        monkeypatch.setattr(module, "WALK", 2 if sample == 4 else 64)
    assert sum(run(seed, 12) for seed in range(30)) > 1000


def test_a_call_reads_a_part_of_a_large_table() -> None:
    size, read = 10_000_000, []

    def scored(rows: Tensor) -> tuple[Tensor, Tensor]:
        read.append(rows.numel())
        return torch.ones(rows.numel(), dtype=torch.bool), ordered(rows.long() % 1000)

    search = DeviceVictimSearch()
    for _ in range(5):
        victims = search.choose(100, size, scored, torch.arange(50), size)
        assert victims.unique().numel() == 100
        assert int(victims.min()) >= 50
        assert int((victims % 1000).max()) <= 300
    assert sum(read) < 50_000
