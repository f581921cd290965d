"""Rows move to their owners: no mix of routing modes and world sizes loses a row or has one twice.

All ranks are threads of one process (`logical_ranks`); the files are in memory.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith import Adagrad, EmbeddingCollection, Feature, TableConfig, checkpoint
from megalith.errors import CheckpointError, InputError
from megalith.routing import MODES, Router
from tests.checkpoint.logical_ranks import RankModel, new_models, on_all, outcomes_on_all
from tests.checkpoint.memory import HookedStore, MemoryStore
from tests.table.support import EXTREME_IDS, ints, whole

IDS = torch.unique(
    torch.cat(
        [
            ints(*EXTREME_IDS),
            torch.arange(-5, 30),
            torch.randint(-(2**63), 2**63 - 1, (40,), generator=torch.Generator().manual_seed(1)),
        ]
    )
)
Rows = dict[int, list[float]]


def routers(skip_first: bool = False) -> list[Router]:
    """All three modes with one to five shards."""
    return [
        Router(
            mode,
            num_shards,
            block_size=7 if mode == "continuous" else None,
            skip_first=skip_first and num_shards > 1,
        )
        for mode in MODES
        for num_shards in range(1, 6)
    ]


def train(models: Sequence[RankModel], ids: Tensor, seed: int, remove: Tensor | None = None) -> None:
    """Run one step on these ids, and remove others; the result does not depend on their owners."""
    for model in models:
        own = model.own(ids)
        # The gradient is a function of the id, so it does not depend on the routing.
        grads = torch.stack([torch.sin(own.double() * (seed + 1)), torch.cos(own.double() + seed)], 1).float()
        model.table.apply_gradients(own, grads, step=seed, time=100 + seed)
        model.weight.data.fill_(seed)
        if remove is not None:
            model.table.remove(model.own(remove))


def rows_of(models: Sequence[RankModel]) -> Rows:
    """Return the rows of all ranks; each must be on its owner and nowhere else."""
    rows: Rows = {}
    for model in models:
        chunk = whole(model.table)
        assert bool((model.router.owner(chunk.ids) == model.ranks.rank).all())
        wide = torch.cat([*chunk.columns(), chunk.time[:, None].float()], 1)
        for id, row in zip(chunk.ids.tolist(), wide.tolist(), strict=True):
            assert id not in rows
            rows[id] = row
    return rows


def save(models: Sequence[RankModel], store: MemoryStore, *, delta: bool = False) -> None:
    on_all(models, lambda model: (checkpoint.save_delta if delta else checkpoint.save)(model, store))


def load(router: Router, store: MemoryStore, **options: Any) -> list[RankModel]:
    """Load into new ranks, whose own rows must disappear."""
    models = new_models(router)
    train(models, IDS + 1000, 9)
    reports = on_all(models, lambda model: checkpoint.load(model, store, **options))
    for report in reports:
        assert report.tables == reports[0].tables, "all ranks know all"
    return models


@functools.cache
def saved(router: Router) -> tuple[MemoryStore, Rows]:
    """Save a checkpoint with this routing and return it with its rows."""
    store = MemoryStore()
    models = new_models(router)
    train(models, IDS, 1)
    save(models, store)
    return store, rows_of(models)


@functools.cache
def saved_with_deltas(router: Router) -> tuple[MemoryStore, Rows]:
    """Save a checkpoint with two deltas: rows are changed, removed, removed and created again, and new."""
    store = MemoryStore()
    models = new_models(router)
    train(models, IDS, 1)
    save(models, store)
    train(models, IDS[:0], 1, remove=IDS[::4])
    train(models, IDS[1::3], 2)
    save(models, store, delta=True)
    train(models, IDS[::8], 3, remove=IDS[5::9])
    train(models, torch.arange(500, 520), 4)
    save(models, store, delta=True)
    return store, rows_of(models)


@pytest.mark.parametrize(("number", "there"), [*enumerate(routers())], ids=repr)
def test_rows_move_from_any_routing_to_any_other(number: int, there: Router) -> None:
    """To a third of the routings; all pairs of modes and all pairs of numbers of shards occur."""
    store, rows = saved(there)
    assert len(rows) == IDS.numel()
    for here in routers()[-number % 3 :: 3]:
        models = load(here, store, reroute=True)
        assert rows_of(models) == rows
        assert {model.weight.tolist()[0] for model in models} == {1.0}


@pytest.mark.parametrize(("number", "there"), [*enumerate(routers(skip_first=True)[::2])], ids=repr)
def test_rows_move_with_deltas_and_with_an_empty_first_shard(number: int, there: Router) -> None:
    store, rows = saved_with_deltas(there)
    for here in routers(skip_first=there.num_shards % 2 == 0)[number % 5 :: 5]:  # all modes
        assert rows_of(load(here, store, reroute=True)) == rows


@pytest.mark.parametrize("there", routers()[1::4], ids=repr)
def test_a_chain_can_continue_with_another_routing(there: Router) -> None:
    store = saved_with_deltas(there)[0].copy()
    for here in (Router("continuous", 2, block_size=3), Router("hash_roundrobin", 3)):
        models = load(here, store, reroute=True)
        train(models, IDS[2::5], 5, remove=IDS[3::7])
        save(models, store, delta=True)
        rows = rows_of(models)
    for last in (here, there, Router("roundrobin", 1)):
        assert rows_of(load(last, store, reroute=True)) == rows
    checkpoint.compact(store)
    assert len(checkpoint.read_manifest(store).saves) == 1
    assert rows_of(load(there, store, reroute=True)) == rows


@pytest.mark.parametrize("router", routers()[::2], ids=repr)
def test_a_resharded_checkpoint_equals_one_saved_by_that_many_ranks(router: Router) -> None:
    store, rows = saved_with_deltas(Router("roundrobin", 3))
    target = MemoryStore(where="target")
    checkpoint.reshard(
        store, target, num_shards=router.num_shards, dist_type=router.mode, block_size=router.block_size
    )
    assert rows_of(load(router, target)) == rows


def test_another_mode_raises_without_reroute() -> None:
    store, rows = saved(Router("roundrobin", 2))
    models = new_models(Router("hash_roundrobin", 3))
    train(models, IDS, 9)
    before = rows_of(models)
    for error in outcomes_on_all(models, lambda model: checkpoint.load(model, store)):
        assert isinstance(error, InputError)
        assert str(error).startswith("Input dist_type mismatch")
        assert "'roundrobin'" in str(error)
        assert "'hash_roundrobin'" in str(error)
    assert rows_of(models) == before
    assert rows_of(load(Router("roundrobin", 5, skip_first=True), store)) == rows


class FarStore(MemoryStore):
    """A store where reading twice is not cheap."""

    is_local = False


@pytest.mark.parametrize("kind", [MemoryStore, FarStore])
@pytest.mark.parametrize("mode", ["roundrobin", "continuous"])
def test_ranks_read_only_their_own_files_if_the_routing_is_the_same(
    kind: type[MemoryStore], mode: str
) -> None:
    router = Router(mode, 4, block_size=7 if mode == "continuous" else None)
    saved_store, rows = saved_with_deltas(router)
    models = new_models(router)
    stores = [kind(saved_store.files) for _ in models]
    on_all(models, lambda model: checkpoint.load(model, stores[model.ranks.rank]))

    assert rows_of(models) == rows
    manifest = checkpoint.read_manifest(saved_store)
    pieces = [piece for entry in manifest.tables()["embeddings.t"] for piece in entry.pieces]
    for rank, store in enumerate(stores):
        own = {piece.file.path for piece in pieces if piece.shard == rank}
        others = {piece.file.path for piece in pieces} - own
        assert own <= set(store.reads)
        if kind is FarStore:
            assert not others & set(store.reads)
        else:  # each rank verifies a share of all files once, and reads the headers
            assert len(others & set(store.reads)) < len(others)


def test_a_rank_without_rows_takes_part() -> None:
    router = Router("continuous", 4, block_size=1 << 40)  # the first rank owns all small ids
    models = new_models(router)
    train(models, torch.arange(10), 1)
    store = MemoryStore()
    save(models, store)
    assert len(rows_of(load(router, store))) == 10


def test_async_saves_and_rotations_of_many_ranks(tmp_path: Any) -> None:
    rotation = checkpoint.Rotation(tmp_path, keep_last=1)
    models = new_models(Router("roundrobin", 3))
    for step in range(3):
        train(models, IDS, step)
        rows = rows_of(models)
        handles = on_all(models, lambda model, step=step: rotation.async_save(model, step))  # type: ignore[misc]
        train(models, IDS, step + 10)
        for handle in handles:
            handle.wait(60)
    assert rotation.steps() == [2]
    assert rows_of(load(Router("roundrobin", 2), rotation.latest())) == rows  # type: ignore[arg-type]


# ---- ranks that fail


@pytest.mark.parametrize(
    ("rank", "word"), [(0, "tables/"), (1, "tables/"), (2, "ranks/"), (0, "manifest"), (0, "dense")]
)
@pytest.mark.parametrize("delta", [False, True])
def test_if_one_rank_fails_all_raise_and_the_previous_checkpoint_remains(
    rank: int, word: str, delta: bool
) -> None:
    router = Router("roundrobin", 3)
    models = new_models(router)
    store = MemoryStore()
    train(models, IDS, 1)
    save(models, store)
    before = rows_of(models)
    train(models, IDS[::2], 2, remove=IDS[1::4])
    work = checkpoint.save_delta if delta else checkpoint.save

    def fail(name: str) -> None:
        if word in name:
            raise OSError("disk full")

    def failing(model: RankModel) -> Any:
        mine = HookedStore(store, fail) if model.ranks.rank == rank else store
        return work(model, mine, timeout=0.5 if word == "ranks/" else 30)

    outcomes = outcomes_on_all(models, failing)

    assert all(isinstance(outcome, OSError | CheckpointError) for outcome in outcomes)
    assert "disk full" in str(outcomes[rank])
    if word != "ranks/":  # there the report of the failure cannot be written either
        assert all("disk full" in str(outcome) for outcome in outcomes)
    assert rows_of(load(router, store)) == before
    save(models, store, delta=True)  # the changes are still tracked
    assert rows_of(load(router, store)) == rows_of(models)
    save(models, store)
    assert len(store.folders()) == 1, "nothing of the failed save is left"


def test_the_timeout_names_the_missing_rank() -> None:
    router = Router("roundrobin", 3)
    models = new_models(router)
    store = MemoryStore()
    train(models, IDS, 1)
    others_gave_up = threading.Event()

    def save_late(model: RankModel) -> Any:
        if model.ranks.rank == 2:
            return checkpoint.save(model, HookedStore(store, lambda _: others_gave_up.wait(60)))
        try:
            return checkpoint.save(model, store, timeout=0.2 if model.ranks.rank == 0 else 30)
        finally:
            if model.ranks.rank == 0:
                others_gave_up.set()

    outcomes = outcomes_on_all(models, save_late)

    words = "rank 0 waited 0.2 s for rank 2 to write its rows"
    assert all(isinstance(outcome, CheckpointError) and words in str(outcome) for outcome in outcomes)
    save(models, store)
    assert rows_of(load(router, store)) == rows_of(models)


@pytest.mark.parametrize("missing", ["rows", "dense"])
def test_a_file_that_one_rank_cannot_read_raises_on_all_before_a_table_is_cleared(missing: str) -> None:
    router = Router("roundrobin", 3)
    store, _ = saved(router)
    manifest = checkpoint.read_manifest(store)
    gone = manifest.tables()["embeddings.t"][0].pieces[1].file if missing == "rows" else manifest.dense
    models = new_models(router)
    train(models, IDS, 7)
    before = rows_of(models)

    def load_some(model: RankModel) -> Any:
        mine = store.copy()
        if model.ranks.rank == 1:
            del mine.files[gone.path]  # type: ignore[union-attr]
        return checkpoint.load(model, mine)

    outcomes = outcomes_on_all(models, load_some)

    assert [isinstance(outcome, CheckpointError) for outcome in outcomes] == [True] * 3
    assert rows_of(models) == before


@pytest.mark.parametrize("router", [Router("hash_roundrobin", 3), Router("continuous", 2, block_size=7)])
def test_one_shard_carries_the_recorded_mode_over(router: Router) -> None:
    """Given a checkpoint of several shards, a load and a save in one process keep its routing mode."""
    store, _ = saved(router)
    alone = nn.Module()
    config = TableConfig("t", dim=2, optimizer=Adagrad(0.1))
    alone.embeddings = EmbeddingCollection([config], [Feature("f", "t")])
    alone.weight = nn.Parameter(torch.zeros(2))
    checkpoint.load(alone, store)
    again = MemoryStore()
    checkpoint.save(alone, again)
    routing = checkpoint.read_manifest(again).tables()["embeddings.t"][0].routing
    assert (routing.dist_type, routing.num_shards) == (router.mode, 1)
    assert routing.block_size == router.block_size
