"""The loop of `megalith train` (reading ahead, copies, steps, metrics, log), on a GPU and on the CPU.

    python benchmarks/train_overhead.py [--device cuda] [--steps 200] [--output PATH]
    python benchmarks/train_overhead.py --features 26 --batch-size 65536 [--profile]

Without --features it measures three models: one like the demo's (4 features, batch 1,024) and one like
Criteo's (26 features and 13 dense values, batch 4,096 and 65,536). It prints samples per second, Python per
step (the time of a step less the time that it waits for the device), and how many kernels were compiled after
the first steps. Batches are made before the clock starts, so readers are not measured (data.py); one id in a
hundred is new. On the CPU, Python includes the computation itself.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import Bar, command_line, machine, versions, write_result

from megalith.cli.train import TrainingBar
from megalith.data import Batch, Reader
from megalith.ragged import Ragged
from megalith.training import Run, RunConfig, steps
from megalith.training import run as run_module
from megalith.training.data_source import DataSource

MODELS = ((4, 1024), (26, 4096), (26, 65536))  # features and batch size
NEW_IDS = 0.01
DENSE = 13
BATCHES = 20


class CachedReader(Reader):
    """Repeats batches; a share of their ids is new each time."""

    def __init__(self, batches: list[Batch], most: int) -> None:
        super().__init__(batch_size=len(batches[0]))
        self._batches = batches
        self._most = most

    @property
    def feature_names(self) -> list[str]:
        return list(self._batches[0].features)

    @property
    def num_dense(self) -> int:
        return DENSE

    def _start(self) -> dict[str, Any]:
        return {"batch": 0}

    def _check(self, position: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.position["batch"], self._most):
            batch = self._batches[number % len(self._batches)]
            columns = {}
            for name, column in batch.features.items():
                values = column.values.clone()
                new = max(1, int(NEW_IDS * values.numel()))
                at = number * new % (values.numel() - new + 1)
                values[at : at + new] += (number + 1) << 32
                columns[name] = Ragged.trusted(values, column.row_splits, single=True)
            self._at = self._with_shard({"batch": number + 1})
            yield replace(batch, features=columns, position=self._at)


def make_batches(features: int, size: int) -> list[Batch]:
    """Ids by Zipf's law with exponent 1.05, a million per feature and one per row, as a reader makes them."""
    generator = torch.Generator().manual_seed(0)
    batches, splits = [], torch.arange(size + 1)
    for _ in range(BATCHES):
        columns = {}
        for k in range(features):
            uniform = torch.rand(size, generator=generator, dtype=torch.float64)
            rank = (1 - uniform * (1 - 1e6**-0.05)) ** -20
            columns[f"c{k}"] = Ragged.trusted(rank.long() * 2_654_435_761 + k, splits, single=True)
        labels = (torch.rand(size, generator=generator) < 0.25).float()
        dense = torch.randn(size, DENSE, generator=generator)
        batches.append(Batch(columns, labels, dense, None, 0, {"batch": 0}))
    return batches


def compiled_kernels() -> list[str]:
    """Return a list that gets the name of every kernel that Triton compiles or loads from now on."""
    names: list[str] = []
    try:
        import triton
    except ImportError:
        return names

    def note(*_: object, **given: Any) -> None:
        names.append(given["fn"].name)

    triton.knobs.runtime.jit_post_compile_hook = note
    return names


def measure(given: argparse.Namespace, features: int, size: int) -> dict[str, Any]:
    waited = 0.0

    def waiting_float(value: Any) -> float:
        nonlocal waited
        began = time.perf_counter()
        found = float(value)
        waited += time.perf_counter() - began
        return found

    most = given.warm + given.steps
    batches = make_batches(features, size)

    def open_source(config: RunConfig) -> DataSource:
        return DataSource("repeated batches", CachedReader(batches, most), None, None, config.data)

    vars(steps)["float"] = waiting_float  # the step waits for the device only there
    vars(run_module)["open_source"] = open_source
    config = RunConfig().changed(
        data_kind="synthetic",
        data_batch_size=size,
        train_device=given.device,
        train_max_steps=given.warm,
        train_epochs=99,
        train_log_every=100,
    )
    compiled = compiled_kernels()
    profile = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, f"{folder}/run")
        run.train()  # compiles kernels
        first = len(compiled)
        run.config = config.changed(train_max_steps=most)
        before, waited = run.seconds, 0.0
        with TrainingBar(run) as bar:
            if given.profile:
                profile.enable()
            run.train(bar)
            profile.disable()
        seconds = run.seconds - before
    if given.profile:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(50)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    result = {
        "features": features,
        "batch_size": size,
        "step_ms": seconds / given.steps * 1e3,
        "python_ms": (seconds - waited) / given.steps * 1e3,
        "samples_per_second": size * given.steps / seconds,
        "kernels": first,
        "late_kernels": sorted(set(compiled[first:])),
    }
    print(given.device, result, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm", type=int, default=50, help="steps before the clock starts")
    parser.add_argument("--features", type=int, help="measure one model with so many features")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--profile", action="store_true", help="print where Python spends its time")
    parser.add_argument("--output", type=Path, help="where to save the result")
    given = parser.parse_args()
    models = MODELS if given.features is None else [(given.features, given.batch_size)]
    results = [measure(given, *model) for model in models]
    if given.output:
        required = 1.5 if given.device == "cuda" else None
        content = {
            "benchmark": "train_overhead",
            "command": command_line(sys.argv[1:]),
            "machine": machine(),
            "versions": versions(("megalith", "torch", "triton")),
            "models": results,
            "bars": [
                Bar("Python per step of the first model, ms", results[0]["python_ms"], required, at_most=True)
            ],
        }
        write_result(given.output, content)


if __name__ == "__main__":
    main()
