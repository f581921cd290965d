"""Any batch, split over ranks in any way, trains what LocalShards trains on the joined batch.

Cases are drawn from a seed: tables, optimizers, routers, features, layouts, weights, ids that repeat within
and across ranks, ranks without data, features and tables that some ranks do not have. Every rank draws the
same case, trains the joined batch alone beside its part, and compares the rows it owns.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith import (
    EmbeddingCollection,
    Feature,
    FirstN,
    Layout,
    LocalShards,
    Mean,
    Ragged,
    Router,
    Segment,
    Slice,
    Sqrtn,
    Sum,
    SyncShards,
    TableConfig,
)
from megalith.shards import Shards
from megalith.table import Chunk
from tests.table.support import EXTREME_IDS, OPTIMIZERS, whole

from .ranks import run_ranks

SEEDS = {1: range(8), 2: range(10, 28), 3: range(30, 40), 4: range(50, 64)}
"""By number of ranks."""
Row = tuple[list[int], list[float]]


@dataclass
class Case:
    """What a seed says; `random` is as far along on every rank."""

    seed: int
    ranks: int
    random: random.Random = field(init=False)
    tables: list[TableConfig] = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.tables = [self._table(f"t{k}") for k in range(self.random.randint(1, 4))]

    def _table(self, name: str) -> TableConfig:
        draw = self.random
        segments = [
            Segment(draw.choice([1, 2, 3, 8, 17]), optimizer=draw.choice(list(OPTIMIZERS.values())))
            for _ in range(draw.choice([1, 1, 2]))
        ]
        return TableConfig(name, segments=segments, missing=draw.choice(["initial", "zeros"]))

    def spread(self) -> SyncShards:
        """The tables over ranks."""
        draw = self.random
        skip = self.ranks > 1 and draw.random() < 0.2
        routers = [
            Router("roundrobin", self.ranks, skip_first=skip),
            Router("hash_roundrobin", self.ranks),
            Router("continuous", self.ranks, block_size=draw.choice([1, 3, 100])),
        ]
        per_table = {table.name: draw.choice(routers) for table in self.tables}
        return SyncShards(
            self.tables,
            router=draw.choice([draw.choice(routers), per_table]),
            engine=draw.choice(["cpu", "cpu", "reference"]),
            seed=self.seed,
            transport=draw.choice(["gloo", "auto"]),
            timeout=60.0,
        )

    def alone(self) -> LocalShards:
        """The tables in one process."""
        return LocalShards(self.tables, seed=self.seed)

    def ids(self, most: int) -> list[int]:
        """Ids that repeat, now and then a far one."""
        draw = self.random
        n = draw.randint(0, most)
        return [draw.choice(EXTREME_IDS) if draw.random() < 0.1 else draw.randint(0, 9) for _ in range(n)]

    def floats(self, *shape: int) -> Tensor:
        """Numbers above 0: no sum of them cancels, so its relative error stays small."""
        generator = torch.Generator().manual_seed(self.random.randint(0, 2**31))
        return torch.rand(shape, generator=generator) + 0.1


def close(actual: Tensor, expected: Tensor) -> bool:
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=1e-6, atol=1e-6)


def differing_rows(spread: SyncShards, alone: Shards) -> Iterator[str]:
    """What is not as it is in the joined tables, of the rows that this rank owns."""
    for name, table in alone.local.items():
        expected, got = whole(table), whole(spread.local[name])
        expected = expected.select(spread.router(name).owner(expected.ids) == spread.rank)
        if got.ids.tolist() != expected.ids.tolist() or got.time.tolist() != expected.time.tolist():
            yield f"table {name}: ids or times are {got.ids} {got.time}, not {expected.ids} {expected.time}"
            continue
        for key, a, b in pieces(got, expected):
            if not close(a, b):
                yield f"table {name}: {key} is off by {(a - b).abs().max()}"


def pieces(got: Chunk, expected: Chunk) -> list[tuple[str, Tensor, Tensor]]:
    return [("rows", got.rows, expected.rows)] + [
        (key, got.state[key], expected.state[key]) for key in expected.state
    ]


# ---- collections


@dataclass
class Split:
    """A joined batch, this rank's part of it, and where that part's rows and values begin and end."""

    joined: dict[str, Ragged]
    own: dict[str, Ragged]
    rows: slice
    values: dict[str, slice]


def draw_features(case: Case) -> tuple[list[Feature], list[Layout] | None]:
    draw = case.random
    combiners = [Sum(), Mean(), Sqrtn(), FirstN(draw.randint(1, 3)), None]
    features = []
    for k in range(draw.randint(1, 5)):
        shared, combiner = k > 0 and draw.random() < 0.15, draw.choice(combiners)
        table = draw.choice(case.tables).name
        features.append(Feature(f"f{k}", table, combiner or Sum() if shared else combiner, shared))
    if draw.random() < 0.5 or any(isinstance(f.combiner, FirstN | None) for f in features):
        return features, None
    dims = {table.name: table.dim for table in case.tables}
    slices = [Slice(f.name, 0, dims[f.table]) for f in features]
    first = [Slice(f.name, 0, 1) for f in features]
    kind = draw.choice(["stack", "add", "none"])
    return features, [Layout("all", slices), Layout("first", first, kind=kind)]


def draw_batch(case: Case, features: list[Feature]) -> Split:
    """A batch of up to 8 rows, cut into a part for each rank; some ranks lack features, or everything."""
    draw, rank = case.random, dist.get_rank()
    size = draw.randint(0, 8)
    cuts = [0, *sorted(draw.randint(0, size) for _ in range(case.ranks - 1)), size]
    split = Split({}, {}, slice(cuts[rank], cuts[rank + 1]), {})
    for feature in features:
        weighted = draw.random() < 0.3
        lists = [case.ids(5) for _ in range(1 if feature.shared else size)]
        absent = draw.sample(range(case.ranks), draw.choice([0, 0, 1])) if feature is not features[0] else []
        for gone in absent if case.ranks > 1 and not feature.shared else []:
            lists[cuts[gone] : cuts[gone + 1]] = [[] for _ in range(cuts[gone], cuts[gone + 1])]
        weights = [[draw.uniform(0.5, 1.5) for _ in ids] for ids in lists]
        column = Ragged.from_lists(lists, weights=weights if weighted else None)
        split.joined[feature.name] = column
        part = slice(None) if feature.shared else split.rows
        ends = column.row_splits[[split.rows.start, split.rows.stop]] if not feature.shared else None
        if ends is not None:
            split.values[feature.name] = slice(*ends.tolist())
        if feature.shared or rank not in absent or case.ranks == 1:
            split.own[feature.name] = column[part]
    return split


def outputs_of(result: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors of a collection's result, and the feature whose values (not rows) one lists."""
    found = []
    for name, value in result.items():
        if isinstance(value, Ragged):
            found.append((name, value.values))
        else:
            found += [("", each) for each in (value if isinstance(value, list) else [value])]
    return found


