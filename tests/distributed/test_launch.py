"""A real torchrun: what configure says on each of its ranks, and dense weights that become rank 0's."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.distributed.launcher_environment import broadcast_dense, configure
from megalith.errors import InputError
from tests.distributed.launched import Model
from tests.distributed.ranks import error_of, run_ranks

ROOT = Path(__file__).parents[2]
LIMIT = 120


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks found out."""
    folder = tmp_path_factory.mktemp("launch")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.distributed.launched", str(folder)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_each_rank_knows_its_place(torchrun: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(torchrun):
        assert found["rank"] == [rank, 2, rank, 2]
        assert found["group"] == [rank, 2]
        assert found["launcher"] == "torchrun"
        assert found["again"]
        assert found["environ is as it was"]


def test_each_rank_has_a_directory_below_that_of_the_launch(torchrun: list[dict[str, Any]]) -> None:
    first, second = (Path(found["run_dir"]) for found in torchrun)
    assert first.parent == second.parent
    assert first.parent.parent == Path("run")
    assert (first.name, second.name) == ("index-0000", "index-0001")


def test_dense_weights_become_those_of_rank_0_unless_told_not_to(torchrun: list[dict[str, Any]]) -> None:
    expected = Model(7).lists()
    for rank, found in enumerate(torchrun):
        assert found["model"] == expected
        assert found["skipped"] == Model(rank + 7).lists()
    other = Model(8).lists()
    assert [name for name in expected if other[name] == expected[name] and name != "empty"] == [
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
    ]


# ---- without a launcher


def bad_models() -> tuple[str, str, list[float], str]:
    rank = dist.get_rank()
    model = nn.Linear(2, 2 + rank % 2)
    nn.init.constant_(model.weight, rank)
    shapes = error_of(broadcast_dense, model)
    lazy = error_of(broadcast_dense, nn.LazyLinear(2) if rank == 1 else nn.Linear(2, 2))
    return shapes, lazy, model.weight.unique().tolist(), error_of(configure, "runs", environ={})


def subgroup() -> list[float]:
    """Ranks 1 and 2 of 3; the first of the group is rank 1."""
    rank = dist.get_rank()
    group = dist.new_group([1, 2])
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, rank)
    if rank > 0:
        broadcast_dense(model, group)
    return model.weight.flatten().tolist()


@pytest.fixture(scope="module")
def without_launcher() -> list[tuple[str, str, list[float], str]]:
    return run_ranks(bad_models)


def test_models_that_differ_raise_on_every_rank_and_nothing_is_written(without_launcher: list[Any]) -> None:
    for rank, (shapes, lazy, weights, _) in enumerate(without_launcher):
        assert "of ranks [1] differ from those of rank 0" in shapes
        assert "no shape yet on ranks [1]" in lazy
        assert ("(here: weight, bias)" in lazy) == (rank == 1)
        assert weights == [rank]


# ---- optimizer state


OPTIMIZERS: dict[str, Callable[[Any, int], torch.optim.Optimizer]] = {
    "adam": lambda p, rank: torch.optim.Adam(p, 0.1 * (rank + 1), betas=(0.5 + rank / 10, 0.9)),
    "amsgrad": lambda p, rank: torch.optim.Adam(p, 0.1, amsgrad=True),
    "momentum": lambda p, rank: torch.optim.SGD(p, torch.tensor(0.1 * (rank + 1)), momentum=0.9),
    "adagrad": lambda p, rank: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=float(rank)),
    "groups": lambda p, rank: torch.optim.Adam(
        [{"params": [p[0]], "lr": 0.1 * (rank + 1)}, {"params": [p[1]], "name": f"rank {rank}"}]
    ),
    "lbfgs": lambda p, rank: torch.optim.LBFGS(p, max_iter=2 + rank),
}


