"""Weights that FSDP2 shards: windows, saved state, catching up and compression as in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from megalith.distributed import tensor_parts as leaves
from megalith.distributed.tensor_parts import fingerprint
from megalith.errors import InputError, MegalithError
from megalith.gather import (
    ElasticRanks,
    ErrorFeedback,
    GatherPlan,
    Label,
    OuterUpdate,
    PayloadSchema,
    UpdateConfig,
    catch_up,
    compress,
    open_object_store,
    publish,
    run_window,
)
from tests.distributed.ranks import run_ranks
from tests.gather.support import RUN, peer_update

UIDS = (1, 2, 3)
OPTIMIZERS = ("sgd", "nesterov")
LEAF = 40  # elements: leaves that extend over several ranks


def model() -> nn.Module:
    """Lines that do not divide by ranks or chunks, a bias of one element, a convolution."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 17), nn.Linear(17, 1), nn.Conv1d(5, 6, 3))


def whole() -> dict[str, Tensor]:
    found = {name: tensor.detach().clone() for name, tensor in model().named_parameters()}
    return {**found, "replicated": torch.linspace(0, 1, 35).view(7, 5)}


def schema() -> PayloadSchema:
    return PayloadSchema.of(whole(), chunk=4, keep=5)


def sharded() -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {**dict(fully_shard(model(), mesh=mesh).named_parameters()), "replicated": whole()["replicated"]}


def plan(window: int, optimizer: str, exchange: str = "exact") -> GatherPlan:
    config = UpdateConfig(optimizer=optimizer, lr=0.5, exchange=exchange)  # type: ignore[arg-type]
    return GatherPlan(run=RUN, window=window, schema=schema(), primary=UIDS, update=config)


def full(parameters: dict[str, Tensor]) -> dict[str, list[float]]:
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().flatten().tolist()
        for name, tensor in parameters.items()
    }


def two_windows(
    folder: Path, parameters: dict[str, Tensor], optimizer: str, ranks: ElasticRanks | None
) -> Any:
    """Weights and hash after two windows, with the update saved and loaded in between."""
    stores = {"default": open_object_store(folder / "peers")}
    artifacts = open_object_store(folder / f"artifacts-{optimizer}-{0 if ranks is None else ranks.size}")
    update = OuterUpdate(schema())
    for window in (1, 2):
        given = plan(window, optimizer) if ranks is None or ranks.leads else None
        report = run_window(given, parameters, update, stores, ranks=ranks, artifacts=artifacts)
        state = update.state_dict()
        update = OuterUpdate(schema())
        update.load_state_dict(state)
    assert report.fingerprint is not None
    return full(parameters), report.fingerprint.hash


def work(folder: str) -> dict[str, Any]:
    """Everything that ranks do with sharded weights."""
    leaves.LEAF_ELEMENTS = LEAF
    path, ranks, found = Path(folder), ElasticRanks.of_group(timeout=60.0), {}
    parameters = sharded()
    assert any(isinstance(t, DTensor) and t.to_local().shape != t.shape for t in parameters.values())
    found["fingerprint"] = fingerprint(parameters, ranks=ranks)
    for optimizer in OPTIMIZERS:
        found[optimizer] = two_windows(path, sharded(), optimizer, ranks)
    late, update = sharded(), OuterUpdate(schema())
    store = open_object_store(path / "artifacts-nesterov-0")
    done = catch_up(store, late, update, run=RUN, ranks=ranks)
    found["late"] = (done, full(late), update.fingerprint(late, ranks=ranks).hash)
    found["compressed"] = compressed(ranks)
    fast = sharded()
    given = plan(1, "sgd", "fast") if ranks.leads else None
    run_window(
        given, fast, OuterUpdate(schema()), {"default": open_object_store(path / "peers")}, ranks=ranks
    )
    found["fast"] = full(fast)
    found["refused"] = refused(path)
    found["given back"] = given_back(ranks)
    found["disagree"] = disagree(path, ranks)
    return found


def given_back(ranks: ElasticRanks | None) -> dict[str, list[float]]:
    """What is left after an update was compressed and not published."""
    feedback = ErrorFeedback(0.9)
    for seed in (1, 2):
        made = compress(divided(updates(seed), ranks), schema(), feedback=feedback, ranks=ranks)
    feedback.give_back(made, ranks=ranks)
    return full(feedback.left)


