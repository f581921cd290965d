"""TableLR: torch's schedulers and LR finders change the learning rates of tables."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from megalith import SGD, Table, TableConfig, TableLR, Zeros
from megalith.errors import InputError


def table_of(rate: TableLR) -> Table:
    return Table(TableConfig("user", dim=1, optimizer=SGD(rate), initializer=Zeros()))


def step(table: Table, number: int) -> float:
    """What an update with a gradient of -1 adds to a row."""
    before = float(table.lookup(torch.tensor([7])))
    table.apply_gradients(torch.tensor([7]), -torch.ones(1, 1), step=number)
    return float(table.lookup(torch.tensor([7]))) - before


def test_a_scheduler_of_torch_sets_the_rate_of_the_next_update() -> None:
    rate = TableLR(0.5)
    table, scheduler = table_of(rate), LambdaLR(rate, lambda number: 0.5**number)
    found = []
    for number in range(3):
        found.append(step(table, number))
        rate.step()
        scheduler.step()
    assert found == [0.5, 0.25, 0.125]
    again = TableLR(9.0)
    again.load_state_dict(rate.state_dict())
    assert again() == rate() == 0.0625


def test_one_scheduler_changes_dense_weights_and_tables() -> None:
    rate, dense = TableLR(0.25), nn.Linear(1, 1)
    groups = [{"params": dense.parameters()}, {"params": [rate.parameter], "lr": 0.25}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    rate.follow(optimizer)
    scheduler = OneCycleLR(optimizer, max_lr=[1e-2, 0.5], total_steps=10)
    table = table_of(rate)
    found = []
    for number in range(10):
        dense(torch.ones(1, 1)).sum().backward()
        found.append(step(table, number))
        assert rate() == optimizer.param_groups[1]["lr"]
        optimizer.step()
        if number < 9:
            scheduler.step()
    assert max(found) == pytest.approx(0.5)
    assert found[0] < found[1] < found[2]
    assert found[-1] < 1e-4
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # replaces the param groups
    optimizer.param_groups[1]["lr"] = 0.125
    assert rate() == 0.125


def test_copies_of_a_model_share_the_rate_and_other_processes_get_its_value() -> None:
    rate = TableLR(0.5)
    config = TableConfig("user", dim=1, optimizer=SGD(rate))
    assert copy.deepcopy(config).segments[0].optimizer.lr is rate
    assert pickle.loads(pickle.dumps(rate))() == 0.5


def test_wrong_rates_and_optimizers_to_follow() -> None:
    with pytest.raises(InputError, match="TableLR: lr must be a finite number and not negative, got -1"):
        TableLR(-1)
    with pytest.raises(InputError, match=r"TableLR: follow takes an optimizer with a param group such as"):
        TableLR(0.1).follow(torch.optim.SGD(nn.Linear(1, 1).parameters()))
