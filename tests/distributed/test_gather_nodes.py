"""Three nodes, each a process with weights of its own, and faults: a slow peer, a lost leader, a partition.

They end with equal weights, or one of them reports the difference. Never do they differ in silence.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.errors import ArtifactError, MegalithError, UsageError
from megalith.gather import (
    Artifacts,
    GatherConfig,
    GatherPlan,
    Label,
    ObjectStore,
    OuterUpdate,
    UpdateConfig,
    catch_up,
    open_object_store,
    publish,
    read_artifact_manifest,
    run_window,
)
from megalith.storage.object_store import RequestFailure, StoreRequestError
from tests.distributed.ranks import forked
from tests.gather.support import peer_update, small_schema, weights

RUN = "nodes"
UIDS = (1, 2, 3)
NODES = ("a", "b", "c")
WINDOWS = (1, 2, 3)
SCHEMA = small_schema()
REPORTS = ("not those before window", "different weights", "differing")


@dataclass(frozen=True)
class Faults:
    """What happens to a node: windows in which some peers do not answer it, windows in which it reaches no
    artifacts, the request at which it is killed, the window before which its weights change."""

    wait: float = 0.0
    slow: Mapping[int, Sequence[int]] = field(default_factory=dict)
    cut_off: Sequence[int] = ()
    killed_at: int = 0
    differs_at: int = 0


class FaultyArtifacts(ObjectStore):
    """A directory of artifacts that a node loses sight of, or at one of whose requests it dies."""

    faults = Faults()
    window = 0
    requests = 0

    def _limited(self, verb: str, key: str, timeout: float) -> Any:
        self.requests += 1
        if self.requests == self.faults.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.window in self.faults.cut_off:
            raise StoreRequestError(RequestFailure.STORE_ERROR, f"{verb} of {key!r}: cut off")
        return super()._limited(verb, key, timeout)


class SlowPeers(ObjectStore):
    """The payloads, of which some never answer."""

    keys: Sequence[str] = ()

    async def head(self, key: str, *, timeout: float) -> Any:
        if key in self.keys:
            await asyncio.sleep(timeout)
            raise StoreRequestError(RequestFailure.TIMEOUT, "slow")
        return await super().head(key, timeout=timeout)


def plan_of(window: int) -> GatherPlan:
    config = GatherConfig(deadline=0.5, min_peers=1, memory_budget=16 << 20)
    update = UpdateConfig(optimizer="nesterov", lr=0.5)
    return GatherPlan(run=RUN, window=window, schema=SCHEMA, primary=UIDS, gather=config, update=update)


def work(folder: str, name: str, faults: Faults, windows: Sequence[int]) -> dict[str, Any]:
    """A node: it runs the windows, each again if it fails, then follows what it has missed."""
    torch.set_num_threads(1)
    peers = SlowPeers(Path(folder, "peers").as_uri())
    store = FaultyArtifacts(Path(folder, "artifacts").as_uri())
    store.faults = faults
    artifacts = Artifacts(store, node=name, wait=faults.wait, deadline=0.3)
    parameters, update, said = weights(), OuterUpdate(SCHEMA), []
    for window in windows:
        plan = plan_of(window)
        if window == faults.differs_at:
            parameters["odd"][0, 0] += 1.0
        peers.keys = [plan.location(uid).key for uid in faults.slow.get(window, ())]
        for again in range(3):
            store.window = window if again < 2 else 0  # the connection comes back
            try:
                report = run_window(plan, parameters, update, {"default": peers}, artifacts=artifacts)
                said += [f"differing: {each}" for each in report.differing]
                break
            except UsageError as error:  # it followed a later decision meanwhile
                said.append(str(error))
                break
            except ArtifactError as error:
                said.append(str(error))
    store.window = 0
    try:
        # Nothing is cut off any more: a busy machine must not end it.
        catch_up(Artifacts(store, node=name, deadline=60.0), parameters, update, run=RUN)
    except MegalithError as error:
        said.append(str(error))
    return {"hash": update.fingerprint(parameters).hash, "last": update.last_window, "said": said}


def play(folder: Path, faults: Mapping[str, Faults]) -> dict[str, dict[str, Any]]:
    """What the nodes come to; a node that is killed is started again, without faults."""
    store = open_object_store(folder / "peers")
    (folder / "artifacts").mkdir()
    for window in WINDOWS:
        for uid in UIDS:
            publish(store, peer_update(SCHEMA, 10 * window + uid), Label(RUN, window, uid))
    jobs = {name: (str(folder), name, faults[name], WINDOWS) for name in NODES}
    found = forked(work, jobs)
    lost = {name: (str(folder), name, Faults(), WINDOWS) for name in NODES if found[name] is None}
    found |= forked(work, lost)
    # Some may have ended before the last decision was written: all look once more.
    late = {name: (str(folder), f"{name}-late", Faults(), ()) for name in NODES}
    return {name: {**found[name], "late": each} for name, each in forked(work, late).items()}


def differ_in_silence(found: Mapping[str, dict[str, Any]]) -> bool:
    ends = {each["late"]["hash"] for each in found.values()}
    ends |= {each["hash"] for each in found.values() if each["last"] == found["a"]["late"]["last"]}
    said = [text for each in found.values() for text in (*each["said"], *each["late"]["said"])]
    return len(ends) > 1 and not any(mark in text for text in said for mark in REPORTS)


def test_one_slow_peer_does_not_divide_the_nodes(tmp_path: Path) -> None:
    slow = {"a": Faults(), "b": Faults(wait=30.0, slow={1: (2,), 3: (1,)}), "c": Faults(slow={2: (3,)})}
    found = play(tmp_path, slow)
    assert len({each["hash"] for each in found.values()}) == 1
    assert [each["said"] for each in found.values()] == [[], [], []]
    assert [each["last"] for each in found.values()] == [(RUN, 3)] * 3


@pytest.mark.parametrize("killed_at", [3, 12, 16])  # it gathers; it uploads; its decision is there
def test_a_lost_leader_is_replaced(tmp_path: Path, killed_at: int) -> None:
    found = play(tmp_path, {"a": Faults(killed_at=killed_at), "b": Faults(wait=0.5), "c": Faults(wait=1.0)})
    assert len({each["hash"] for each in found.values()}) == 1
    assert not any(mark in text for each in found.values() for text in each["said"] for mark in REPORTS)
    store = open_object_store(tmp_path / "artifacts")
    assert all(read_artifact_manifest(store, RUN, window) for window in WINDOWS)


def test_a_node_that_was_cut_off_catches_up(tmp_path: Path) -> None:
    found = play(tmp_path, {"a": Faults(), "b": Faults(cut_off=(1, 2)), "c": Faults(wait=30.0)})
    assert len({each["hash"] for each in found.values()}) == 1
    assert any("cut off" in text for text in found["b"]["said"])


@pytest.mark.parametrize("node", ["a", "b"])  # that decides, or that follows
def test_a_node_that_differs_is_reported_in_the_same_window(tmp_path: Path, node: str) -> None:
    faults = {"a": Faults(), "b": Faults(wait=30.0), "c": Faults(wait=30.0)}
    found = play(tmp_path, faults | {node: Faults(wait=faults[node].wait, differs_at=2)})
    others = [name for name in NODES if name != node]
    reporting = others if node == "a" else [node]
    for name in reporting:
        assert any("not those before window 2" in text for text in found[name]["said"]), found[name]


def random_faults(draw: random.Random) -> Faults:
    return Faults(
        wait=draw.choice([0.0, 0.0, 0.3, 1.0]),
        slow={w: draw.sample(UIDS, draw.randint(1, 3)) for w in WINDOWS if draw.random() < 0.4},
        cut_off=[w for w in WINDOWS if draw.random() < 0.15],
        killed_at=draw.choice([0, 0, draw.randint(1, 80)]),
        differs_at=draw.choice([0, 0, 0, 0, 0, 2, 3]),
    )


@pytest.mark.parametrize(
    "seeds",
    [range(3), *(pytest.param(range(n, n + 5), marks=pytest.mark.soak) for n in range(10, 210, 5))],
    ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}",
)
def test_random_schedules_end_equal_or_reported(tmp_path: Path, seeds: Sequence[int]) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        (folder := tmp_path / str(seed)).mkdir()
        found = play(folder, {name: random_faults(draw) for name in NODES})
        assert not differ_in_silence(found), (seed, found)
