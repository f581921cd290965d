"""Any batch, split over ranks in any way, trains what LocalShards trains on the joined batch.

Cases are drawn from a seed: tables, optimizers, routers, features, layouts, weights, ids that repeat within
and across ranks, ranks without data, features and tables that some ranks do not have. Every rank draws the
same case, also trains the whole batch alone, and compares the rows it owns.
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
from tests.distributed.ranks import run_ranks
from tests.table.support import EXTREME_IDS, OPTIMIZERS, whole

SEEDS = {1: range(4), 2: range(10, 19), 3: range(30, 35), 4: range(50, 57)}
MORE_SEEDS = {1: range(4, 8), 2: range(100, 200), 3: range(300, 350), 4: range(500, 550)}
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
            router=draw.choice(routers) if draw.random() < 0.5 else per_table,
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
        "reduction": draw.choice(["sum", "mean"]),
        "clip_norm": draw.choice([None, None, 0.5]),
        "clip_value": draw.choice([None, None, 0.8]),
    }
    parts = case.ranks if options["reduction"] == "mean" else 1  # the loss of one process is their mean
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
                losses.append(((whole_output * weight).sum() / parts, (part * weight[where]).sum()))
            sum(a for a, _ in losses).backward()  # type: ignore[union-attr]
            sum(b for _, b in losses).backward()  # type: ignore[union-attr]
        if spread.update == "step":
            spread.step()
            alone.step()
        problems += [f"step {step}: {said}" for said in differing_rows(shards, alone.shards)]
    return problems


# ---- shards

CALLS = ["lookup", "push", "push", "push ids", "assign", "assign_add", "reinitialize", "remove"]


@dataclass
class Given:
    """What the ranks bring to a call, by table: ids and values of all in rank order, where this rank's are,
    which are pushed where gradients are, and the tables this rank looks up but has no gradients for."""

    ids: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    mine: dict[str, slice] = field(default_factory=dict)
    pushed: dict[str, Tensor] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)

    @property
    def own(self) -> dict[str, Tensor]:
        return {name: self.ids[name][where] for name, where in self.mine.items()}

    @property
    def own_values(self) -> dict[str, Tensor]:
        return {name: self.values[name][where] for name, where in self.mine.items()}


def draw_call(case: Case) -> Given:
    """A table may be absent on some ranks, have no ids there, or no gradients."""
    draw, rank = case.random, dist.get_rank()
    pairs = [(table.name, r) for table in case.tables for r in range(case.ranks)]
    lacking, silent = set(draw.choices(pairs, k=2)), set(draw.choices(pairs, k=2))
    given = Given()
    for table in case.tables:
        name = table.name
        lists = [[] if (name, r) in lacking else case.ids(6) for r in range(case.ranks)]
        sizes = [len(ids) for ids in lists]
        begin = sum(sizes[:rank])
        given.ids[name] = torch.tensor(list(chain(*lists)), dtype=torch.int64)
        given.values[name] = case.floats(sum(sizes), table.dim)
        flags = [(name, r) not in silent for r in range(case.ranks)]
        given.pushed[name] = torch.repeat_interleave(torch.tensor(flags), torch.tensor(sizes))
        if (name, rank) not in lacking:
            given.mine[name] = slice(begin, begin + sizes[rank])
        if not flags[rank]:
            given.silent.add(name)
    return given


def call_shards(case: Case) -> list[str]:
    """Calls in any order, each rank with its ids."""
    draw = case.random
    spread, alone = case.spread(), case.alone()
    problems = []
    for number in range(8):
        call, given = draw.choice(CALLS), draw_call(case)
        numbers: dict[str, Any] = {"step": number, "time": 50.0 + number}
        numbers |= {"scale": draw.choice([1.0, 0.25]), "clip_norm": draw.choice([None, 0.5])}
        said = [*make_call(call, spread, alone, given, numbers), *differing_rows(spread, alone)]
        problems += [f"call {number}, {call}: {each}" for each in said]
    return problems


def make_call(
    call: str, spread: SyncShards, alone: LocalShards, given: Given, numbers: dict[str, Any]
) -> Iterator[str]:
    """One call, of this rank's ids and of all together; what differs in their results."""
    time = numbers["time"]
    if call == "lookup":
        lookup = spread.lookup(given.own)
        lookup.wait()  # rows travel with the first use; a rank without ids uses none
        expected = alone.lookup(given.ids).rows
        if not all(close(lookup.rows[name], expected[name][where]) for name, where in given.mine.items()):
            yield "other rows"
    elif call == "push":
        grads = {name: x for name, x in given.own_values.items() if name not in given.silent}
        spread.apply_gradients(spread.lookup(given.own), grads, **numbers)
        ids, values = ({n: x[given.pushed[n]] for n, x in all_.items()} for all_ in (given.ids, given.values))
        alone.apply_gradients(ids, values, **numbers)
    elif call == "push ids":
        spread.apply_gradients(given.own, given.own_values, **numbers)
        alone.apply_gradients(given.ids, given.values, **numbers)
    elif call in ("assign", "assign_add"):
        own, own_values = given.own, given.own_values
        getattr(spread, call)({name: (own[name], own_values[name]) for name in own}, time=time)
        getattr(alone, call)({name: (x, given.values[name]) for name, x in given.ids.items()}, time=time)
    elif call == "reinitialize":
        status, wanted = spread.reinitialize(given.own, time=time), alone.reinitialize(given.ids, time=time)
        if not all(torch.equal(status[name], wanted[name][where]) for name, where in given.mine.items()):
            yield "another status"
    else:
        removed, all_removed = spread.remove(given.own), alone.remove(given.ids)
        if any(removed[name] != all_removed[name] for name in given.mine):
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


MANY = [pytest.param(*case, marks=pytest.mark.soak) for case in MORE_SEEDS.items()]


@pytest.mark.parametrize(("ranks", "seeds"), [*SEEDS.items(), *MANY])
def test_ranks_train_what_one_process_trains_on_the_joined_batch(ranks: int, seeds: range) -> None:
    for rank, problems in enumerate(run_ranks(on_a_rank, seeds, world_size=ranks)):
        assert problems == [], f"rank {rank}"
