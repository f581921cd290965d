"""Ranks that die or fail within a window: who goes on, with what weights, and what is downloaded again."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from megalith.errors import MegalithError
from megalith.gather import (
    ElasticRanks,
    Gatherer,
    GatherPlan,
    OuterUpdate,
    RankOptions,
    open_object_store,
    partition,
    run_window,
)
from megalith.gather.plan import Status, payload_key
from tests.distributed.ranks import run_ranks
from tests.gather.fault_server import FaultServer
from tests.gather.scenarios import Scenario, facts
from tests.gather.support import RUN, WINDOW, small_schema, weights
from tests.gather.world import World

UIDS = tuple(range(1, 8))
PEERS = {**dict.fromkeys((*UIDS, 8, 9), "good"), 4: "corrupt"}
SCENARIO = Scenario("seven peers, one bad", PEERS, UIDS, (8, 9))
SIZE = 3
OPTIONS = RankOptions(request_timeout=10.0)


class Remote:
    """The fault server as another process sees it."""

    bucket = "gather"

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint


class Doomed(ElasticRanks):
    """Ranks of which one kills itself when it comes to an exchange for the n-th time."""

    def __init__(self, victim: int, what: str, turn: int, **options: Any) -> None:
        group = dist.group.WORLD
        assert group is not None
        notes = group.get_group_store()
        self._notes, self._doom, self._victim = notes, [what] * turn, victim
        super().__init__(
            notes,
            dist.get_rank(),
            dist.get_world_size(),
            has_ended=lambda rank: bool(notes.check([f"ended/{rank}"])),
            **options,
        )

    def _exchanging(self, what: str) -> Any:
        if self.rank == self._victim and what in self._doom:
            self._doom.remove(what)
            if not self._doom:
                self._notes.set(f"ended/{self.rank}", "as a launcher would note")
                os.kill(os.getpid(), signal.SIGKILL)
        return super()._exchanging(what)


def world(endpoint: str) -> World:
    return World(Remote(endpoint))  # type: ignore[arg-type]


def plan_of(world: World, **more: Any) -> GatherPlan:
    return world.plan(SCENARIO.primary, SCENARIO.reserve, deadline=10.0, **more)


def survive(endpoint: str, victim: int, what: str, turn: int, snapshot: Any, least: int) -> dict[str, Any]:
    ranks = Doomed(victim, what, turn, timeout=20.0, least=least)
    here, parameters = world(endpoint), weights()
    update = OuterUpdate(here.schema)
    try:
        report = run_window(
            plan_of(here) if ranks.rank == 0 else None,
            parameters,
            update,
            here.stores,
            ranks=ranks,
            options=replace(OPTIONS, snapshot=snapshot),
        )
    except MegalithError as error:
        return {"error": f"{type(error).__name__}: {error}", "outer_step": update.outer_step}
    return facts(report, update, parameters) | {
        "members": ranks.members,
        "attempt": report.result.plan.attempt,
    }


def run(victim: int, what: str, turn: int = 1, *, snapshot: str = "none", least: int = 1) -> Any:
    """What the survivors say, and how often each uid was downloaded."""
    with FaultServer() as server:
        World(server).add(dict(PEERS))
        said = run_ranks(
            survive, server.endpoint, victim, what, turn, snapshot, least, world_size=SIZE, lost=[victim]
        )
        counts = server.downloads()
    downloads = {uid: counts.get(payload_key(RUN, WINDOW, uid), 0) for uid in PEERS}
    return [each for rank, each in enumerate(said) if rank != victim], downloads


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    with FaultServer() as server:
        here = World(server)
        here.add(dict(PEERS))
        parameters, update = weights(), OuterUpdate(here.schema)
        report = run_window(plan_of(here), parameters, update, here.stores, options=OPTIONS)
        return facts(report, update, parameters)


def same(said: Mapping[str, Any], undisturbed: Mapping[str, Any]) -> bool:
    """Whether a rank came to the same; lines name the plan, and thereby the attempt."""
    return all(said[key] == undisturbed[key] for key in undisturbed if key != "lines")


@pytest.mark.parametrize(
    ("victim", "what", "turn"),
    [
        (2, "statuses", 3),  # its downloads are done, and nobody heard of them
        (1, "plan", 1),
        (1, "indices", 2),
        (0, "pre-update", 1),
        (2, "codes", 1),
    ],
)
def test_a_rank_that_dies_before_weights_change_costs_its_own_downloads_only(
    undisturbed: dict[str, Any], victim: int, what: str, turn: int
) -> None:
    said, downloads = run(victim, what, turn)
    for each in said:
        assert "error" not in each, each["error"]
        assert each["members"] == tuple(rank for rank in range(SIZE) if rank != victim)
        assert each["attempt"] == (0 if what == "plan" else 1)
        assert same(each, undisturbed)
    survivors = [
        uid for r, share in enumerate(partition(plan_of_seven(), SIZE)) if r != victim for uid in share
    ]
    assert {downloads[uid] for uid in survivors if what != "plan"} <= {1}
    assert max(downloads.values()) <= 2
    assert downloads[9] == 0  # a reserve that nobody needed


def plan_of_seven() -> GatherPlan:
    return GatherPlan(run=RUN, window=WINDOW, schema=small_schema().digest, primary=UIDS)


def test_a_step_that_a_rank_left_half_way_is_undone_and_done_again(undisturbed: dict[str, Any]) -> None:
    said, _ = run(1, "tiles", 3, snapshot="host")
    assert all(same(each, undisturbed) for each in said)


def test_without_a_snapshot_every_survivor_is_told_that_the_step_is_torn() -> None:
    said, _ = run(1, "tiles", 3)
    for each in said:
        assert each["error"].startswith("UsageError: the update failed half-way")
        assert "lost ranks: 1" in each["error"]
        assert each["outer_step"] == 0


def test_a_rank_that_dies_after_the_step_changes_nothing(undisturbed: dict[str, Any]) -> None:
    said, downloads = run(0, "fingerprints")
    assert all(same(each, undisturbed) for each in said)
    assert max(downloads.values()) == 1


def test_with_too_few_left_the_missing_are_named() -> None:
    said, _ = run(2, "partials", least=3)
    for rank, each in enumerate(said):
        assert re.match(
            rf"RankTimeoutError: partials: rank {rank} waited [\d.]+ s for rank 2, which did not come; 2 of",
            each["error"],
        )


class Hanging(ElasticRanks):
    """Ranks of which one stops, without ending, before an exchange."""

    def _exchanging(self, what: str) -> Any:
        if self.rank == 1 and what == "partials":
            signal.alarm(0)
            signal.setitimer(signal.ITIMER_REAL, 8.0)  # it must not outlive the test
            while True:
                signal.pause()
        return super()._exchanging(what)


def outlast(endpoint: str) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    ranks = Hanging(group.get_group_store(), dist.get_rank(), dist.get_world_size(), timeout=1.5)
    here, parameters = world(endpoint), weights()
    update = OuterUpdate(here.schema)
    plan = here.plan(SCENARIO.primary, SCENARIO.reserve, deadline=3.0) if ranks.rank == 0 else None
    report = run_window(plan, parameters, update, here.stores, ranks=ranks, options=OPTIONS)
    return facts(report, update, parameters) | {"members": ranks.members}


def test_a_rank_that_hangs_is_left_behind(undisturbed: dict[str, Any]) -> None:
    with FaultServer() as server:
        World(server).add(dict(PEERS))
        said = run_ranks(outlast, server.endpoint, world_size=SIZE, lost=[1])
    for each in (said[0], said[2]):
        assert each["members"] == (0, 2)
        assert each["weights"] == undisturbed["weights"]
        assert each["outer_step"] == 1


# ---- ranks that live


class Failing(Gatherer):
    """Breaks down at its first download."""

    def fetch(self, uids: Any) -> dict[int, Status]:
        self._assigned += uids
        raise RuntimeError("out of luck")


def fail(endpoint: str, monkey: str) -> dict[str, Any]:
    """One thing goes wrong on rank 1, and the next window works."""
    ranks = ElasticRanks.of_group(timeout=60.0)
    here, parameters, bad = world(endpoint), weights(), ranks.rank == 1
    update, stores = OuterUpdate(here.schema), here.stores
    plan: GatherPlan | None = plan_of(here) if ranks.rank == 0 else None
    if bad and monkey == "plan":
        plan = plan_of(here, min_peers=3)
    if bad and monkey == "store":
        stores = {"another": open_object_store("memory://")}
    if bad and monkey == "step":
        update.outer_step = 5
    if bad and monkey == "fetch":
        import megalith.gather.window as window

        window.Gatherer = Failing  # type: ignore[misc]
    try:
        report = run_window(plan, parameters, update, stores, ranks=ranks, options=OPTIONS)
    except MegalithError as error:
        return {"error": f"{type(error).__name__}: {error}", "log": ranks.log}
    return facts(report, update, parameters) | {"log": ranks.log}


@pytest.fixture(scope="module")
def failures() -> dict[str, list[dict[str, Any]]]:
    return {monkey: _fail(monkey) for monkey in ("fetch", "plan", "store", "step")}


def _fail(monkey: str) -> list[dict[str, Any]]:
    with FaultServer() as server:
        World(server).add(dict(PEERS))
        return run_ranks(fail, server.endpoint, monkey, world_size=2)


def test_uids_of_a_rank_that_cannot_fetch_go_to_the_others(
    failures: dict[str, list[dict[str, Any]]], undisturbed: dict[str, Any]
) -> None:
    assert all(same(each, undisturbed) for each in failures["fetch"])


@pytest.mark.parametrize("monkey", ["plan", "step"])
def test_ranks_that_do_not_stand_alike_skip_the_window(
    failures: dict[str, list[dict[str, Any]]], undisturbed: dict[str, Any], monkey: str
) -> None:
    for rank, each in enumerate(failures[monkey]):
        assert each["reason"] == "PLAN_MISMATCH"
        assert each["detail"] == ("rank 1: min_peers" if monkey == "plan" else "rank 1: outer_step")
        assert each["weights"] == OuterUpdate(small_schema()).fingerprint(weights()).hash
        assert each["outer_step"] == (5 if monkey == "step" and rank == 1 else 0)


def test_an_error_of_one_rank_is_raised_on_all(failures: dict[str, list[dict[str, Any]]]) -> None:
    other, own = (each["error"] for each in failures["store"])
    assert own.startswith("InputError: the plan names store 'default'")
    assert other.startswith("RankFailedError: ready: rank 1: InputError")


@pytest.mark.parametrize("monkey", ["fetch", "plan", "store", "step"])
def test_no_rank_leaves_the_sequence_of_exchanges(
    failures: dict[str, list[dict[str, Any]]], monkey: str
) -> None:
    one, two = failures[monkey]
    assert one["log"] == two["log"]
