"""Fetching: one status per peer, one download per peer, within time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalith.errors import BudgetError, InputError, UsageError
from megalith.gather import fetch as fetch_module
from megalith.gather.fetch import Gatherer, RankOptions, gather, least_budget
from megalith.gather.payload import Label, Payload
from megalith.gather.payload_schema import PayloadSchema
from megalith.gather.plan import Fault, Location, Status, payload_key
from megalith.gather.result import Record
from megalith.storage.bodies import FileBody, MemoryBody, SpoolWriter
from tests.gather.fault_server import FaultServer, ServerFault
from tests.gather.support import RUN, WINDOW, peer_bytes, peer_update, plan_of, small_schema
from tests.gather.virtual import START, ScriptedStore, run
from tests.gather.world import CLOSES, EXPECTED, OPENS, World, spool_options

pytest.importorskip("obstore")


@pytest.fixture
def world() -> Iterator[World]:
    with FaultServer() as server:
        yield World(server)


def key(uid: int) -> str:
    return payload_key(RUN, WINDOW, uid)


def test_a_good_peer_is_ok(world: World) -> None:
    world.add({5: "good"})
    result = gather(world.plan([5]), world.schema, world.stores)
    record = result.records[5]
    data = peer_bytes(world.schema, 5)
    assert (record.status, record.tier, record.tries, record.detail) == (Status.OK, "primary", 1, "")
    assert record.bytes == len(data)
    assert record.digest == data[32:64].hex()
    assert record.global_step == 105
    assert record.last_modified == OPENS + timedelta(seconds=5)
    assert record.etag is not None
    assert [request.method for request in world.server.log] == ["HEAD", "GET"]


def test_one_bad_peer_never_affects_another(world: World) -> None:
    kinds = dict(enumerate(EXPECTED))
    good = {100 + i: "good" for i in range(4)}
    world.add({**kinds, **good})
    alone = gather(world.plan(list(good)), world.schema, world.stores)
    together = gather(world.plan([*kinds, *good]), world.schema, world.stores, options=world.options)
    assert {kind: together.records[uid].status for uid, kind in kinds.items()} == EXPECTED
    for uid, kind in kinds.items():
        is_ok = EXPECTED[kind] is Status.OK
        assert (uid in together.uids, together.records[uid].detail == "") == (is_ok, is_ok)
    for uid in good:
        assert together.records[uid].digest == alone.records[uid].digest
        assert together.accepted[uid] == alone.accepted[uid]


def test_reserves_take_the_place_of_those_that_failed(world: World) -> None:
    world.add({1: "good", 2: "missing", 3: "corrupt", 10: "missing", 11: "good", 12: "good", 13: "good"})
    result = gather(world.plan([1, 2, 3], [10, 11, 12, 13]), world.schema, world.stores)
    assert result.uids == (1, 11)
    assert result.skipped_uids == (2, 3, 10)
    assert {r.key for r in world.server.log} == {key(uid) for uid in (1, 2, 3, 10, 11)}
    again = gather(world.plan([1, 2, 3], [10, 11, 12, 13], backfill_rounds=3), world.schema, world.stores)
    assert again.uids == (1, 11, 12)
    assert key(13) not in {r.key for r in world.server.log}


def test_nobody_is_downloaded_twice(world: World) -> None:
    world.add(dict(enumerate(["good", "flaky", "cut", "replaced", "index", "corrupt"])))
    gather(world.plan([0, 1, 2, 3, 4, 5, 0, 3], [1, 2]), world.schema, world.stores)
    assert world.server.downloads() == {key(uid): 1 for uid in range(6)}


def test_both_ends_of_the_window_belong_to_it(world: World) -> None:
    for uid, when in enumerate([OPENS, CLOSES]):
        world.server.put(key(uid), peer_bytes(world.schema, uid), when)
    assert gather(world.plan([0, 1]), world.schema, world.stores).uids == (0, 1)


def test_early_and_late_are_not_downloaded(world: World) -> None:
    world.add({1: "early", 2: "late", 3: "large", 4: "short"})
    for limit in (1 << 20, 1 << 30):  # that of the plan, and that of the model
        result = gather(world.plan([1, 2, 3, 4], max_object_bytes=limit), world.schema, world.stores)
        assert result.records[3].status is Status.TOO_LARGE
    assert {request.method for request in world.server.log} == {"HEAD"}


def test_places_and_stores_are_the_plans(world: World) -> None:
    world.server.put("elsewhere/x", peer_bytes(world.schema, 1), OPENS)
    plan = world.plan([1], locations={1: Location("elsewhere/x", "second")})
    with pytest.raises(InputError, match="names store 'second': pass it in stores"):
        gather(plan, world.schema, world.stores)
    assert gather(plan, world.schema, {"second": world.stores["default"]}).uids == (1,)


def test_a_plan_for_another_model_is_refused(world: World) -> None:
    with pytest.raises(InputError, match="the plan is for schema"):
        gather(world.plan([1]), small_schema(keep=2), world.stores)


# ---- spool and memory


def test_large_bodies_go_to_the_spool_and_leave_no_trace(world: World, tmp_path: Path) -> None:
    world.add({1: "good", 2: "corrupt", 3: "cut", 4: "changing", 5: "stall"})
    result = gather(world.plan([1, 2, 3, 4, 5]), world.schema, world.stores, options=spool_options(tmp_path))
    assert result.uids == (1, 3)
    assert all(isinstance(payload.body, FileBody) for payload in result.payloads.values())
    result.close()
    assert list(tmp_path.iterdir()) == []


def test_small_bodies_stay_in_memory_as_far_as_the_budget_goes(world: World, tmp_path: Path) -> None:
    world.add(dict.fromkeys(range(3), "good"))
    size = len(peer_bytes(world.schema, 0))
    options = RankOptions(spool_directory=tmp_path)
    kept = gather(world.plan([0, 1, 2]), world.schema, world.stores, options=options)
    assert all(isinstance(payload.body, MemoryBody) for payload in kept.payloads.values())
    few = world.plan([0, 1, 2], range(1000, 3000))
    assert few.gather.memory_budget // 4 // 2003 > size
    tight = replace(few, gather=replace(few.gather, memory_budget=least_budget(world.schema)))
    assert tight.gather.memory_budget // 4 // 2003 < size
    spooled = gather(tight, world.schema, world.stores, options=options)
    assert all(isinstance(payload.body, FileBody) for payload in spooled.payloads.values())


def test_a_full_spool_is_our_fault(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add({1: "good", 2: "good"})
    real = SpoolWriter.write
    seen: list[SpoolWriter] = []

    def write(self: SpoolWriter, data: Any, offset: int | None = None) -> None:
        seen.append(self)
        if self is seen[0]:
            raise OSError(28, "No space left on device")
        real(self, data, offset)

    monkeypatch.setattr(SpoolWriter, "write", write)
    result = gather(
        world.plan([1, 2]), world.schema, world.stores, options=spool_options(tmp_path, in_flight=1)
    )
    assert [result.records[uid].status for uid in (1, 2)] == [Status.LOCAL_ERROR, Status.OK]
    assert "No space left" in result.records[1].detail
    result.close()


def test_an_error_of_ours_stays_with_one_peer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add({1: "good", 2: "good"})
    real = fetch_module.validate

    def validate(*given: Any, **named: Any) -> Any:
        if given[3] == 1:
            raise ZeroDivisionError("a bug")
        return real(*given, **named)

    monkeypatch.setattr(fetch_module, "validate", validate)
    result = gather(world.plan([1, 2]), world.schema, world.stores)
    assert result.uids == (2,)
    assert result.records[1].status is Status.LOCAL_ERROR
    assert result.records[1].detail == "ZeroDivisionError: a bug"


def test_a_budget_too_small_is_refused_before_any_request(world: World) -> None:
    plan = world.plan([1], memory_budget=least_budget(world.schema) - 1)
    with pytest.raises(BudgetError, match="raise memory_budget"):
        gather(plan, world.schema, world.stores)
    assert world.server.log == []


def test_large_objects_are_downloaded_by_ranges_that_resume(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalith.storage.bodies.RANGE_BYTES", 500)
    world.add({1: "good", 2: "corrupt"})
    size = len(peer_bytes(world.schema, 1))
    world.server.fail(key(1), ServerFault("truncate"), ServerFault("status", code=503))
    options = RankOptions(request_timeout=5.0, spool_directory=tmp_path, ranged_from=1000)
    result = gather(world.plan([1, 2], memory_budget=64 << 20), world.schema, world.stores, options=options)
    assert [result.records[uid].status for uid in (1, 2)] == [Status.OK, Status.CORRUPT]
    asked = [r for r in world.server.log if r.method == "GET" and r.key == key(1)]
    assert len(asked) == -(-size // 500) + 2  # two ranges were repeated, the others were kept
    assert result.records[1].tries == 1
    assert isinstance(result.payloads[1].body, FileBody)
    result.close()
    world.server.fail(key(1), ServerFault("replace"))
    again = gather(world.plan([1], memory_budget=64 << 20), world.schema, world.stores, options=options)
    assert (again.uids, again.records[1].tries) == ((1,), 2)
    again.close()


# ---- Templar's objects


def test_baseline_objects_are_taken_if_the_plan_says_so(world: World, tmp_path: Path) -> None:
    from tests.compat.templar import test_templar_payloads as test_baseline

    world.schema = test_baseline.SCHEMA
    world.server.put(key(9), test_baseline.DATA, OPENS)
    refused = gather(world.plan([9]), world.schema, world.stores)
    assert refused.records[9].status in (Status.CORRUPT, Status.TOO_LARGE)
    for options in (RankOptions(spool_directory=tmp_path), spool_options(tmp_path)):
        taken = gather(
            world.plan([9], formats=("megalith", "templar")), world.schema, world.stores, options=options
        )
        assert taken.uids == (9,)
        _, data = test_baseline.converted(test_baseline.DATA, run=RUN)
        assert taken.records[9].digest == data[32:64].hex()
        taken.close()
        assert list(tmp_path.iterdir()) == []


# ---- time, on a clock of our own


SCHEMA = PayloadSchema.of({"w": torch.zeros(8, 8)}, chunk=8, keep=8)


def scripted(count: int = 1) -> ScriptedStore:
    store = ScriptedStore()
    store.objects = {key(uid): peer_bytes(SCHEMA, uid) for uid in range(count)}
    return store


def fetched(
    store: ScriptedStore, count: int = 1, *, options: RankOptions | None = None, **more: Any
) -> list[Record]:
    settings: dict[str, Any] = {"deadline": 90.0, "memory_budget": 64 << 20, **more}
    plan = plan_of(SCHEMA, range(count), **settings)
    gatherer = Gatherer(plan, SCHEMA, {"default": store}, options=options)
    run(gatherer.fetch_async(plan.primary))
    assert gatherer.peak_bytes <= plan.gather.memory_budget
    return list(gatherer.partial().records.values())


def test_a_missing_object_is_waited_for_until_the_deadline() -> None:
    store = ScriptedStore()
    (one,) = fetched(store)
    assert one.status is Status.NOT_FOUND
    assert 80 < one.seconds <= 90
    assert one.tries == len(store.log)
    gaps = [b[0] - a[0] for a, b in zip(store.log, store.log[1:], strict=False)]
    assert all(gap <= 7.5 for gap in gaps)


def test_an_object_that_appears_is_taken() -> None:
    store = scripted()
    store.script[key(0)] = [(0.0, Status.NOT_FOUND)] * 5
    (one,) = fetched(store)
    assert (one.status, one.tries) == (Status.OK, 6)


def test_after_the_window_and_its_grace_there_is_one_last_try() -> None:
    store = ScriptedStore()
    (one,) = fetched(
        store, time_max=START, grace=3.0, options=RankOptions(now=lambda: START + timedelta(seconds=3.1))
    )
    assert (one.status, one.tries) == (Status.NOT_FOUND, 2)
    (two,) = fetched(
        ScriptedStore(),
        time_max=START,
        grace=3.0,
        options=RankOptions(now=lambda: START + timedelta(seconds=3)),
    )
    assert two.tries > 2


def test_a_silent_store_is_a_timeout_at_the_deadline() -> None:
    store = scripted()
    store.delay = 1e9
    (one,) = fetched(store, deadline=70.0)
    assert one.status is Status.TIMEOUT
    assert one.seconds <= 70.0
    assert one.tries == 3  # 30 s each, and what was left


def test_a_slow_download_has_time_by_its_size() -> None:
    store = scripted()
    store.script[key(0)] = [(0.0, None), (29.0, None)]
    assert fetched(store)[0].status is Status.OK
    store = scripted()
    store.script[key(0)] = [(0.0, None), (40.0, None)]
    (one,) = fetched(store)
    assert (one.status, one.tries) == (Status.OK, 2)
    store.script[key(0)] = [(0.0, None), (40.0, None)]
    assert fetched(store, options=RankOptions(slowest=1.0))[0].tries == 1


def test_stuck_peers_do_not_keep_others_waiting_for_ever() -> None:
    store = scripted(6)
    for uid in (0, 1):
        store.script[key(uid)] = [(1e9, None)] * 99
    results = fetched(store, 6, options=RankOptions(in_flight=2))
    assert [each.status for each in results] == [Status.TIMEOUT] * 2 + [Status.OK] * 4


def test_downloads_at_once_are_limited() -> None:
    store = scripted(20)
    store.delay = 1.0
    results = fetched(store, 20, options=RankOptions(in_flight=3))
    assert all(each.status is Status.OK for each in results)
    assert store.most_open == 3
    store = scripted(20)
    store.delay = 1.0
    fetched(store, 20, memory_budget=8 << 20)
    assert store.most_open == 2  # a quarter of the budget is two streams


def test_a_turn_after_the_deadline_is_no_try() -> None:
    store = scripted(3)
    store.delay = 2.0
    results = fetched(store, 3, deadline=3.0, options=RankOptions(in_flight=1))
    assert [each.status for each in results] == [Status.TIMEOUT] * 3
    assert [each.tries for each in results] == [1, 0, 0]


class Longer(ScriptedStore):
    """Sends more than it announced."""

    async def get(self, key: str, sink: Any, *, etag: str | None = None, timeout: float) -> Any:
        info = await super().get(key, sink, etag=etag, timeout=timeout)
        sink(memoryview(bytes(100)))
        return info


class Other(ScriptedStore):
    """Has no etags, and another object at each request."""

    def _info(self, key: str) -> Any:
        self.objects[key] = self.objects[key] + b"x"
        return replace(super()._info(key), etag=None, size=len(self.objects[key]) - 1)


@pytest.mark.parametrize("kind", [Longer, Other])
def test_an_object_that_is_not_what_was_announced_has_changed(kind: type[ScriptedStore]) -> None:
    store = kind()
    store.objects = scripted().objects
    (one,) = fetched(store)
    assert (one.status, one.tries, one.bytes) == (Status.CHANGED, 2, 0)


def test_wrong_options_name_the_field() -> None:
    with pytest.raises(InputError, match="in_flight must be an integer of at least 1"):
        RankOptions(in_flight=0)


# ---- whose fault it is


def test_a_missing_object_is_not_found_also_if_the_last_try_is_cut_short() -> None:
    """Whenever the deadline comes: the answer of the store counts, not the try that had no time left."""
    for tenth in range(20):
        store = ScriptedStore()
        store.delay = 0.4  # an answer takes longer than what the last try may have left
        records = fetched(store, 4, deadline=3.0 + 0.1 * tenth, options=RankOptions(in_flight=2))
        assert {each.status for each in records} == {Status.NOT_FOUND}


@pytest.mark.parametrize(
    ("kinds", "statuses"),
    [
        ({1: "denied", 2: "good"}, [Status.DENIED, Status.OK]),
        ({1: "denied", 2: "missing"}, [Status.DENIED, Status.NOT_FOUND]),
        ({1: "denied", 2: "denied"}, [Status.STORE_ERROR, Status.STORE_ERROR]),  # our credentials
        ({1: "drip", 2: "good"}, [Status.SLOW, Status.OK]),
        ({1: "drip", 2: "drip"}, [Status.TIMEOUT, Status.TIMEOUT]),  # our network
    ],
)
def test_a_refusal_or_a_drip_is_the_peers_fault_if_this_side_works(
    world: World, kinds: dict[int, str], statuses: list[Status]
) -> None:
    world.add(kinds)
    result = gather(world.plan([1, 2], deadline=1.0), world.schema, world.stores, options=world.options)
    assert [result.records[uid].status for uid in (1, 2)] == statuses


def test_a_refusal_of_a_peers_own_bucket_is_its_fault(world: World) -> None:
    world.add({1: "denied", 2: "denied"})
    plan = world.plan(
        [1, 2], deadline=0.5, locations={uid: Location(key(uid), f"uid-{uid}") for uid in (1, 2)}
    )
    store = world.stores["default"]
    result = gather(plan, world.schema, {"uid-1": store, "uid-2": store})
    assert result.to_penalise == (1, 2)


class Rude(ScriptedStore):
    """Ignores its time limit, or raises what no store should raise."""

    raises: BaseException | None = None

    async def head(self, key: str, *, timeout: float) -> Any:
        if self.raises is not None:
            raise self.raises
        await asyncio.sleep(1e9)


@pytest.mark.parametrize(
    ("raised", "status", "text"),
    [
        (None, Status.TIMEOUT, "no answer in time"),
        (TimeoutError("deep inside"), Status.TIMEOUT, "deep inside"),
        (asyncio.CancelledError(), Status.STORE_ERROR, "the store cancelled its own request"),
    ],
)
def test_a_store_that_ends_no_request_properly_is_cut_off(
    raised: BaseException | None, status: Status, text: str
) -> None:
    store = Rude()
    store.raises = raised
    (one,) = fetched(store, deadline=2.0)
    assert one.status is status
    assert text in one.detail
    assert one.seconds <= 2.1


def test_a_closed_result_says_that_it_is_closed(world: World, tmp_path: Path) -> None:
    world.add({1: "good"})
    for options in (None, spool_options(tmp_path)):
        result = gather(world.plan(np.array([1])), world.schema, world.stores, options=options)
        (payload,) = result.held(np.array(result.uids))
        result.close()
        with pytest.raises(UsageError, match="payload of uid 1, window 3, was closed"):
            payload.lookup(0)


# ---- weights


def stating(world: World, uid: int, weights: str | None) -> bytes:
    return peer_update(world.schema, uid).to_bytes(Label(RUN, WINDOW, uid, weights=weights))


def test_a_payload_of_other_weights_is_not_accepted(world: World) -> None:
    here, other = "a" * 64, "b" * 64
    for uid, weights in enumerate((here, other, None)):
        world.server.put(key(uid), stating(world, uid, weights), OPENS)
    found = gather(world.plan([0, 1, 2], weights=here), world.schema, world.stores)
    statuses = [found.records[uid].status for uid in (0, 1, 2)]
    assert statuses == [Status.OK, Status.OTHER_WEIGHTS, Status.OK]  # version 1 states none
    assert (
        found.records[1].detail
        == f"was computed from weights {other[:12]}, those of the window are {here[:12]}"
    )
    assert found.to_penalise == ()
    strict = gather(world.plan([0, 2], weights=here, require_weights=True), world.schema, world.stores)
    assert strict.records[2].status is Status.OTHER_WEIGHTS
    assert gather(world.plan([0, 1]), world.schema, world.stores).uids == (0, 1)  # nothing to compare with


def test_only_payloads_of_version_2_state_the_weights(world: World) -> None:
    for weights, version in ((None, 1), ("c" * 64, 2)):
        data = stating(world, 1, weights)
        assert (data[8], Payload.open(MemoryBody(data)).header.label.weights) == (version, weights)
        relabelled = bytearray(data)
        relabelled[8] = 3 - version
        with pytest.raises(Fault, match="CORRUPT"):
            Payload.open(MemoryBody(bytes(relabelled)))
    with pytest.raises(InputError, match="label: weights must be the hash of a fingerprint"):
        Label(RUN, WINDOW, 1, weights="c")
