"""Gather with a real model: dense weights and embedding rows of peers that train on their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.errors import InputError
from megalith.gather import (
    Gatherer,
    Label,
    OuterUpdate,
    PayloadSchema,
    RankOptions,
    compress,
    open_object_store,
    publish,
    run_window,
)
from tests.gather.support import RUN, WINDOW, gathered, peer_bytes, plan_of, small_schema
from tests.gather.virtual import ScriptedStore

pytest.importorskip("obstore")


def applied(model: nn.Module, *, like: nn.Module) -> dict[str, Tensor]:
    """The weights of `like` after an update by one peer that was given to `model`."""
    schema = PayloadSchema.of(model, keep=4)
    OuterUpdate(schema).apply(model, gathered(schema, {1: peer_bytes(schema, 1)}))
    return {name: tensor.detach().clone() for name, tensor in like.named_parameters()}


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def test_frozen_parameters_are_left_out_and_stay() -> None:
    model = layers()
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    schema = PayloadSchema.of(model)
    assert [spec.name for spec in schema.parameters] == ["0.bias", "1.weight", "1.bias"]
    after = applied(model, like=model)
    assert [name for name in before if torch.equal(before[name], after[name])] == ["0.weight"]
    with pytest.raises(InputError, match=r"'0\.weight' has an update but is not in the schema"):
        compress(before, schema)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapping", ["DDP", "compiled", "compiled DDP", "compiled layer"])
def test_wrappers_do_not_show(one_rank: None, wrapping: str) -> None:
    model = wrapped = layers()
    if "DDP" in wrapping:
        wrapped = nn.parallel.DistributedDataParallel(wrapped)
    if wrapping == "compiled layer":
        wrapped = nn.Sequential(model[0], torch.compile(model[1]))  # type: ignore[index, arg-type]
    elif "compiled" in wrapping:
        wrapped = torch.compile(wrapped)  # type: ignore[assignment]
    plain = layers()
    assert PayloadSchema.of(wrapped, keep=4) == PayloadSchema.of(plain, keep=4)
    found, expected = applied(wrapped, like=model), applied(plain, like=plain)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    schema = PayloadSchema.of(plain)
    assert schema.fingerprint(wrapped).hash == schema.fingerprint(expected).hash


def test_empty_parameters_are_no_trouble() -> None:
    weights = {"none": torch.zeros(0, 4), "some": torch.ones(4, 4)}
    schema = PayloadSchema.of(weights, keep=4)
    store = open_object_store("memory://")
    publish(store, compress(weights, schema), Label(RUN, WINDOW, 1))
    plan = plan_of(schema, [1])
    report = run_window(plan, weights, OuterUpdate(schema), {"default": store})
    assert report.decision.go
    assert weights["some"].sum() == 12.0


def test_cancelling_leaves_no_files(tmp_path: Path) -> None:
    schema = small_schema()
    store = ScriptedStore()
    plan = plan_of(schema, [1, 2])
    for uid in plan.primary:
        store.objects[plan.location(uid).key] = peer_bytes(schema, uid)
    store.script[plan.location(2).key] = [(0.0, None), (1e3, None)]
    options = RankOptions(spool_directory=tmp_path, spool_from=1, request_timeout=1e6)
    gatherer = Gatherer(plan, schema, {"default": store}, options=options)

    async def cancelled() -> None:
        task = asyncio.ensure_future(gatherer.fetch_async(plan.primary))
        while len(store.log) < 4:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancelled(), 60))
    assert list(tmp_path.iterdir()) == []
    assert gatherer._ledger.used == 0
