"""Templar's side of gather: results with real lists, aggregator objects, keys, buckets and metric names."""

from __future__ import annotations

import io
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.compat import templar
from megalith.errors import ArtifactError, InputError
from megalith.gather import (
    GatherPlan,
    Label,
    OuterUpdate,
    PayloadSchema,
    RankOptions,
    UpdateConfig,
    compress,
    decompress,
    find_overlap,
    gather,
    open_object_store,
    run_window,
)
from megalith.storage.retries import run_async
from tests.compat.templar.test_templar_payloads import SCHEMA, SHAPES, saved, templar_object
from tests.gather.support import plan_of

VERSION = "2.1.3"


@pytest.fixture(scope="module")
def buckets() -> dict[str, Any]:
    """A bucket per peer, as Templar has them."""
    stores = {f"uid-{uid}": open_object_store("memory://") for uid in (1, 2, 3)}
    for uid in (1, 2, 3):
        key = templar.gradient_key(7, uid, VERSION)
        run_async(stores[f"uid-{uid}"].put(key, saved(templar_object(uid, window=7)[0]), timeout=10))
    return stores


def plan(**more: Any) -> GatherPlan:
    places = templar.peer_locations(7, (1, 2, 3), VERSION)
    formats = ("megalith", "templar")
    return plan_of(SCHEMA, (1, 2, 3), run="r", window=7, locations=places, formats=formats, **more)


def test_the_outer_step_is_that_of_templars_objects(buckets: dict[str, Any]) -> None:
    weights = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    config = UpdateConfig(clip="none", lr=0.5, mean="peers")
    report = run_window(plan(update=config), weights, OuterUpdate(SCHEMA), buckets)
    assert report.result.uids == (1, 2, 3)
    assert report.result.global_steps == (41, 42, 43)
    for name, tensor in weights.items():
        mean = sum(templar_object(uid)[1][name] for uid in (1, 2, 3)) / 3
        torch.testing.assert_close(tensor, 1 - 0.5 * mean, rtol=1e-6, atol=1e-6)


def test_results_have_real_lists_that_templars_consumers_accept(buckets: dict[str, Any]) -> None:
    result = gather(plan(), SCHEMA, buckets)
    found = templar.gather_result(result)
    assert found is not None
    found._offloaded = True  # as Templar's validator marks it
    assert (found.uids, found.skipped_uids, found.global_steps) == ([1, 2, 3], [], [41, 42, 43])
    for key, entries in vars(found.state_dict).items():
        assert isinstance(entries, list)
        assert len(entries) == 3
        if key.endswith(("idxs", "vals")):
            assert all(each.to("cpu").dtype == torch.uint8 for each in entries)
    assert found.state_dict.wvals[0].shape == (2, 1, 64)
    assert found.state_dict.bvals[0].shape == (1, 64)
    shift, scale, offset, lookup, dtype = found.state_dict.wquant_params[1]
    assert (float(shift), scale, offset, lookup.shape, dtype) == (0.0, 1.0, 2, (4,), torch.float32)
    assert torch.equal(dequantised(found, 1), templar_object(2)[1]["w"])
    result.close()
    nothing = gather(plan(max_object_bytes=1, deadline=0.2), SCHEMA, buckets)
    assert templar.gather_result(nothing) is None


def catch_up_of_templar(data: bytes) -> tuple[SimpleNamespace, int]:
    """What Templar's catch-up makes of an object that its Comms has read."""
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    payload = loaded.get("state_dict")
    assert "state_dict" in payload
    rest = {name: payload[name] for name in ("uids", "skipped_uids", "success_rate")}
    return SimpleNamespace(state_dict=SimpleNamespace(**payload["state_dict"]), **rest), loaded["global_step"]


def dequantised(found: SimpleNamespace, peer: int) -> Tensor:
    """The update of a peer to "w", by the formulas of Templar, without Megalith's code."""
    _, _, _, lookup, _ = found.state_dict.wquant_params[peer]
    codes, packed = (
        found.state_dict.wvals[peer].view(2, 64).long(),
        found.state_dict.widxs[peer].view(2, 32, 3).long(),
    )
    pairs = [packed[..., 0] | (packed[..., 1] & 15) << 8, packed[..., 1] >> 4 | packed[..., 2] << 4]
    values = lookup[codes] + found.state_dict.wquant_params[peer][0]
    return torch.zeros(2, 4096).scatter_(1, torch.stack(pairs, 2).flatten(1), values).view(128, 64)


