"""Training on parameter servers: AUC of asynchronous workers against synchronous ones, on MovieLens-1M.

    python benchmarks/server_training.py [--quick] [--servers N] [--workers N] [--output PATH]

The same model, data and settings in three placements: one process, synchronous workers, and asynchronous
workers, each of which trains on batches of its own. The result of an asynchronous run depends on the order
in which updates arrive. A full run saves results/server_training-DATE.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import (
    Bar,
    command_line,
    machine,
    print_bars,
    print_table,
    progress,
    result_path,
    versions,
    write_result,
)

from megalith.ps.launch import start_ray, stop_ray
from megalith.training import Run, RunConfig

PACKAGES = ("megalith", "torch", "ray", "numpy")
LARGEST = 0.005
"""How much lower the AUC of asynchronous training may be, relative to that of synchronous training."""


def train(config: RunConfig) -> dict[str, float]:
    """Trains and evaluates; returns AUC, log loss and seconds."""
    with tempfile.TemporaryDirectory() as folder, Run(config, Path(folder) / "run") as run:
        began = time.monotonic()
        run.train()
        seconds = time.monotonic() - began
        result = run.evaluate()
        assert result is not None
        return {
            "auc": result.auc,
            "log_loss": result.log_loss,
            "steps": run.step,
            "samples": run.samples,
            "seconds": seconds,
        }


def measure(settings: Mapping[str, Any], quick: bool) -> dict[str, dict[str, float]]:
    """Returns the numbers of each placement."""
    limit = {"max_steps": 40} if quick else {}
    base = RunConfig.from_dict({"train": {"threads": 1, **limit}})
    placements = {
        "one process": {},
        "synchronous": {"train_server_mode": "sync", **settings},
        "asynchronous": {"train_server_mode": "async", **settings},
    }
    found = {}
    for name, flags in placements.items():
        progress(name)
        found[name] = train(base.changed(**flags))
    return found


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few steps; nothing is saved")
    parser.add_argument("--servers", type=int, default=2, help="default 2")
    parser.add_argument("--workers", type=int, default=2, help="default 2")
    parser.add_argument("--output", type=Path, help="where to save the result")
    options = parser.parse_args(arguments)
    settings = {"train_servers": options.servers, "train_workers": options.workers}
    here = machine()
    start_ray()
    try:
        found = measure(settings, options.quick)
    finally:
        stop_ray()
    columns = ("AUC", "log loss", "steps", "samples/s")
    rows = [
        [
            name,
            f"{x['auc']:.4f}",
            f"{x['log_loss']:.4f}",
            f"{x['steps']:,}",
            f"{x['samples'] / x['seconds']:,.0f}",
        ]
        for name, x in found.items()
    ]
    print_table("MovieLens-1M, one epoch, DeepFM", ("placement", *columns), rows)
    ratio = found["asynchronous"]["auc"] / found["synchronous"]["auc"]
    bars = [Bar("AUC of asynchronous divided by synchronous training", ratio, 1 - LARGEST)]
    print_bars(bars)
    content = {
        "benchmark": "server_training",
        "command": command_line(arguments),
        "machine": here,
        "versions": versions(PACKAGES),
        "settings": dict(settings),
        "sections": {"placements": found},
        "bars": bars,
    }
    if options.output or not options.quick:
        write_result(options.output or result_path("server_training"), content)


if __name__ == "__main__":
    main(sys.argv[1:])
