"""megalith bench: suites as processes, their results and page; comm: the data of each exchange, measurements
of real processes, output and plots."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import textwrap
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith.cli import bench
from megalith.distributed.comm_bench import PATTERNS, TRANSPORTS, CommSettings, RankLink, measure_local
from megalith.distributed.exchange import Exchange
from megalith.errors import RankFailedError
from tests.cli.support import as_json, error, megalith, words
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


# ---- suites


ROOT = Path(__file__).parents[2]
HELPERS = {"serving_roles": "the processes of serving.py"}


def test_every_script_that_measures_is_a_suite() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert {suite.script for suite in bench.SUITES.values()} == scripts - HELPERS.keys()


def test_without_a_suite_the_suites_and_their_peers_are_listed() -> None:
    printed = words("bench")
    for name, suite in bench.SUITES.items():
        assert name in printed
        assert all(peer in printed for peer in suite.peers)
    assert f"scripts: {ROOT / 'benchmarks'}" in printed


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a small benchmark in the place of that of tables."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    shutil.copy(ROOT / "benchmarks" / "harness.py", folder)
    script = """
        import sys
        from harness import Run, run_sections
        def find(run):
            run.bar("find vs <peer>", 1.25 if run.quick else 2.5, 2.0)
        def step(run):
            run.bar("seconds", 0.5, 1.0, at_most=True)
            run.bar("reported", 3.0)
        def broken(run):
            raise ValueError("no rows")
        sections = {"find": find, "step": step}
        if "find,broken" in sys.argv:
            sections["broken"] = broken
        run_sections("table_cpu", sys.argv[1:], Run, sections, ("torch", "torchrec"))
    """
    (folder / "table_cpu.py").write_text(textwrap.dedent(script))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_suite_saves_its_result_and_shows_every_target(checkout: Path) -> None:
    printed = words("bench", "table")

    today = date.today().isoformat()
    result = json.loads((checkout / "benchmarks" / "results" / f"table_cpu-{today}.json").read_text())
    assert [bar["verdict"] for bar in result["bars"]] == ["met", "met", "reported"]
    assert result["command"] == "python benchmarks/table_cpu.py"
    assert re.search(r"peers: fbgemm-gpu-cpu .*, torchrec ", printed)
    assert re.search(
        rf"machine: cpu .*cores {os.cpu_count()}.* versions: .*torch {re.escape(torch.__version__)}", printed
    )
    assert re.search(
        "table │ find vs <peer> │ 2.5 │ at least 2 │ met .* seconds │ 0.5 │ at most 1 │ met", printed
    )
    page = (checkout / "benchmarks" / "results" / f"bench-table-{today}.html").read_text()
    assert "find vs &lt;peer&gt;" in page
    assert re.findall(r'<i style="width:([0-9.]+)%', page) == ["41.7", "66.7"]  # 2.5 / 2 and 1 / 0.5 of 3


def test_a_partial_run_does_not_replace_the_committed_results(checkout: Path) -> None:
    assert "1.25 │ at least 2 │ MISSED" in words("bench", "table", "--quick")
    assert "seconds" not in words("bench", "table", "--only", "find")
    assert not (checkout / "benchmarks" / "results").exists()
    assert len(list((checkout / "runs" / "bench").iterdir())) == 2  # the second run replaces the first


def test_a_suite_that_fails_is_an_error_and_the_rest_is_shown(checkout: Path) -> None:
    result = megalith("bench", "table", "--only", "find,broken", "--output", checkout)
    assert result.exit_code == 1
    assert "find vs <peer>" in result.stdout
    assert "error: these suites failed: table. Their output above has the reason" in result.stderr


def test_a_wheel_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megalith.__file__", str(tmp_path / "site-packages" / "megalith" / "__init__.py"))
    assert "a wheel does not contain them. Run the command in a checkout of Megalith" in error(
        "bench", "table"
    )
    assert "scripts: not here: run the command in a checkout of Megalith" in words("bench")
