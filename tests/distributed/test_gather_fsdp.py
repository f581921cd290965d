"""Sharded parameters (FSDP2) beside replicated ones: each rank steps its own lines, to the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megalith.gather import OuterUpdate, Ranks, Schema, UpdateConfig, run_window
from megalith.gather.faultserver import FaultServer
from tests.distributed.ranks import run_ranks
from tests.gather.world import World

UIDS = (1, 2, 3)


def model() -> nn.Module:
    """Lines that do not divide by ranks or chunks, a bias of one element, a convolution."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 17), nn.Linear(17, 1), nn.Conv1d(5, 6, 3))


def whole() -> dict[str, Tensor]:
    found = {name: tensor.detach().clone() for name, tensor in model().named_parameters()}
    return {**found, "replicated": torch.linspace(0, 1, 35).view(7, 5)}


def schema() -> Schema:
    return Schema.of(whole(), chunk=4, keep=5)


class Remote:
    bucket = "gather"

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint


def settings(optimizer: str) -> dict[str, Any]:
    return {"update": UpdateConfig(optimizer=optimizer, lr=0.5)}  # type: ignore[arg-type]


def step_sharded(endpoint: str) -> list[tuple[dict[str, list[float]], str, bool]]:
    """Two windows per optimizer; all weights collected, the hash, whether something was sharded."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ranks, found = Ranks.of_group(timeout=60.0), []
    for optimizer in ("sgd", "nesterov"):
        sharded = fully_shard(model(), mesh=mesh)
        parameters = {**dict(sharded.named_parameters()), "replicated": whole()["replicated"]}
        world, update = World(Remote(endpoint), schema=schema()), OuterUpdate(schema())  # type: ignore[arg-type]
        for _ in range(2):
            plan = world.plan(UIDS, **settings(optimizer)) if ranks.leads else None
            report = run_window(plan, parameters, update, world.stores, ranks=ranks, options=world.options)
        assert report.fingerprint is not None
        full = {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).flatten().tolist()
            for name, tensor in parameters.items()
        }
        is_part = any(isinstance(t, DTensor) and t.to_local().shape != t.shape for t in parameters.values())
        found.append((full, report.fingerprint.hash, is_part))
    return found


@pytest.mark.parametrize("size", [2])
def test_sharded_weights_are_those_of_one_process(size: int) -> None:
    with FaultServer() as server:
        world = World(server, schema=schema())
        world.add(dict.fromkeys(UIDS, "good"))
        expected = []
        for optimizer in ("sgd", "nesterov"):
            parameters, update = whole(), OuterUpdate(schema())
            for _ in range(2):
                plan = world.plan(UIDS, **settings(optimizer))
                report = run_window(plan, parameters, update, world.stores, options=world.options)
            assert report.fingerprint is not None
            lists = {name: tensor.flatten().tolist() for name, tensor in parameters.items()}
            expected.append((lists, report.fingerprint.hash, True))
        for said in run_ranks(step_sharded, server.endpoint, world_size=size):
            assert said == expected
