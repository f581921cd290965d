"""Artifacts: the same bytes for any number of ranks, and the same weights for who catches up; publishing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.errors import ArtifactError, StoreError, UsageError
from megalith.gather.artifact import (
    ArtifactManifest,
    Artifacts,
    prune_artifacts,
    read_artifact_manifest,
    write_decision,
)
from megalith.gather.compress import peek, publish
from megalith.gather.fetch import RankOptions
from megalith.gather.payload import Label
from megalith.gather.payload_schema import PayloadSchema
from megalith.gather.plan import Fault, GatherPlan, OverlapConfig, Status, UpdateConfig, payload_key
from megalith.gather.result import SkipReason
from megalith.gather.update import OuterUpdate
from megalith.gather.window import catch_up, run_window, write_artifact
from megalith.storage.object_store import ObjectStore, RequestFailure, StoreRequestError, open_object_store
from megalith.storage.retries import run_async
from tests.gather.fault_server import FaultServer, ServerFault
from tests.gather.support import RUN, WINDOW, peer_bytes, peer_update, plan_of, small_schema, weights
from tests.storage.s3_server import open_s3, s3_server

pytest.importorskip("obstore")
LIMIT = 20.0
CLOSES = datetime(2099, 1, 1, tzinfo=UTC)
SCHEMA = small_schema(users=3)
DECISION = f"artifacts/{RUN}/decisions/"


def payload_place(window: int, uid: int, data: bytes) -> str:
    return f"artifacts/{RUN}/{window}/payloads/{uid}-{data[32:64].hex()}.gather"


def content(store: ObjectStore, key: str) -> bytes:
    pieces: list[bytes] = []
    run_async(store.get(key, lambda piece: pieces.append(bytes(piece)), timeout=LIMIT))
    return b"".join(pieces)


def everything(store: ObjectStore) -> dict[str, bytes]:
    return {info.key: content(store, info.key) for info in run_async(store.list("", timeout=LIMIT))}


def memory() -> ObjectStore:
    return open_object_store("memory://")


def taker() -> tuple[dict[int, Tensor], Any]:
    """A table of rows, and what adds to it."""
    table: dict[int, Tensor] = {}

    def take(name: str, ids: Tensor, rows: Tensor) -> None:
        for key, row in zip(ids.tolist(), rows, strict=True):
            table[key] = table.get(key, torch.zeros_like(row)) + row

    return table, take


# ---- publishing


def test_a_published_payload_is_where_plans_look(tmp_path: Path) -> None:
    store = open_object_store(tmp_path)
    label = Label(RUN, WINDOW, 7, global_step=107)
    done = publish(store, peer_update(SCHEMA, 7), label)
    assert done.key == payload_key(RUN, WINDOW, 7)
    assert done.written
    assert content(store, done.key) == peer_bytes(SCHEMA, 7)
    header = peek(store, done.key)
    assert (header.digest, header.label, header.size) == (done.digest, label, done.bytes)
    assert header.schema == SCHEMA


def test_publishing_again_is_done_already_but_another_payload_is_not(tmp_path: Path) -> None:
    store = open_object_store("memory://")
    label = Label(RUN, WINDOW, 7)
    first = publish(store, peer_update(SCHEMA, 7), label)
    again = publish(store, peer_update(SCHEMA, 7), label, directory=tmp_path)
    assert (first.written, again.written, first.digest) == (True, False, again.digest)
    with pytest.raises(StoreError, match="holds another payload"):
        publish(store, peer_update(SCHEMA, 8), label)
    assert publish(store, peer_update(SCHEMA, 8), label, overwrite=True).written
    assert list(tmp_path.iterdir()) == []


class Watched(ObjectStore):
    """Notes what is in a directory while an object is written."""

    directory: Path
    seen: list[list[Path]]

    async def put(self, key: str, data: Any, *, create: bool = False, timeout: float) -> bool:
        self.seen.append(list(self.directory.iterdir()))
        return await super().put(key, data, create=create, timeout=timeout)


def test_a_killed_publication_leaves_nothing(tmp_path: Path) -> None:
    store = Watched("memory:///")
    store.directory, store.seen = tmp_path, []
    publish(store, peer_update(SCHEMA, 7), Label(RUN, WINDOW, 7), directory=tmp_path)
    assert store.seen == [[]]  # the file has no name: its end is that of the process
    assert peek(store, payload_key(RUN, WINDOW, 7)).label.uid == 7


def test_publishing_is_tried_again_and_ends_with_an_error() -> None:
    with FaultServer() as server:
        store = server.open()
        label = Label(RUN, WINDOW, 7)
        server.fail(payload_key(RUN, WINDOW, 7), ServerFault("status", "PUT", times=2))
        assert publish(store, peer_update(SCHEMA, 7), label).written
        server.fail("k", ServerFault("status", "PUT", times=1000))
        with pytest.raises(StoreError, match="uid 7, window 3: not published"):
            publish(store, peer_update(SCHEMA, 7), label, key="k", deadline=0.5)


def test_peek_refuses_what_is_no_payload() -> None:
    store = open_object_store("memory://")
    good = peer_bytes(SCHEMA, 7)
    for data in (b"", b"x" * 63, b"x" * 100, good + b"x", good[:-1]):
        run_async(store.put("k", data, timeout=LIMIT))
        with pytest.raises(Fault) as caught:
            peek(store, "k")
        assert caught.value.status is Status.CORRUPT
    with pytest.raises(Fault, match="NOT_FOUND"):
        peek(store, "none")


# ---- windows


class Run:
    """Several windows of one run: peers publish, one process gathers, artifacts are kept."""

    def __init__(
        self, *, schema: PayloadSchema = SCHEMA, open_store: Callable[[], ObjectStore] = memory, **plan: Any
    ) -> None:
        self.schema, self.plan_fields = schema, plan
        self.peers, self.artifacts = open_store(), open_store()
        self.weights, self.update = weights(), OuterUpdate(schema)
        self.table, self.take = taker()

    def plan(
        self, window: int, primary: tuple[int, ...] = (1, 2, 3), reserve: tuple[int, ...] = (8, 9)
    ) -> GatherPlan:
        times = {"time_max": CLOSES, "grace": 0.0, "deadline": 60.0}
        return plan_of(self.schema, primary, reserve, window=window, **times, **self.plan_fields)

    def peer(self, window: int, uid: int, seed: int) -> None:
        publish(self.peers, peer_update(self.schema, seed), Label(RUN, window, uid))

    def step(self, plan: GatherPlan, **more: Any) -> Any:
        """Run a window that is over: a missing object is not waited for."""
        options = RankOptions(now=lambda: CLOSES + timedelta(seconds=1), **more.pop("options", {}))
        return run_window(
            plan,
            self.weights,
            self.update,
            {"default": self.peers},
            artifacts=Artifacts(self.artifacts, **more),
            tables=self.take,
            options=options,
        )


def three_windows(**plan: Any) -> Run:
    run = Run(**plan)
    for window, uids in ((1, (1, 2, 3)), (2, ()), (3, (2, 3, 8))):
        for uid in uids:
            run.peer(window, uid, seed=10 * window + uid)
        run.step(run.plan(window))
    return run


@pytest.fixture(scope="module")
def kept() -> Run:
    """A run that no test changes."""
    return three_windows()


def assert_catches_up(run: Run) -> None:
    late, update, (table, take) = weights(), OuterUpdate(SCHEMA), taker()
    assert catch_up(run.artifacts, late, update, run=RUN, tables=take) == (1, 3)
    assert catch_up(run.artifacts, late, update, run=RUN, tables=take) == ()
    assert update.outer_step == run.update.outer_step == 2
    for name, tensor in run.weights.items():
        assert torch.equal(late[name], tensor)
    assert table.keys() == run.table.keys()
    assert all(torch.equal(table[key], row) for key, row in run.table.items())
    assert update.fingerprint(late).hash == run.update.fingerprint(run.weights).hash


def test_who_catches_up_has_the_same_weights() -> None:
    assert_catches_up(three_windows(update=UpdateConfig(optimizer="nesterov", lr=0.5)))
    with s3_server() as address:
        assert_catches_up(three_windows(open_store=lambda: open_s3(address)))


def test_peers_of_other_weights_are_not_applied() -> None:
    run = Run()
    for uid, seed in ((1, 0), (2, 5)):
        hash = SCHEMA.fingerprint(weights(seed)).hash
        publish(run.peers, peer_update(SCHEMA, uid), Label(RUN, 1, uid, weights=hash))
    report = run.step(run.plan(1, (1, 2), ()))
    assert (report.result.uids, report.result.records[2].status) == ((1,), Status.OTHER_WEIGHTS)
    with pytest.raises(UsageError, match="the plan of window 2 is for weights 000000000000, these are"):
        run.step(replace(run.plan(2), weights="0" * 64))


def test_a_copying_peer_is_left_out_here_and_when_catching_up(tmp_path: Path) -> None:
    run = Run(overlap=OverlapConfig(exclude="mega"))
    for uid, seed in ((1, 1), (2, 2), (3, 1)):
        run.peer(1, uid, seed)
    report = run.step(run.plan(1), options={"spool_directory": tmp_path, "spool_from": 1})
    (copying,) = report.update.excluded
    assert copying in (1, 3)
    sent = peer_update(SCHEMA, 2).to_bytes(Label(RUN, 1, 2))
    assert content(run.artifacts, payload_place(1, 2, sent)) == sent
    manifest = read_artifact_manifest(run.artifacts, RUN, 1)
    assert manifest is not None
    assert [entry.uid for entry in manifest.entries if not entry.factors] == [copying]
    late, update, (_, take) = weights(), OuterUpdate(SCHEMA), taker()
    catch_up(run.artifacts, late, update, run=RUN, tables=take)
    assert all(torch.equal(late[name], run.weights[name]) for name in late)


def test_a_skipped_window_changes_nothing_and_is_recorded() -> None:
    run = Run(min_peers=2)
    run.peer(1, 1, 1)
    report = run.step(run.plan(1))
    assert (report.decision.reason, report.update) == (SkipReason.BELOW_MIN_PEERS, None)
    assert all(torch.equal(tensor, weights()[name]) for name, tensor in run.weights.items())
    assert run.update.outer_step == 0
    manifest = read_artifact_manifest(run.artifacts, RUN, 1)
    assert manifest is not None
    assert (manifest.uids, manifest.reason, manifest.outer_step) == ((1,), SkipReason.BELOW_MIN_PEERS, 0)
    assert manifest.skipped == dict.fromkeys((2, 3, 8, 9), Status.NOT_FOUND)
    assert report.fingerprint.hash == manifest.weights_before
    assert run.update.last_window == (RUN, 1)


def test_a_budget_too_small_for_the_update_skips() -> None:
    schema = PayloadSchema.of({"w": torch.zeros(64, 64)}, keep=4096, bins=256)
    run = Run(schema=schema, update=UpdateConfig(rule="median"), memory_budget=5 << 20)
    run.weights = {"w": torch.zeros(64, 64)}
    for uid in range(20):
        run.peer(1, uid, 1)
    report = run.step(run.plan(1, tuple(range(20))))
    assert report.decision.reason is SkipReason.BUDGET_TOO_SMALL
    assert report.overlap is None
    assert not run.weights["w"].any()


class Failing(ObjectStore):
    """Refuses to write what begins with a text."""

    refused = "artifacts/"

    async def put(self, key: str, data: Any, *, create: bool = False, timeout: float) -> bool:
        if self.refused and self.refused in key:
            raise StoreRequestError(RequestFailure.CHANGED, "no")
        return await super().put(key, data, create=create, timeout=timeout)


@pytest.mark.parametrize("refused", ["/decisions/", "/payloads/"])
def test_a_window_whose_artifact_fails_changes_nothing_and_can_be_run_again(refused: str) -> None:
    run = Run()
    run.artifacts = store = Failing("memory:///")
    store.refused = refused
    run.peer(1, 1, 1)
    with pytest.raises(ArtifactError, match="nothing has changed: run the window again"):
        run.step(run.plan(1))
    assert all(torch.equal(tensor, weights()[name]) for name, tensor in run.weights.items())
    assert (run.update.outer_step, run.update.last_window) == (0, None)
    store.refused = ""
    assert run.step(run.plan(1)).decision.go
    with pytest.raises(UsageError, match="window 1 was applied already"):
        run.step(run.plan(1))
    late = weights()
    assert catch_up(store, late, OuterUpdate(SCHEMA), run=RUN, tables=taker()[1]) == (1,)
    assert all(torch.equal(late[name], tensor) for name, tensor in run.weights.items())


def test_an_artifact_that_failed_is_written_again_and_catching_up_continues_over_it() -> None:
    run = Run()
    run.artifacts = store = Failing("memory:///")
    reports = []
    for window in (1, 2, 3):
        store.refused = {1: "", 2: "/decisions/1", 3: ""}[window]
        run.peer(window, 1, window)
        reports.append(run.step(run.plan(window), on_error="warn"))
    assert [bool(each.artifact_error) for each in reports] == [False, True, False]
    late, update = weights(), OuterUpdate(SCHEMA)
    with pytest.raises(ArtifactError, match="the decision after window 1 is missing, but there are later"):
        catch_up(store, late, update, run=RUN, tables=taker()[1])
    for key in [key for key in everything(store) if "/2/payloads/" in key]:
        run_async(store.delete(key, timeout=LIMIT))
    write_artifact(reports[1], store, {"default": run.peers})
    assert catch_up(store, late, update, run=RUN, tables=taker()[1]) == (2, 3)
    assert all(torch.equal(late[name], tensor) for name, tensor in run.weights.items())
    write_artifact(reports[1], store, {})  # everything is there
    other = reports[1].manifest
    assert other is not None
    changed = replace(reports[1], manifest=replace(other, outer_step=7))
    with pytest.raises(ArtifactError, match="another decision was written for window 2"):
        write_artifact(changed, store, {})


def test_old_artifacts_are_deleted() -> None:
    run = Run(fingerprint_every=2)
    for window in (1, 2, 9, 10):
        run.peer(window, 1, window)
        report = run.step(run.plan(window), keep=3)
        assert (report.fingerprint is not None) == (window in (2, 10))  # weights are compared in every second
    names = {"/".join(key.split("/")[2:4]) for key in everything(run.artifacts)}
    decisions = {"decisions/1.json", "decisions/2.json", "decisions/9.json"}
    assert names == decisions | {"2/payloads", "2/weights", "9/payloads", "10/payloads", "10/weights"}
    assert prune_artifacts(run.artifacts, RUN, keep=1) == (2, 9)
    assert {key for key in everything(run.artifacts) if "decisions" in key} == {f"{DECISION}9.json"}
    with pytest.raises(ArtifactError, match="the first decision is missing, but there are later ones"):
        catch_up(run.artifacts, weights(), OuterUpdate(SCHEMA), run=RUN)
    assert prune_artifacts(run.artifacts, RUN, keep=1) == ()
    assert read_artifact_manifest(run.artifacts, RUN, 10) is not None
    run_async(run.artifacts.delete("nothing/here", timeout=LIMIT))


def test_a_manifest_comes_back(kept: Run) -> None:
    run = kept
    for window, after in ((1, "first"), (2, 1), (3, 2)):
        manifest = read_artifact_manifest(run.artifacts, RUN, window)
        assert manifest is not None
        text = manifest.to_bytes()
        assert ArtifactManifest.from_bytes(text, "x") == manifest
        assert content(run.artifacts, f"{DECISION}{after}.json") == text
    assert manifest.uids == (2, 3, 8)
    assert read_artifact_manifest(run.artifacts, RUN, 4) is None


# ---- damage


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "x"),
        ("version", 1),
        ("plan", {}),
        ("schema", {"parameters": [], "tables": []}),
        ("entries", [{}]),
        ("entries", []),
        ("skipped", {"1": "FINE"}),
        ("skipped", [1]),
        ("excluded", [77]),
        ("gram", [[1]]),
        ("gram", [[-1, 0, 0]] * 3),
        ("reason", "WHY"),
        ("outer_step", -1),
        ("weights_before", "x"),
        ("previous", 1),
    ],
)
def test_damaged_manifests_are_refused(kept: Run, field: str, value: Any) -> None:
    data = json.loads(content(kept.artifacts, f"{DECISION}first.json")) | {field: value}
    with pytest.raises(ArtifactError):
        ArtifactManifest.from_bytes(json.dumps(data).encode(), "x")


def test_uids_out_of_order_are_refused(kept: Run) -> None:
    data = json.loads(content(kept.artifacts, f"{DECISION}first.json"))
    data["entries"].reverse()
    with pytest.raises(ArtifactError, match="canonical order"):
        ArtifactManifest.from_bytes(json.dumps(data).encode(), "x")


def test_a_decision_in_the_wrong_place_is_refused(kept: Run) -> None:
    store = open_object_store("memory://")
    first = content(kept.artifacts, f"{DECISION}first.json")
    run_async(store.put(f"{DECISION}1.json", first, timeout=LIMIT))
    update = OuterUpdate(SCHEMA)
    update.last_window = (RUN, 1)
    with pytest.raises(ArtifactError, match="is of run 'run-a' and follows window None"):
        catch_up(store, weights(), update, run=RUN)
    assert read_artifact_manifest(store, RUN, 7) is None


def replay(run: Run, tensors: dict[str, Tensor] | None = None, update: OuterUpdate | None = None) -> None:
    given = weights() if tensors is None else tensors
    before = {name: tensor.clone() for name, tensor in given.items()}
    with pytest.raises(ArtifactError) as caught:
        catch_up(run.artifacts, given, update or OuterUpdate(SCHEMA), run=RUN, tables=taker()[1])
    if "produced different weights" not in str(caught.value):
        assert all(torch.equal(given[name], tensor) for name, tensor in before.items())
    raise caught.value


def test_catching_up_refuses_what_does_not_fit() -> None:
    run = three_windows()
    with pytest.raises(ArtifactError, match="not those before window 1"):
        replay(run, weights(5))
    ahead = OuterUpdate(SCHEMA)
    ahead.outer_step = 4
    with pytest.raises(ArtifactError, match="window 1 is outer step 1"):
        replay(run, update=ahead)
    good = peer_update(SCHEMA, 12).to_bytes(Label(RUN, 1, 2))
    key = payload_place(1, 2, good)
    run_async(run.artifacts.put(key, good[:-1] + b"x", timeout=LIMIT))
    with pytest.raises(ArtifactError, match="uid 2: table 'users', rows: the digest does not match"):
        replay(run)
    other = peer_update(SCHEMA, 99).to_bytes(Label(RUN, 1, 2))
    run_async(run.artifacts.put(key, other, timeout=LIMIT))
    with pytest.raises(ArtifactError, match="not those of the decision"):
        replay(run)


def test_a_wrong_outcome_is_noticed() -> None:
    run = three_windows()
    key = f"artifacts/{RUN}/1/weights/other-{'0' * 64}.json"
    run_async(run.artifacts.put(key, b"{}", timeout=LIMIT))
    with pytest.raises(ArtifactError, match="window 1 produced different weights than on node 'other'"):
        replay(run)


def test_a_store_that_fails_is_named(kept: Run) -> None:
    run = kept
    with FaultServer() as server:
        store = Artifacts(server.open(), deadline=0.3)
        server.fail(f"{DECISION}first.json", ServerFault("status", "*", times=1000))
        manifest = read_artifact_manifest(run.artifacts, RUN, 1)
        assert manifest is not None
        with pytest.raises(ArtifactError, match="cannot be written"):
            write_decision(store, manifest)
        with pytest.raises(ArtifactError, match="cannot be read"):
            read_artifact_manifest(store, RUN, 1)