def train_collections(case: Case) -> list[str]:
    draw = case.random
    features, layouts = draw_features(case)
    options: dict[str, Any] = {
        "layouts": layouts,
        "update": draw.choice(["backward", "step"]),
        "reduction": "sum",
        "clip_norm": draw.choice([None, None, 0.5]),
        "clip_value": draw.choice([None, None, 0.8]),
    }
    shards = case.spread()
    spread = EmbeddingCollection(shards, features, **options)
    alone = EmbeddingCollection(case.alone(), features, **options)
    problems = []
    for step in range(draw.randint(1, 3)):
        for number in range(1 if spread.update == "backward" else draw.randint(1, 3)):
            split = draw_batch(case, features)
            joined = outputs_of(alone(split.joined, time=100 + step))
            own = outputs_of(spread(split.own, time=100 + step))
            losses = []
            for (name, whole_output), (_, part) in zip(joined, own, strict=True):
                where = split.values[name] if name else split.rows
                expected = whole_output.detach()[where]
                exact = step == number == 0
                if not (torch.equal(part, expected) if exact else close(part, expected)):
                    problems.append(f"step {step}, forward {number}: another output")
                weight = case.floats(*whole_output.shape)
                losses.append(((whole_output * weight).sum(), (part * weight[where]).sum()))
            sum(a for a, _ in losses).backward()  # type: ignore[union-attr]
            sum(b for _, b in losses).backward()  # type: ignore[union-attr]
        if spread.update == "step":
            spread.step()
            alone.step()
        problems += [f"step {step}: {said}" for said in differing_rows(shards, alone.shards)]
    return problems