def disagree(path: Path, ranks: ElasticRanks) -> str:
    """What each rank raises if one of them finds no payloads."""
    store = open_object_store("memory://" if ranks.rank == 1 else path / "artifacts-nesterov-0")
    with pytest.raises(MegalithError) as caught:
        catch_up(store, sharded(), OuterUpdate(schema()), run=RUN, ranks=ranks)
    return f"{type(caught.value).__name__}: {caught.value}"


def updates(seed: int) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tensor.shape, generator=make) for name, tensor in whole().items()}


def divided(tensors: dict[str, Tensor], ranks: ElasticRanks | None) -> dict[str, Tensor]:
    """Tensors that are sharded like the parameters."""
    if ranks is None:
        return tensors
    like: dict[str, Any] = sharded()
    return {
        name: distribute_tensor(tensor, like[name].device_mesh, like[name].placements)
        if isinstance(like[name], DTensor)
        else tensor
        for name, tensor in tensors.items()
    }


def compressed(ranks: ElasticRanks | None) -> list[bytes]:
    """The payloads of two updates with feedback, of which the second is sent after the state was loaded."""
    feedback, found = ErrorFeedback(0.9), []
    for seed in (1, 2):
        made = compress(divided(updates(seed), ranks), schema(), feedback=feedback, ranks=ranks)
        if ranks is None or ranks.leads:
            found.append(made.to_bytes(Label(RUN, seed, 1)))
        else:
            with pytest.raises(MegalithError, match="only the first rank has"):
                made.to_bytes(Label(RUN, seed, 1))
        state, feedback = feedback.state_dict(), ErrorFeedback(0.9)
        feedback.load_state_dict(state)
    return found


def refused(path: Path) -> bool:
    """Whether a window without ranks changes nothing."""
    parameters = sharded()
    before = full(parameters)
    stores = {"default": open_object_store(path / "peers")}
    with pytest.raises(InputError, match=r"pass ranks=ElasticRanks\.of_group"):
        run_window(plan(1, "sgd"), parameters, OuterUpdate(schema()), stores)
    with pytest.raises(InputError, match=r"pass ranks=ElasticRanks\.of_group"):
        compress(parameters, schema())
    return full(parameters) == before


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """What one process with whole weights comes to."""
    before, leaves.LEAF_ELEMENTS = leaves.LEAF_ELEMENTS, LEAF
    folder = tmp_path_factory.mktemp("fsdp")
    store = open_object_store(folder / "peers")
    for window in (1, 2):
        for uid in UIDS:
            publish(store, peer_update(schema(), 10 * window + uid), Label(RUN, window, uid))
    found: dict[str, Any] = {"fingerprint": fingerprint(whole())}
    for optimizer in OPTIMIZERS:
        found[optimizer] = two_windows(folder, whole(), optimizer, None)
    found["late"] = ((1, 2), *found["nesterov"])
    found["compressed"] = compressed(None)
    found["given back"] = given_back(None)
    once = whole()
    run_window(plan(1, "sgd"), once, OuterUpdate(schema()), {"default": store})
    found["fast"] = full(once)
    yield folder, found
    leaves.LEAF_ELEMENTS = before


@pytest.mark.parametrize("size", [2, 3])
def test_sharded_weights_come_to_what_one_process_comes_to(
    expected: tuple[Path, dict[str, Any]], size: int
) -> None:
    folder, alone = expected
    for rank, said in enumerate(run_ranks(work, str(folder), world_size=size)):
        assert said["refused"]
        for optimizer in OPTIMIZERS:
            assert said[optimizer] == alone[optimizer]
        assert said["late"] == alone["late"]
        assert said["given back"] == alone["given back"]
        assert said["disagree"].startswith("ArtifactError: window 1, payload of uid 2")
        assert said["disagree"].endswith("the object does not exist")
        assert said["compressed"] == (alone["compressed"] if rank == 0 else [])
        for name, values in said["fast"].items():
            assert values == pytest.approx(alone["fast"][name], abs=1e-6)
    artifacts = [
        {p.relative_to(f): p.read_bytes() for p in f.rglob("*") if p.is_file()}
        for f in (folder / f"artifacts-nesterov-{n}" for n in (0, size))
    ]
    assert artifacts[0] == artifacts[1]
