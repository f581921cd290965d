"""A model on EmbeddingCollection and the same model on nn.EmbeddingBag stay the same over 100 steps.

The torch model has a fixed vocabulary (sparse ids are remapped to 0, 1, 2, ...) and the same initial rows;
both have the same dense part under the same torch.optim optimizer. Tolerances: what is read before any
update is equal to the bit for rows of one id; after 100 steps weights, losses and optimizer state are equal
within 1e-5 (relative and absolute), because torch sums duplicate gradients in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith import (
    SGD,
    Adagrad,
    EmbeddingCollection,
    Feature,
    FirstN,
    Mean,
    Normal,
    Ragged,
    Sum,
    TableConfig,
)
from megalith.table import Optimizer

STEPS, BATCH, DIM, WORDS = 100, 16, 6, 40
TOLERANCE: Any = {"rtol": 1e-5, "atol": 1e-5}


def vocabulary(seed: int) -> Tensor:
    """WORDS distinct 64-bit ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (WORDS,), generator=generator)


USERS, ITEMS = vocabulary(1), vocabulary(2)
FEATURES = [
    Feature("user", "user", Sum()),
    Feature("seen", "item", Mean()),
    Feature("target", "item", Sum()),
    Feature("last", "item", FirstN(2)),
]


class OnTorch(nn.Module):
    """The reference: nn.EmbeddingBag over remapped ids."""

    def __init__(self, rows: dict[str, Tensor]) -> None:
        super().__init__()
        self.user = nn.Parameter(rows["user"].clone())
        self.item = nn.Parameter(rows["item"].clone())

    def forward(self, batch: dict[str, Ragged]) -> dict[str, Tensor]:
        bag = nn.functional.embedding_bag
        seen, last = batch["seen"], batch["last"]
        first = last.to_padded(pad=WORDS, length=2)  # the row after the last is zeros
        padded = torch.cat([self.item, torch.zeros(1, DIM)])
        return {
            "user": nn.functional.embedding(batch["user"].values, self.user),
            "seen": bag(seen.values, self.item, seen.row_splits[:-1], mode="mean"),
            "target": nn.functional.embedding(batch["target"].values, self.item),
            "last": padded[first],
        }


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5 * DIM, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, out: dict[str, Tensor]) -> Tensor:
        flat = torch.cat([out[f.name].flatten(1) for f in FEATURES], 1)
        logits: Tensor = self.layers(flat)[:, 0] + (out["user"] * out["target"]).sum(1)
        return logits


def batches() -> list[tuple[dict[str, Ragged], Tensor]]:
    """Remapped ids 0 to WORDS - 1, some rows empty, and labels."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(STEPS):
        columns = {}
        for name, lowest, longest in (("user", 1, 1), ("seen", 0, 5), ("target", 1, 1), ("last", 0, 4)):
            lengths = torch.randint(lowest, longest + 1, (BATCH,), generator=generator)
            values = torch.randint(WORDS, (int(lengths.sum()),), generator=generator)
            columns[name] = Ragged.from_lengths(values, lengths)
        made.append((columns, torch.randint(2, (BATCH,), generator=generator).float()))
    return made


def sparse(batch: dict[str, Ragged]) -> dict[str, Ragged]:
    """The same batch with the ids of the vocabularies."""
    words = {"user": USERS} | dict.fromkeys(("seen", "target", "last"), ITEMS)
    return {name: Ragged(words[name][c.values], c.row_splits) for name, c in batch.items()}


Pair = tuple[Optimizer, Callable[[Any], torch.optim.Optimizer]]
OPTIMIZERS: dict[str, Pair] = {
    "sgd": (SGD(0.5), lambda parameters: torch.optim.SGD(parameters, lr=0.5)),
    "adagrad": (Adagrad(0.05), lambda parameters: torch.optim.Adagrad(parameters, lr=0.05)),
    "adagrad with options": (
        Adagrad(0.2, initial_accumulator_value=0.1, eps=1e-6),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.2, initial_accumulator_value=0.1, eps=1e-6),
    ),
}


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_train_alike(name: str, update: str) -> None:
    ours_optimizer, optimizer = OPTIMIZERS[name]
    tables = [
        TableConfig(t, dim=DIM, optimizer=ours_optimizer, initializer=Normal(0.0, 0.3))
        for t in ("user", "item")
    ]
    ours = EmbeddingCollection(tables, FEATURES, update=update, seed=7)
    words = {"user": USERS, "item": ITEMS}
    initial = {t: ours.shards.lookup({t: ids}).rows[t] for t, ids in words.items()}
    theirs = OnTorch(initial)
    torch.manual_seed(0)
    our_head, their_head = Head(), Head()
    their_head.load_state_dict(our_head.state_dict())
    our_dense = optimizer(our_head.parameters())
    their_all = optimizer([*their_head.parameters(), *theirs.parameters()])

    for number, (batch, labels) in enumerate(batches()):
        our_out, their_out = ours(sparse(batch)), theirs(batch)
        if number == 0:
            for single in ("user", "target", "last"):
                assert torch.equal(our_out[single], their_out[single])
        our_loss = nn.functional.binary_cross_entropy_with_logits(our_head(our_out), labels)
        their_loss = nn.functional.binary_cross_entropy_with_logits(their_head(their_out), labels)
        torch.testing.assert_close(our_loss, their_loss, **TOLERANCE)
        for optimizer_of in (our_dense, their_all):
            optimizer_of.zero_grad()
        our_loss.backward()
        their_loss.backward()
        our_dense.step()
        their_all.step()
        if update == "step":
            ours.step()

    assert ours.global_step == STEPS
    for t, ids in words.items():
        rows = ours.shards.lookup({t: ids}).rows[t]
        expected = theirs.get_parameter(t)
        assert (rows - initial[t]).abs().max() > 0.05  # they went somewhere
        torch.testing.assert_close(rows, expected.detach(), **TOLERANCE)
        if name.startswith("adagrad"):
            (chunk,) = ours.shards.scan(t)
            place = [ids.tolist().index(i) for i in chunk.ids.tolist()]
            torch.testing.assert_close(
                chunk.state["0/sum"], their_all.state[expected]["sum"][place], **TOLERANCE
            )
    for mine, other in zip(our_head.parameters(), their_head.parameters(), strict=True):
        torch.testing.assert_close(mine, other, **TOLERANCE)