# ---- shards

CALLS = ["lookup", "push", "push", "push ids", "assign", "assign_add", "reinitialize", "remove"]


def call_shards(case: Case) -> list[str]:
    """Calls in any order, each rank with its ids; a table may be absent on some ranks, or have no ids."""
    draw, rank = case.random, dist.get_rank()
    spread, alone = case.spread(), case.alone()
    problems = []
    for number in range(8):
        call = draw.choice(CALLS)
        asked: dict[str, list[list[int]]] = {
            table.name: [case.ids(6) for _ in range(case.ranks)] for table in case.tables
        }
        lacking = {(draw.choice(case.tables).name, draw.randrange(case.ranks)) for _ in range(2)}
        own: dict[str, Tensor] = {}
        joined: dict[str, Tensor] = {}
        values: dict[str, tuple[Tensor, slice]] = {}
        for table in case.tables:
            lists = [[] if (table.name, r) in lacking else x for r, x in enumerate(asked[table.name])]
            sizes = [len(ids) for ids in lists]
            begin = sum(sizes[:rank])
            joined[table.name] = torch.tensor(list(chain(*lists)), dtype=torch.int64)
            mine = slice(begin, begin + sizes[rank])
            values[table.name] = case.floats(sum(sizes), table.dim), mine
            if (table.name, rank) not in lacking:
                own[table.name] = joined[table.name][mine]
        numbers = {"step": number, "time": 50.0 + number}
        numbers |= {"scale": draw.choice([1.0, 0.25]), "clip_norm": draw.choice([None, 0.5])}
        for problem in make_call(call, spread, alone, own, joined, values, numbers):
            problems.append(f"call {number}, {call}: {problem}")
        problems += [f"call {number}, {call}: {said}" for said in differing_rows(spread, alone)]
    return problems


def make_call(
    call: str,
    spread: SyncShards,
    alone: LocalShards,
    own: dict[str, Tensor],
    joined: dict[str, Tensor],
    values: dict[str, tuple[Tensor, slice]],
    numbers: dict[str, Any],
) -> Iterator[str]:
    """One call, of this rank's ids and of all together; what differs in their results."""
    all_values = {name: x for name, (x, _) in values.items()}
    parts = {name: x[where] for name, (x, where) in values.items() if name in own}
    if call == "lookup":
        lookup = spread.lookup(own)
        lookup.wait()  # rows travel with the first use; a rank without ids uses none
        got, expected = lookup.rows, alone.lookup(joined).rows
        if not all(close(got[name], expected[name][values[name][1]]) for name in own):
            yield "other rows"
    elif call == "push":
        spread.apply_gradients(spread.lookup(own), parts, **numbers)
        alone.apply_gradients(alone.lookup(joined), all_values, **numbers)
    elif call == "push ids":
        spread.apply_gradients(own, parts, **numbers)
        alone.apply_gradients(joined, all_values, **numbers)
    elif call in ("assign", "assign_add"):
        rows = {name: (own[name], parts[name]) for name in own}
        getattr(spread, call)(rows, time=numbers["time"])
        getattr(alone, call)({n: (joined[n], all_values[n]) for n in joined}, time=numbers["time"])
    elif call == "reinitialize":
        status = spread.reinitialize(own, time=numbers["time"])
        wanted = alone.reinitialize(joined, time=numbers["time"])
        if not all(torch.equal(status[name], wanted[name][values[name][1]]) for name in own):
            yield "another status"
    else:
        removed, wanted_removed = spread.remove(own), alone.remove(joined)
        if any(removed[name] != wanted_removed[name] for name in own):
            yield "another number of removed rows"


def on_a_rank(seeds: range) -> list[str]:
    problems = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="feature .* is not in this rank's batch")
        for seed in seeds:
            for work in (train_collections, call_shards):
                said = work(Case(seed, dist.get_world_size()))
                problems += [f"{work.__name__}, seed {seed}: {each}" for each in said]
    return problems


@pytest.mark.parametrize("ranks", SEEDS)
def test_ranks_train_what_one_process_trains_on_the_joined_batch(ranks: int) -> None:
    for rank, problems in enumerate(run_ranks(on_a_rank, SEEDS[ranks], world_size=ranks)):
        assert problems == [], f"rank {rank}"