def layer(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def steps(model: nn.Linear, optimizer: torch.optim.Optimizer, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        inputs = torch.randn(4, 3, generator=generator)

        def closure(inputs: Tensor = inputs) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def with_optimizers(first_steps: list[int]) -> dict[str, Any]:
    """Rank r has made first_steps[r] steps on its own data when the broadcast comes."""
    rank = dist.get_rank()
    found = {}
    for name, make in OPTIMIZERS.items():
        model = layer(rank)
        optimizer = make(list(model.parameters()), rank)
        steps(model, optimizer, first_steps[rank], seed=rank)
        before = optimizer.state_dict() if rank == 0 else None
        expected = None if before is None else pickle.dumps(lists(before))
        broadcast_dense(model, optimizer=optimizer)
        after = lists(optimizer.state_dict())
        steps(model, optimizer, 2, seed=9)  # equal ranks stay equal
        unchanged = expected is None or pickle.dumps(after) == expected
        found[name] = (unchanged, after, lists(optimizer.state_dict()), lists(model.state_dict()))
    return found


def lists(data: Any) -> Any:
    """Tensors as dtype and bytes, to compare every bit."""
    if isinstance(data, Tensor):
        return str(data.dtype), tuple(data.shape), data.detach().reshape(-1).view(torch.uint8).tolist()
    if isinstance(data, dict):
        return {key: lists(value) for key, value in data.items()}
    return [lists(value) for value in data] if isinstance(data, list | tuple) else data


# Rank 0 may have more state than others, less, or none.
@pytest.mark.parametrize("first_steps", [[3, 1], [0, 2], [2, 0, 1, 5]])
def test_ranks_that_start_with_different_optimizer_state_end_equal(first_steps: list[int]) -> None:
    first, *others = run_ranks(with_optimizers, first_steps, world_size=len(first_steps))
    for name in OPTIMIZERS:
        unchanged, after, later, weights = first[name]
        assert unchanged, name  # rank 0 keeps its own
        assert bool(after["state"]) == (first_steps[0] > 0 or name == "adagrad"), name
        for other in others:
            assert other[name][1:] == (after, later, weights), name


def bad_optimizers() -> list[Any]:
    rank = dist.get_rank()
    model = layer(rank)
    start = model.weight.detach().clone()
    made: list[Any] = [
        torch.optim.Adam(model.parameters()) if rank == 0 else torch.optim.SGD(model.parameters()),
        torch.optim.SGD(model.parameters() if rank == 0 else [model.weight]),
        torch.optim.SGD(model.parameters()) if rank == 0 else None,
        torch.optim.SGD(model.parameters()) if rank == 0 else 3,
        torch.optim.SGD([{"params": model.parameters(), "choose": lambda: 1}]),
    ]
    found = [error_of(broadcast_dense, model, optimizer=each) for each in made]
    return [*found, torch.equal(model.weight, start)]


def test_optimizers_that_differ_raise_on_every_rank_and_nothing_is_written() -> None:
    for rank, (*different, wrong, opaque, unchanged) in enumerate(run_ranks(bad_optimizers)):
        for said in different:
            assert "or the optimizers of ranks [1] differ from those of rank 0" in said
        assert ("ranks [1] cannot take part" if rank == 0 else "torch.optim.Optimizer, got int") in wrong
        assert ("optimizer of rank 0 cannot be sent" if rank == 0 else "ranks [0] cannot take part") in opaque
        assert unchanged


def test_an_optimizer_needs_its_model() -> None:
    with pytest.raises(InputError, match="optimizer needs model="):
        configure("runs", optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))]), environ={})


def test_a_process_group_that_the_variables_do_not_know_is_an_error(without_launcher: list[Any]) -> None:
    for rank, (*_, said) in enumerate(without_launcher):
        assert f"has rank {rank} of 2, but the variables of no launcher are for rank 0 of 1" in said


def test_a_subgroup_gets_the_weights_of_its_first_rank() -> None:
    assert run_ranks(subgroup, world_size=3) == [[0.0], [1.0], [1.0]]


def test_without_a_process_group_it_says_what_to_do() -> None:
    assert not torch.distributed.is_initialized()
    with pytest.raises(InputError, match="call init_process_group first"):
        broadcast_dense(nn.Linear(1, 1))
