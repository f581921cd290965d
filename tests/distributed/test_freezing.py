"""Freezing over ranks, and features without a gradient: which rows are written, whatever wraps the model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from megalith import SGD, EmbeddingCollection, Feature, LocalShards, TableConfig, Zeros
from megalith.shards import Shards, SyncShards
from tests.distributed.ranks import run_ranks
from tests.distributed.test_micro_steps import WRAPPERS
from tests.table.support import whole

TABLES = [TableConfig(name, dim=4, optimizer=SGD(1.0), initializer=Zeros()) for name in "ab"]
FEATURES = [Feature(name, name) for name in "ab"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = EmbeddingCollection(TABLES, FEATURES)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.embeddings({"a": ids, "b": ids})
        logits: Tensor = self.head(rows["a"] + rows["b"])
        return logits


def ids_of(shards: Shards, table: str = "a") -> list[int]:
    return sorted(whole(shards.local[table]).ids.tolist())


def frozen_and_unfrozen(wrapper: str) -> list[list[int]]:
    """The ids of this rank after steps that are trained, frozen and trained."""
    model = Model()
    if wrapper.startswith(("DDP", "FSDP1")):  # which parameters train is fixed when they wrap
        model.embeddings.requires_grad_(False)
    wrapped = WRAPPERS[wrapper](model)
    optimizer = torch.optim.Adam([p for p in wrapped.parameters() if p.requires_grad], lr=0.01)
    shards = model.embeddings.shards
    seen = []
    for number, frozen in enumerate((True, False, True)):
        model.requires_grad_(not frozen)
        model.head.requires_grad_(True)
        wrapped(torch.arange(4) + 10 * number).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(ids_of(shards))
    return seen


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_rows_are_frozen_and_unfrozen(wrapper: str) -> None:
    own = [[[], [10 + rank, 12 + rank], [10 + rank, 12 + rank]] for rank in range(2)]
    assert run_ranks(frozen_and_unfrozen, wrapper) == own


def ddp_in_eval_mode() -> tuple[list[int], bool]:
    """Under DDP, whose parameters all wait for a gradient, a collection in eval mode is read only."""
    model = Model()
    wrapped = WRAPPERS["DDP"](model)
    model.embeddings.eval()
    for _ in range(3):
        wrapped(torch.arange(4)).sum().backward()
    model.embeddings.train()
    wrapped(torch.arange(2)).sum().backward()
    return ids_of(model.embeddings.shards), bool(model.head.weight.grad is not None)


def test_eval_mode_of_a_collection_under_ddp() -> None:
    assert run_ranks(ddp_in_eval_mode) == [([0], True), ([1], True)]


def trained_and_saved(wrapper: str) -> tuple[list[int], int]:
    """A model whose optimizer has all parameters trains; its state is saved and loaded."""
    model = Model()
    wrapped = WRAPPERS[wrapper](model)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    for number in range(3):
        wrapped(torch.arange(4) + number).sum().backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if not wrapper.startswith("FSDP1"):
        weights, state = get_state_dict(model, optimizer)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return ids_of(model.embeddings.shards), model.embeddings.global_step


@pytest.mark.parametrize("wrapper", sorted(WRAPPERS))
def test_a_wrapped_model_trains_its_rows(wrapper: str) -> None:
    assert run_ranks(trained_and_saved, wrapper) == [([0, 2, 4], 3), ([1, 3, 5], 3)]


def one_output_per_step(update: str) -> list[dict[int, list[float]]]:
    """Rank 0 uses feature a, rank 1 feature b; then both use both."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shards = SyncShards(TABLES) if ranks > 1 else LocalShards(TABLES)
    model = EmbeddingCollection(shards, FEATURES, update="step", reduction="sum")
    for step in range(2):
        for number in range(4):
            if number % ranks != rank:
                continue
            ids = torch.tensor([number, 7])
            out = model({"a": ids, "b": ids + 10})
            used = [out["ab"[number % 2]]] if step == 0 else [out["a"], out["b"]]
            sum(each.sum() * (number + 1) for each in used).backward()  # type: ignore[union-attr]
            if update == "each":
                model.step()
        if update == "once":
            model.step()
    rows = []
    for table in "ab":
        chunk = whole(shards.local[table])
        rows.append(dict(zip(chunk.ids.tolist(), chunk.rows[:, 0].tolist(), strict=True)))
    return rows


@pytest.mark.parametrize("update", ["once", "each"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_only_rows_with_a_gradient_on_some_rank_are_written(update: str, world_size: int) -> None:
    found = run_ranks(one_output_per_step, update, world_size=world_size)
    tables = [{i: v for own in found for i, v in own[table].items()} for table in range(2)]
    # Step 0 writes ids 0 and 2 of a and 11 and 13 of b; step 1 writes all.
    assert tables[0] == {0: -2, 1: -2, 2: -6, 3: -4, 7: -4 - 10}
    assert tables[1] == {10: -1, 11: -4, 12: -3, 13: -8, 17: -6 - 10}


def written_at_first() -> list[list[list[int]]]:
    """What is written if rank 1 uses another output, and if its gradient is that of no row: zeros."""
    written = []
    for rows in (None, 1 - dist.get_rank()):
        model = EmbeddingCollection(TABLES, FEATURES)
        out = model({"a": torch.arange(4), "b": torch.arange(4)})
        out["ab"[dist.get_rank()] if rows is None else "a"][:rows].sum().backward()
        written.append([ids_of(model.shards, table) for table in "ab"])
    return written


def test_ranks_that_use_different_outputs_agree_and_a_gradient_of_zeros_is_a_gradient() -> None:
    first, second = run_ranks(written_at_first)
    assert first == [[[0, 2], [0, 2]], [[0, 2], []]]
    assert second == [[[1, 3], [1, 3]], [[1, 3], []]]
