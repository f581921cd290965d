"""Python per step of `megalith train`: the time of a step less the time that it waits for the device.

    python benchmarks/train_overhead.py [--device cuda] [--steps 500] [--output PATH]

The bar on a GPU is 1.5 ms a step. On a CPU the numbers include the computation itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Bar, command_line, machine, versions, write_result

from megalith.cli.train import TrainingBar
from megalith.training import Run, RunConfig, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--data", default="synthetic", choices=("synthetic", "movielens"))
    parser.add_argument("--output", type=Path, help="where to save the result")
    given = parser.parse_args()
    waited = 0.0

    def waiting_float(value: Any) -> float:
        nonlocal waited
        began = time.perf_counter()
        found = float(value)
        waited += time.perf_counter() - began
        return found

    vars(steps)["float"] = waiting_float  # the step waits for the device only there
    config = RunConfig().changed(
        data_kind=given.data, train_device=given.device, train_max_steps=100, train_threads=1, train_epochs=99
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, f"{folder}/run")
        run.train()  # compiles kernels
        run.config = config.changed(train_max_steps=100 + given.steps)
        before, waited = run.seconds, 0.0
        with TrainingBar(run) as bar:
            run.train(bar)
        seconds = run.seconds - before
    each, wait = seconds / given.steps * 1e3, waited / given.steps * 1e3
    print(f"{given.device}: {each:.2f} ms a step, of which {wait:.2f} ms wait for the device")
    print(f"Python per step: {each - wait:.2f} ms")
    if given.output:
        required = 1.5 if given.device == "cuda" else None
        content = {
            "benchmark": "train_overhead",
            "command": command_line(sys.argv[1:]),
            "machine": machine(),
            "versions": versions(("megalith", "torch", "triton")),
            "bars": [Bar("Python per step, ms", each - wait, required, at_most=True)],
        }
        write_result(given.output, content)


if __name__ == "__main__":
    main()
