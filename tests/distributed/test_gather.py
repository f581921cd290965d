"""A window on one, two and four ranks: the same result, findings, weights and artifact, with each object
downloaded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import run_ranks
from tests.gather.fault_server import FaultServer
from tests.gather.scenarios import SCENARIOS, play_all, world_of

Found = dict[int, tuple[list[Any], dict[str, int], Path]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By number of ranks: what each rank says, the server's counts of downloads, the artifacts."""
    found = {}
    for size in (1, 2, 4):
        folder = tmp_path_factory.mktemp(f"ranks-{size}")
        with FaultServer() as server:
            for scenario in SCENARIOS:
                world_of(scenario, server).add(dict(scenario.peers))
            said = run_ranks(play_all, server.endpoint, str(folder), world_size=size)
            found[size] = (said, server.downloads(), folder)
    return found


@pytest.mark.parametrize("number", range(len(SCENARIOS)), ids=[s.name for s in SCENARIOS])
@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_comes_to_what_one_rank_comes_to(played: Found, size: int, number: int) -> None:
    ((alone, _),) = played[1][0]
    for said, _ in played[size][0]:
        assert said[number] == alone[number]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_object_is_downloaded_once_and_unused_reserves_never(played: Found, size: int) -> None:
    said, downloads, _ = played[size]
    assert downloads
    for key, count in downloads.items():
        number, uid = int(key.partition("/")[0]), int(key.rpartition("/")[2].removesuffix(".gather"))
        scenario, records = SCENARIOS[number], said[0][0][number]["result"]["records"]
        assert uid in {record["uid"] for record in records}, scenario.name
        assert count == 1 or scenario.peers[uid] in ("replaced", "changing"), (scenario.name, uid, count)


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_take_part_in_the_same_exchanges(played: Found, size: int) -> None:
    logs = [log for _, log in played[size][0]]
    assert logs[0]
    assert all(log == logs[0] for log in logs)


@pytest.mark.parametrize("size", [2, 4])
def test_artifacts_have_the_same_bytes(played: Found, size: int) -> None:
    one, many = (
        {p.relative_to(f): p.read_bytes() for p in f.rglob("*") if p.is_file()}
        for f in (played[1][2], played[size][2])
    )
    assert sorted(one) == sorted(many)
    assert [path for path in one if one[path] != many[path]] == []
