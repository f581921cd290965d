"""Checkpoints of tables over real ranks: any routing mode on 1, 2 or 4 ranks into any other, without a row
lost; deltas, saves while training goes on, and training that continues on another number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingCollection,
    Feature,
    LocalShards,
    Ragged,
    Router,
    Segment,
    SyncShards,
    TableConfig,
    checkpoint,
)
from megalith.errors import UsageError
from megalith.nn import MicroBatches
from megalith.routing import MODES
from megalith.shards import Shards
from tests.distributed.ranks import error_of, run_ranks
from tests.table.support import EXTREME_IDS, ints, whole

from . import test_sync_bits as bits

SIZES = (1, 2, 4)
SEGMENTS = [Segment(3, optimizer=Adagrad(0.1)), Segment(1, optimizer=SGD(0.5))]
TABLES = [TableConfig("a", segments=SEGMENTS), TableConfig("b", dim=2, optimizer=Adam(0.1))]
Rows = dict[str, tuple[Tensor, ...]]


class Model(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self, shards: Shards, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        features = [Feature("x", "a"), Feature("y", "b")]
        self.embeddings = EmbeddingCollection(shards, features, reduction="sum", **options)
        self.head = nn.Linear(6, 1)
        self.optimizer = torch.optim.Adam(self.head.parameters())

    def train_on(self, ids: Tensor, step: int) -> None:
        column = Ragged(ids, torch.arange(len(ids) + 1))
        out = self.embeddings({"x": column, "y": column}, time=100 + step)
        # Numbers that add up exactly in any order; the dense part sees no data, so it is the same everywhere.
        sum((x * (ids % 5 + 1)[:, None] / 4).sum() for x in out.values()).backward()
        self.optimizer.zero_grad()
        self.head.weight.square().sum().backward()
        self.optimizer.step()

    @property
    def rows(self) -> Rows:
        """What this process holds, by ascending id: ids, times, weights, state."""
        tables = {name: whole(table) for name, table in self.embeddings.shards.local.items()}
        return {name: (t.ids, t.time, *t.columns()) for name, t in tables.items()}


def router(mode: str, size: int) -> Router:
    return Router(mode, size, block_size=7 * size if mode == "continuous" else None)


def spread(mode: str = "roundrobin", **options: Any) -> Model:
    return Model(SyncShards(TABLES, router=router(mode, dist.get_world_size()), timeout=60.0, **options))


def share(ids: Tensor) -> Tensor:
    """This rank's part of a batch."""
    return ids[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else ids


def ids_of(step: int) -> Tensor:
    """Some in blocks, some far apart, and some that every step has."""
    return torch.cat([torch.arange(20 * step, 20 * step + 40), ints(*EXTREME_IDS)])


def trained(model: Model, steps: Sequence[int] = (0, 1, 2)) -> Model:
    for step in steps:
        model.train_on(share(ids_of(step)), step)
    return model


def together(ranks: list[Rows]) -> Rows:
    """The rows of all ranks by ascending id."""
    joined = {}
    for name in ranks[0]:
        columns = [torch.cat(parts) for parts in zip(*(rank[name] for rank in ranks), strict=True)]
        order = torch.argsort(columns[0])
        joined[name] = tuple(column[order] for column in columns)
    return joined


def assert_same(actual: Rows, expected: Rows) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        for a, b in zip(actual[name], expected[name], strict=True):
            assert torch.equal(a, b), name


# ---- every mode and number of ranks into every other


def save_all(folder: Path) -> Rows:
    """A model saved as each mode spreads it; rows of the last."""
    size = dist.get_world_size()
    for mode in MODES:
        model = trained(spread(mode))
        checkpoint.save(model, folder / f"{mode}-{size}", optimizer=model.optimizer, progress={"mode": mode})
    return model.rows


def load_all(folder: Path) -> list[dict[str, Any]]:
    """Every checkpoint into its own mode or another one, in turn by number of ranks."""
    found: list[dict[str, Any]] = []
    size = dist.get_world_size()
    for number, path in enumerate(sorted(folder.iterdir())):
        own = MODES.index(path.name.rpartition("-")[0])
        mode = MODES[own - (size % 3 if (number + SIZES.index(size)) % 2 else 0)]
        model = spread(mode)
        refused = ""
        if not path.name.startswith(f"{mode}-"):
            model.train_on(share(ints(3)), 0)
            before = model.rows
            refused = error_of(checkpoint.load, model, path)
            assert_same(model.rows, before)
        report = checkpoint.load(model, path, optimizer=model.optimizer, reroute=True)
        placed = [router(mode, size).owner(x[0]) for x in model.rows.values()]
        found.append(
            {
                "from": path.name,
                "to": mode,
                "refused": refused,
                "rows": model.rows,
                "report": {n: (t.read, t.kept, t.refused) for n, t in report.tables.items()},
                "progress": report.progress,
                "all owned": all(bool((owner == dist.get_rank()).all()) for owner in placed),
                "steps": model.embeddings.global_step,
                "dense": [model.head.weight.detach(), *model.optimizer.state_dict()["state"][0].values()],
            }
        )
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for size in SIZES:
        run_ranks(save_all, folder, world_size=size)
    return folder


@pytest.fixture(scope="module")
def expected() -> Model:
    """The same training in one process."""
    return trained(Model(LocalShards(TABLES)))


@pytest.mark.parametrize("size", SIZES)
def test_no_combination_of_modes_and_ranks_loses_a_row(saved: Path, expected: Model, size: int) -> None:
    results = run_ranks(load_all, saved, world_size=size)
    assert len(results[0]) == len(MODES) * len(SIZES)
    assert len({(rank["from"].rpartition("-")[0] == rank["to"]) for rank in results[0]}) == 2
    dense = [expected.head.weight.detach(), *expected.optimizer.state_dict()["state"][0].values()]
    for ranks in zip(*results, strict=True):
        assert_same(together([rank["rows"] for rank in ranks]), expected.rows)
        for rank in ranks:
            n = len(expected.embeddings.shards.local["a"])
            assert rank["report"] == {"embeddings.a": (n, n, 0), "embeddings.b": (n, n, 0)}
            assert rank["all owned"]
            assert rank["steps"] == 3
            assert all(torch.equal(a, b) for a, b in zip(rank["dense"], dense, strict=True))
            mode = rank["from"].rpartition("-")[0]
            assert rank["progress"] == {"mode": mode}
            if mode == rank["to"]:
                assert rank["refused"] == ""
            else:
                assert rank["refused"].startswith("InputError: Input dist_type mismatch")
                assert repr(mode) in rank["refused"]
                assert repr(rank["to"]) in rank["refused"]


@pytest.mark.parametrize("mode", MODES)
def test_one_process_loads_what_ranks_saved(saved: Path, expected: Model, mode: str) -> None:
    for size in SIZES:
        model = Model(LocalShards(TABLES))
        checkpoint.load(model, saved / f"{mode}-{size}", optimizer=model.optimizer)
        assert_same(model.rows, expected.rows)


# ---- deltas, saves while training goes on, trouble


def save_chain(folder: Path) -> dict[str, Any]:
    """A base, a delta with removed ids, and a save of which training does not wait for."""
    model = trained(spread(), [0])
    checkpoint.save(model, folder / "chain")
    trained(model, [1])
    model.embeddings.shards.remove({"a": share(torch.arange(30)), "b": share(ints(25))})
    checkpoint.save_delta(model, folder / "chain")
    delta = model.rows
    handle = checkpoint.async_save(model, folder / "async", optimizer=model.optimizer)
    trained(model, [2, 3])
    handle.wait(60)
    return {"delta": delta, "later": model.rows}


def load_chain(folder: Path) -> dict[str, Any]:
    """Loads base and delta, adds a delta of its own; then the other save."""
    model = spread()
    checkpoint.load(model, folder / "chain")
    found: dict[str, Any] = {"chain": model.rows}
    trained(model, [4])
    size = dist.get_world_size()
    checkpoint.save_delta(model, folder / "chain", progress={"size": size})
    found["own delta"] = model.rows
    other = spread()
    checkpoint.load(other, folder / "async")
    found["async"] = other.rows
    found["not its chain"] = error_of(checkpoint.save_delta, other, folder / "chain")
    before = other.rows
    found["damaged"] = error_of(checkpoint.load, other, folder / "damaged")
    assert_same(other.rows, before)
    return found


def damage(source: Path, target: Path) -> None:
    """A copy with a bit changed in the largest file."""
    target.mkdir()
    files = [file for file in source.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    for file in files:
        data = bytearray(file.read_bytes())
        if file == largest:
            data[-1] ^= 1
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(data)


def test_deltas_and_asynchronous_saves_load_on_any_number_of_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(save_chain, tmp_path)
    delta, later = (together([rank[key] for rank in ranks]) for key in ("delta", "later"))
    assert not set(range(30)) & set(delta["a"][0].tolist())
    assert len(later["a"][0]) > len(delta["a"][0])
    damage(tmp_path / "async", tmp_path / "damaged")

    alone = Model(LocalShards(TABLES))
    checkpoint.load(alone, tmp_path / "chain")
    assert_same(alone.rows, delta)
    added: list[Rows] = []
    for size in (4, 1):  # each goes on where the one before ended
        found = run_ranks(load_chain, tmp_path, world_size=size)
        assert_same(together([rank["chain"] for rank in found]), added[-1] if added else delta)
        assert_same(together([rank["async"] for rank in found]), delta)
        added.append(together([rank["own delta"] for rank in found]))
        for rank in found:
            assert rank["not its chain"].startswith(("UsageError: ", "CheckpointError: "))
            assert rank["damaged"].startswith("CheckpointError: ")
    checkpoint.load(alone, tmp_path / "chain")
    assert_same(alone.rows, added[-1])


# ---- going on elsewhere


def continued(path: Path, steps: range, load: bool, save: bool) -> dict[str, Any]:
    """Micro-batches of some steps, after loading, before saving."""
    model = bits.Model(SyncShards(bits.TABLES, timeout=60.0))
    optimizer = torch.optim.Adam(model.head.parameters(), lr=0.01)
    if load:
        checkpoint.load(model, path, optimizer=optimizer)
    micro = MicroBatches(model, bits.NUM)
    for step in steps:
        batches = [bits.micro_batch(step, index) for index in micro.mine]
        micro.step([lambda batch=batch: model.loss(*batch) for batch in batches])  # type: ignore[misc]
        optimizer.step()
    if save:
        checkpoint.save(model, path, optimizer=optimizer)
    tables = {name: whole(table) for name, table in model.embeddings.shards.local.items()}
    return {
        "tables": {name: (t.ids, t.rows, *t.state.values()) for name, t in tables.items()},
        "dense": [p.detach() for p in model.head.parameters()],
        "state": model.embeddings.state_dict(),
    }


def refused_states(states: list[Any]) -> list[str]:
    """The states of 2 ranks, loaded on another number of them."""
    model = bits.Model(SyncShards(bits.TABLES, timeout=60.0))
    return [error_of(model.embeddings.load_state_dict, state) for state in states]


def test_training_continues_on_another_number_of_ranks_with_the_same_bits(tmp_path: Path) -> None:
    whole_run = run_ranks(continued, tmp_path / "whole", range(4), False, False)
    first = run_ranks(continued, tmp_path / "part", range(2), False, True)
    for size in (1, 4):
        rest = run_ranks(continued, tmp_path / "part", range(2, 4), True, False, world_size=size)
        assert bits.digest(rest) == bits.digest(whole_run)
    assert bits.digest(first) != bits.digest(whole_run)

    states = [rank["state"] for rank in first]
    for size in (1, 4):
        for rank in run_ranks(refused_states, states, world_size=size):
            assert all("checkpoint.load" in said for said in rank)
    with pytest.raises(UsageError, match=r"checkpoint\.load"):
        EmbeddingCollection(bits.TABLES, bits.FEATURES).load_state_dict(states[1])


# ---- options


def wrong_on_rank_1(folder: Path) -> list[str]:
    model, last = spread(), dist.get_rank() == 1
    wrong: Any = 16 if last else "float32"
    return [
        error_of(checkpoint.save, model, folder, precision=wrong),
        error_of(checkpoint.save, model, folder, precision="float16" if last else "float32"),
        error_of(checkpoint.load, model, folder, reroute=wrong if last else False),
    ]


def test_wrong_options_of_one_rank_raise_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(wrong_on_rank_1, tmp_path)
    kinds = [[said.partition(": ")[0] for said in rank] for rank in (first, second)]
    assert kinds == [["CheckpointError", "InputError", "CheckpointError"], ["InputError"] * 3]
    assert first[0] == f"CheckpointError: rank 1: {second[0]}"
    assert list(tmp_path.iterdir()) == []
