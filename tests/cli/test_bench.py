"""megalith bench comm: the data of each exchange, measurements of real processes, output and plots."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith.distributed.comm_bench import PATTERNS, TRANSPORTS, CommSettings, RankLink, measure_local
from megalith.distributed.exchange import Exchange
from megalith.errors import RankFailedError
from tests.cli.support import as_json, error, words
from tests.distributed.ranks import run_ranks

LIMIT = 120
COMM = ("bench", "comm")
QUICK = (*COMM, "--sizes", "1KiB,64K", "--seconds", "0.02", "--max-calls", "5")
LAUNCHERS = re.compile(
    "RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|OMPI_.*|SLURM_.*|MASTER_.*|TORCHELASTIC_.*"
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if LAUNCHERS.fullmatch(name)]:
        monkeypatch.delenv(name)


def run(*command: str) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- the exchanges


def exchanged(sizes: list[int], transport: str) -> dict[str, list[dict[str, Any]]]:
    """What each pattern received, and the bytes it counts, by size."""
    settings = CommSettings(dim=4, pieces=3)
    link = RankLink(exchange=None if transport == "gloo" else Exchange(transport=transport))
    found: dict[str, list[dict[str, Any]]] = {}
    for name, make in PATTERNS.items():
        for size in sizes:
            exchange = make(size, settings, link)
            exchange.call()
            values, counts = exchange.call().flatten().unique(return_counts=True)
            received = dict(zip(values.tolist(), counts.tolist(), strict=True))
            dtype = str(exchange.call().dtype)
            seen = {"received": received, "size": exchange.size, "sent": exchange.sent, "dtype": dtype}
            found.setdefault(name, []).append(seen)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_rank_receives_the_data_of_the_pattern_from_every_rank(transport: str) -> None:
    ranks = 3
    results = run_ranks(exchanged, [7200, 1], transport, world_size=ranks)
    for rank, found in enumerate(results):
        even, rows, ids, uneven = (found[name][0] for name in ("even", "rows", "ids", "uneven"))
        assert even["received"] == dict.fromkeys(range(ranks), 600)
        assert (even["size"], even["sent"]) == (7200, 4800)
        assert rows["received"] == dict.fromkeys(range(ranks), 600)
        assert ids["received"] == dict.fromkeys(range(ranks), 300)
        assert (ids["dtype"], ids["size"], ids["sent"]) == ("torch.int64", 7200, 4800)
        own = [982, 491, 327][rank]  # 1800 elements by 1 : 1/2 : 1/3
        assert uneven["received"] == dict.fromkeys(range(ranks), own)
        assert uneven["sent"] == 4 * (1800 - own)
        assert found["all_reduce"][0]["size"] == found["all_reduce"][0]["sent"] == 7200
        elements = {name: one["size"] for name, (_, one) in found.items()}  # a byte is rounded up to one
        assert elements == {"all_reduce": 4, "even": 4, "uneven": 4, "ids": 8, "rows": 16}


# ---- without a launcher


def test_without_a_launcher_it_measures_two_local_ranks_as_json_and_plots_them(tmp_path: Path) -> None:
    page = tmp_path / "comm.html"
    found = as_json(*QUICK, "--plot", page)
    assert found["ranks"] == 2
    assert found["left_out"] == 0
    assert found["machine"]["torch"] == torch.__version__
    assert [(r["pattern"], r["transport"], r["size"]) for r in found["results"]] == [
        (pattern, transport, size)
        for pattern in PATTERNS
        for transport in (("gloo",) if pattern == "all_reduce" else ("gloo", "shared_memory"))
        for size in (1024, 65536)
    ]
    for each in found["results"]:
        assert 3 <= each["calls"] <= 5
        assert 0 < each["best"] <= each["latency"]
        part = 1 if each["pattern"] == "all_reduce" else 0.5  # of two ranks each keeps half, on average
        assert each["goodput"] == pytest.approx(each["size"] * part / each["latency"], rel=0.01)
    drawn = page.read_text()
    assert drawn.count("<svg") == 4  # latency and goodput of each transport
    assert drawn.count("<circle") == 2 * len(found["results"])
    assert not re.search("NaN|undefined|<script", drawn)


def test_the_table_names_patterns_and_sizes() -> None:
    printed = words(*QUICK, "--pattern", "rows", "--pattern", "ids", "--ranks", "3", "--dim", "8")
    assert "3 ranks, gloo" in printed
    rows = r"all-to-all, rows │ gloo │ 1.0 KiB │.*│ 64.0 KiB │.*│ shared memory │ 1.0 KiB │.*│ 64.0 KiB │.*"
    assert re.search(rows + rows.replace("rows", "ids"), printed)


def test_what_exceeds_the_budget_is_left_out_and_reported() -> None:
    printed = words(*QUICK, "--budget", "1e-9")
    assert "not measured: 18 of 18, because --budget was used up" in printed


def test_a_rank_that_dies_ends_the_measurement_with_an_error() -> None:
    stream = measure_local(CommSettings(sizes=(1024,) * 1000, seconds=0.01), 2)
    next(stream)
    multiprocessing.active_children()[0].kill()
    with pytest.raises(RankFailedError, match=r"rank [01] (exited|failed)"):
        list(stream)
    assert multiprocessing.active_children() == []


def test_closing_the_stream_ends_all_processes() -> None:
    stream = measure_local(CommSettings(sizes=(1024,) * 1000, seconds=0.01), 2)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


# ---- under a launcher


def test_under_torchrun_the_ranks_are_its_own_and_one_of_them_prints() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    chosen = ("--pattern", "even", "--transport", "shared_memory")
    found = json.loads(run(*command, "-m", "megalith", *QUICK, *chosen, "--json"))
    assert found["ranks"] == 2
    results = [(result["pattern"], result["transport"], result["size"]) for result in found["results"]]
    assert results == [("even", "shared_memory", 1024), ("even", "shared_memory", 65536)]


@pytest.mark.parametrize(
    ("environ", "flags", "printed"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, [], "torchrun started 1 rank(s), but at least two are needed"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["--ranks", "4"], "torchrun started 2 rank(s), but 4 are needed"),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            [],
            "OpenMPI started 2 ranks, but MASTER_ADDR is not set",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::megalith.distributed.launcher_environment.LaunchWarning")
def test_a_launcher_that_does_not_suit_is_an_error(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], flags: list[str], printed: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert printed in error(*COMM, *flags)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        (["--sizes", "1KiB,much"], "--sizes: 'much' is not a number of bytes such as 512, 64KiB or 1M"),
        (["--sizes", "1024g"], "sizes must be within 1 .."),
        (["--pattern", "gossip"], "unknown pattern 'gossip' (known: all_reduce, even,"),
        (["--transport", "ucx"], "unknown transport 'ucx' (known: gloo, shared_memory)"),
        (["--pattern", "all_reduce", "--transport", "shared_memory"], "all_reduce has no shared memory"),
        (["--seconds", "0"], "seconds must be above 0"),
        (["--budget", "nan"], "budget must be above 0"),
        (["--plot", "/no/such/place.html"], "--plot: /no/such is not a directory"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_1(flags: list[str], printed: str) -> None:
    assert printed in error(*COMM, *flags)
