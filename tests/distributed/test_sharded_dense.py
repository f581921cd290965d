"""Checkpoints of models whose dense weights are sharded (FSDP2, tensor parallelism): saved and loaded at any
number of ranks, and into models that are not sharded, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megalith import SGD, EmbeddingCollection, Feature, LocalShards, TableConfig, checkpoint
from megalith.distributed.dense_parameters import broadcast_dense
from megalith.errors import MegalithError
from tests.distributed.ranks import error_of, run_ranks

TABLES = [TableConfig("t", dim=3, optimizer=SGD(0.5))]
Dense = dict[str, Tensor]


class Tower(nn.Module):
    """Lines that do not divide by 2 or 4, a bias of one element, a tied weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.second = nn.Linear(7, 3)
        self.tied = nn.Linear(3, 7, bias=False)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(7, 1)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tied(F.relu(self.second(F.relu(self.first(x)))))
        out: Tensor = self.last(x)
        return out


class Model(nn.Module):
    """A table, a tower that may be sharded, and a plain head. The input is equal on all ranks."""

    def __init__(self, tables: Any = TABLES, seed: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embeddings = EmbeddingCollection(tables, [Feature("f", "t")], reduction="mean")
        self.tower = Tower()
        self.head = nn.Linear(1, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.tower(self.embeddings({"f": ids}, time=1)["f"]))
        return out


def built(*, sharded: bool, seed: int = 5) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(seed=seed)
    if sharded:
        fully_shard(model.tower, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model(torch.arange(step, step + 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.tower.seen += 1


def whole(tensor: Tensor) -> Tensor:
    made = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return made.detach().clone()


def content(model: nn.Module, optimizer: torch.optim.Optimizer) -> Dense:
    """Every dense tensor, whole."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return {name: whole(tensor) for name, tensor in found.items()}


def assert_equal(actual: Dense, expected: Dense) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


# ---- any number of ranks into any other


def save_all(folder: Path, sharded: bool) -> list[Dense]:
    """Three saves of one run: a full one, a delta, and one that is written while training continues."""
    model, optimizer = built(sharded=sharded)
    train(model, optimizer, range(2))
    checkpoint.save(model, folder / "chain", optimizer=optimizer)
    full = content(model, optimizer)
    train(model, optimizer, range(2, 3))
    checkpoint.save_delta(model, folder / "chain", optimizer=optimizer)
    train(model, optimizer, range(3, 4))
    later = content(model, optimizer)
    handle = checkpoint.async_save(model, folder / "async", optimizer=optimizer)
    train(model, optimizer, range(4, 6))
    handle.wait(60)
    return [full, later, content(model, optimizer)]


def load_all(paths: list[Path], sharded: bool) -> list[tuple[Dense, Dense, bool]]:
    """Each save into a fresh model that trains until step 6."""
    found = []
    for path in paths:
        model, optimizer = built(sharded=sharded, seed=9)
        checkpoint.load(model, path, optimizer=optimizer)
        loaded = content(model, optimizer)
        parts = [p for p in model.tower.parameters() if isinstance(p, DTensor)]
        state = [v for p in parts for v in optimizer.state[p].values() if v.dim()]
        kinds = all(isinstance(v, DTensor) for v in state) and bool(parts) == sharded
        train(model, optimizer, range(4 if path.name == "async" else 3, 6))
        found.append((loaded, content(model, optimizer), kinds))
    return found


def test_any_number_of_ranks_loads_what_any_other_saved(tmp_path: Path) -> None:
    """Given the same run unsharded and on 1, 2 and 4 ranks, every load has its bits and so has its future."""
    full, later, end = save_all(tmp_path / "plain", False)
    for size in (1, 2, 4):
        for ranks in run_ranks(save_all, tmp_path / str(size), True, world_size=size):
            for actual, expected in zip(ranks, (full, later, end), strict=True):
                assert_equal(actual, expected)
    folders = [tmp_path / name for name in ("plain", "1", "2", "4")]
    for turn, size in enumerate((0, 1, 2, 4)):  # the asynchronous save and the chain in turn
        paths = [folder / ("async", "chain")[(turn + n) % 2] for n, folder in enumerate(folders)]
        ranks = run_ranks(load_all, paths, True, world_size=size) if size else [load_all(paths, False)]
        for rank in ranks:
            for path, (loaded, trained, kinds) in zip(paths, rank, strict=True):
                assert kinds
                if path.name == "async":
                    assert_equal(loaded, later)
                assert_equal(trained, end)


# ---- other placements


def parallel(mesh: DeviceMesh) -> nn.Module:
    """Two layers, sharded over both dimensions of a mesh."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 11), nn.Linear(11, 7))
    if mesh.ndim == 2:
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    else:
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
    return model


def mesh_cases(folder: Path) -> dict[str, Any]:
    """Models without tables on 4 ranks: 2 x 2, and over 2 ranks for each of two replicas."""
    found: dict[str, Any] = {}
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallel(both)
    checkpoint.save(model, folder / "2x2")
    expected = {name: whole(p) for name, p in model.named_parameters()}
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    checkpoint.load(model, folder / "2x2")
    found["2x2"] = {name: whole(p) for name, p in model.named_parameters()}
    found["expected"] = expected
    found["rotation"] = checkpoint.Rotation(folder / "kept", keep_last=1).save(model, 1).id

    tables = EmbeddingCollection(TABLES, [Feature("f", "t")])
    replicas = nn.ModuleDict({"e": tables, "d": parallel(both["tp"])})
    checkpoint.save(replicas, folder / "replicas")
    checkpoint.load(replicas, folder / "replicas")
    found["replicas"] = {name: whole(p) for name, p in replicas["d"].named_parameters()}
    return found


def test_several_dimensions_and_replicas(tmp_path: Path) -> None:
    ranks = run_ranks(mesh_cases, tmp_path, world_size=4)
    plain = nn.Sequential(nn.Linear(6, 11), nn.Linear(11, 7))
    checkpoint.load(plain, tmp_path / "2x2")
    for rank in ranks:
        assert_equal(rank["2x2"], rank["expected"])
        assert_equal(rank["replicas"], rank["expected"])
        assert_equal({name: p.detach() for name, p in plain.named_parameters()}, rank["expected"])
        assert rank["rotation"] == ranks[0]["rotation"]


# ---- states of FSDP2, optimizers with factored state, wrong use


class Scale(nn.Module):
    """A layer without a matrix product, which some CPUs cannot make in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


class LowPrecision(nn.Module):
    """A layer that FSDP2 gathers in bfloat16, next to a table."""

    def __init__(self) -> None:
        super().__init__()
        from torch.distributed.fsdp import MixedPrecisionPolicy

        torch.manual_seed(1)
        self.e = EmbeddingCollection(TABLES, [Feature("f", "t")])
        self.d = Scale()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(self.d, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)


def unusual_cases(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (2,))

    # After an evaluation the root holds gathered bfloat16 weights.
    model = LowPrecision()
    before = {name: whole(p) for name, p in model.d.named_parameters()}
    with torch.no_grad():
        model.d(torch.zeros(1, 5))
    assert not isinstance(model.d.weight, DTensor)
    checkpoint.save(model, folder / "low")
    for parameter in model.d.parameters():
        nn.init.zeros_(parameter)
    with torch.no_grad():
        model.d(torch.zeros(1, 5))
    checkpoint.load(model, folder / "low")
    with torch.no_grad():
        model.d(torch.zeros(1, 5))
        model.d.reshard()
    after = {name: whole(p) for name, p in model.d.named_parameters()}
    found["low"] = all(torch.equal(before[name], after[name]) for name in before)

    # A state whose shape is not that of its parameter: its placement is known after one step.
    def factored() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(2)
        made = nn.Module()
        made.e = EmbeddingCollection(TABLES, [Feature("f", "t")])
        made.w = nn.Parameter(distribute_tensor(torch.randn(4, 3), mesh, [Replicate()]))
        return made, torch.optim.Adafactor(made.parameters(), lr=0.1)

    def step(made: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        made.w.grad = distribute_tensor(torch.ones(4, 3), mesh, [Replicate()])
        optimizer.step()

    made, optimizer = factored()
    step(made, optimizer)
    checkpoint.save(made, folder / "factored", optimizer=optimizer)
    expected = content(made, optimizer)
    again, fresh = factored()
    found["unknown"] = error_of(checkpoint.load, again, folder / "factored", optimizer=fresh)
    step(again, fresh)
    checkpoint.load(again, folder / "factored", optimizer=fresh)
    actual = content(again, fresh)
    found["factored"] = all(torch.equal(actual[name], expected[name]) for name in expected)

    # Wrong use raises on all ranks, before anything is written.
    def layer(tables: Any, weight: Tensor) -> nn.Module:
        made = nn.Module()
        made.e = EmbeddingCollection(tables, [Feature("f", "t")])
        made.w = nn.Parameter(weight)
        return made

    flattened = nn.Module()
    flattened.e = EmbeddingCollection(TABLES, [Feature("f", "t")])
    flattened.d = FullyShardedDataParallel(nn.Linear(5, 3), device_id=torch.device("cpu"))
    found["broadcast fsdp1"] = error_of(broadcast_dense, flattened)

    cases = {
        "fsdp1": flattened,
        "partial": layer(TABLES, DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)),
        "local": layer(LocalShards(TABLES), distribute_tensor(torch.ones(4), mesh, [Shard(0)])),
        "meta": layer(TABLES, torch.empty(2, device="meta")),
        "names": layer(TABLES, torch.ones(2)),
    }
    if dist.get_rank() == 1:
        cases["names"].w = nn.Parameter(DTensor.from_local(torch.ones(1), mesh, [Shard(0)], run_check=False))
    for name, case in cases.items():
        found[f"save {name}"] = error_of(checkpoint.save, case, folder / "wrong")
        found[f"load {name}"] = error_of(checkpoint.load, case, folder / "low")
    return found


def test_unusual_placements_work_or_raise_with_the_remedy(tmp_path: Path) -> None:
    for number, rank in enumerate(run_ranks(unusual_cases, tmp_path)):
        assert "broadcast before the model is sharded" in rank["broadcast fsdp1"]
        assert rank["low"]
        assert rank["factored"]
        assert "optimizer.step() once" in rank["unknown"]
        for call in ("save", "load"):
            assert "redistribute() it to Shard or Replicate" in rank[f"{call} partial"]
            assert "each rank has its own" in rank[f"{call} local"]
            said = rank[f"{call} fsdp1"]
            assert said.startswith("UsageError: ")
            assert "module 'd' is a FullyShardedDataParallel" in said
            assert "fully_shard (FSDP2)" in said
            assert "call model.to_empty(device=...)" in rank[f"{call} meta"]
            said = rank[f"{call} names"]
            different = f"rank {number} and rank {1 - number} hold different sharded weights"
            assert said.startswith(f"CheckpointError: {different}")
            assert "'w'" in said
    assert not (tmp_path / "wrong").exists()


def failing_save(folder: Path) -> tuple[str, bool]:
    """Rank 1 cannot save; then all can."""
    model, optimizer = built(sharded=True)
    train(model, optimizer, range(1))
    progress: Any = {"bad": object()} if dist.get_rank() == 1 else None
    failed = error_of(checkpoint.save, model, folder / "x", optimizer=optimizer, progress=progress)
    checkpoint.save(model, folder / "x", optimizer=optimizer)
    return failed, bool(checkpoint.verify(folder / "x").problems)


def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(failing_save, tmp_path)
    assert first[0].startswith("CheckpointError: rank 1: InputError")
    assert second[0].startswith("InputError: ")
    assert not first[1]


@pytest.mark.parametrize("weight", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")])
def test_a_weight_without_plain_values_is_named(tmp_path: Path, weight: Tensor) -> None:
    model = nn.Module()
    model.register_buffer("w", weight)
    with pytest.raises(MegalithError, match="'w' is"):
        checkpoint.save(model, tmp_path / "x")
