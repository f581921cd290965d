"""Gather on one, two and four ranks: how the time decreases when ranks share the downloads.

    python benchmarks/gather_ranks.py [--quick] [--rounds N] [--output PATH]

An object server on loopback responds after a fixed latency; each rank has a fixed number of downloads in
flight, as with a memory budget. Ranks are processes. A time is that of fetching and validation on the slowest
rank, the minimum over the rounds, because the latency is exact and everything else is noise. A full run saves
results/gather_ranks-DATE.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from harness import Bar, command_line, machine, print_bars, result_path, versions, write_result

from megalith.distributed.surviving_launch import launch
from megalith.gather.simulation import Simulation, write_job

SIZES = (1, 2, 4)
BARS = {2: 1.6, 4: 2.5}


def seconds(simulation: Simulation, ranks: int) -> tuple[float, str]:
    """Returns the time of a window's gather, and the hash of the resulting weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = write_job(folder, simulation)
        ended = launch([sys.executable, "-m", "megalith.gather.simulation", str(job)], ranks, timeout=300.0)
        assert all(each.code == 0 for each in ended), ended
        counts = Counter()
        for path in folder.glob("downloads-*.json"):
            counts.update(json.loads(path.read_text()))
        assert set(counts.values()) == {1}, "an object was downloaded twice"
        window = json.loads((folder / "window-0.json").read_text())
        return window["metrics"]["gather/seconds"], (folder / "weights").read_text()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few peers, one round; nothing is saved")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="where to save the result")
    options = parser.parse_args(arguments)
    peers, rounds = (20, 1) if options.quick else (40, options.rounds)
    simulation = Simulation(peers=peers, latency=0.5, in_flight=2, faults={}, deadline=240.0)
    here = machine()
    found: dict[int, list[float]] = {size: [] for size in SIZES}
    hashes = set()
    for _ in range(rounds):
        for size in SIZES:
            took, weights = seconds(simulation, size)
            found[size].append(took)
            hashes.add(weights)
    assert len(hashes) == 1, "weights differ between numbers of ranks"
    best = {size: min(times) for size, times in found.items()}
    note = f"{peers} peers, {simulation.latency:g} s latency, {simulation.in_flight} in flight"
    bars = [
        Bar(f"time of one rank / of {size} ranks", best[1] / best[size], required=least, note=note)
        for size, least in BARS.items()
    ]
    print_bars(bars)
    content = {
        "benchmark": "gather_ranks",
        "command": command_line(arguments),
        "machine": here,
        "versions": versions(["torch", "obstore", "megalith"]),
        "settings": asdict(simulation),
        "seconds": {str(size): times for size, times in found.items()},
        "bars": bars,
    }
    if options.output or not options.quick:
        write_result(options.output or result_path("gather_ranks"), content)


if __name__ == "__main__":
    main(sys.argv[1:])