def test_aggregator_objects_are_accepted_by_templars_catch_up(buckets: dict[str, Any]) -> None:
    result = gather(plan(), SCHEMA, buckets)
    found, step = catch_up_of_templar(templar.write_aggregator(result, global_step=9))
    assert (found.uids, found.skipped_uids, found.success_rate, step) == ([1, 2, 3], [], 1.0, 9)
    assert isinstance(found.state_dict.widxs, list)
    for number, uid in enumerate(found.uids):
        assert torch.equal(dequantised(found, number), templar_object(uid)[1]["w"])
    result.close()


def aggregator_of_templar(uids: Sequence[int], dtype: torch.dtype = torch.float32) -> bytes:
    """An aggregator object as Templar's validator stores it, made without Megalith's code."""
    objects = [templar_object(uid, window=7, dtype=dtype)[0]["state_dict"] for uid in uids]
    lists = {key: [each[key] for each in objects] for key in objects[0] if key != "metadata"}
    content = {"state_dict": lists, "uids": list(uids), "skipped_uids": [9], "success_rate": 0.75}
    return saved({"state_dict": content, "global_step": 77})


def test_aggregator_objects_of_templar_are_read_and_applied() -> None:
    data = aggregator_of_templar([2, 3, 1], torch.bfloat16)  # 1 is a reserve
    config = UpdateConfig(clip="none", lr=0.5, mean="peers")
    result = templar.read_aggregator(data, SCHEMA, run="r", window=7, update=config)
    assert (result.uids, result.skipped_uids, result.to_penalise) == ((2, 3, 1), (9,), ())
    assert result.global_steps == (77, 77, 77)
    weights = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    OuterUpdate(SCHEMA).apply(weights, result)
    for name, tensor in weights.items():
        mean = sum(templar_object(uid, dtype=torch.bfloat16)[1][name] for uid in (1, 2, 3)) / 3
        torch.testing.assert_close(tensor, 1 - 0.5 * mean, rtol=1e-6, atol=1e-6)
    written = templar.write_aggregator(result)
    again = templar.read_aggregator(written, SCHEMA, run="r", window=7)
    for uid, payload in again.payloads.items():
        for name, tensor in decompress(payload).items():
            assert torch.equal(tensor, decompress(result.payloads[uid])[name])
    for damaged in (data[:-1], b"", data.replace(b"state_dict", b"state_dicx"), saved([1])):
        with pytest.raises(ArtifactError, match="aggregator object of window 7"):
            templar.read_aggregator(damaged, SCHEMA, run="r", window=7)


def test_what_is_written_for_templar_is_read_by_torch() -> None:
    _, update = templar_object(1)
    made = compress(update, SCHEMA)
    data = templar.write_payload(made, Label("r", 7, 1, global_step=5, metadata={"sample_count": 9}))
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert loaded["global_step"] == 5
    assert loaded["state_dict"]["metadata"] == {"window": 7, "sample_count": 9}
    again = templar.read_payload(data, SCHEMA, run="r", window=7, uid=1)
    assert again.header.label.global_step == 5
    for name, tensor in decompress(made).items():
        assert torch.equal(decompress(again)[name], tensor)
    padded = PayloadSchema.of({"w": torch.zeros(67, 3)})
    with pytest.raises(InputError, match="padding=False"):
        templar.write_payload(compress({"w": torch.ones(67, 3)}, padded), Label("r", 7, 1))


def test_keys_and_buckets() -> None:
    assert templar.gradient_key(7, 3, VERSION) == "gradient-7-3-v2.1.3.pt"
    assert templar.aggregator_key(7, VERSION) == "aggregator-7-v2.1.3.pt"
    bucket = {"name": "abc", "account_id": "acc", "access_key_id": "k", "secret_access_key": "s"}
    stores = templar.peer_stores({3: bucket})
    assert stores["uid-3"].where == "s3://abc"
    with pytest.raises(InputError, match="uid 4: account_id must be text"):
        templar.peer_stores({4: {"name": "abc"}})


def test_metric_names(buckets: dict[str, Any]) -> None:
    result = gather(plan(), SCHEMA, buckets, options=RankOptions(in_flight=1))
    found = templar.templar_metrics(result, scores={1: 3.0}, overlap=find_overlap(result))
    assert found["validator/gather/success_rate"] == 100.0
    assert found["validator/gather/intended_mean_final"] == 1.0
    assert found["validator/overlap/pairs_checked"] == 3
    assert found["compress/min_median_block_norm"] <= found["compress/max_median_block_norm"]
    result.close()
