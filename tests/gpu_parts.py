"""Runs the tests that need a GPU in parts, several at a time, and prints a summary.

    python tests/gpu_parts.py [--parts NAME,...] [--at-once N] [--seconds S]      (make test-gpu)
    python tests/gpu_parts.py --memory [...]                                      (make check-gpu-memory)

Most of the time goes to compiling kernels, on one core for each process; so parts run side by side on one
GPU. A part that takes longer than its limit is stopped and counts as failed. The output of a failed part is
printed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SHARES = 24
"""Parts into which the tests of the engine are divided."""
MONOLITH = [
    f"tests/compat/monolith/test_{name}.py"
    for name in (
        "buffer_ops",
        "cuda_partitioned_tables",
        "distribution_ops",
        "layout_ops",
        "layout_versions",
        "reduce_ops",
    )
]
TESTS: dict[str, list[str]] = {
    "stress": ["tests/table/engines/gpu_stress.py"],
    "ranks": ["tests/distributed/gpu_shards.py", "tests/distributed/test_cuda_shards.py"],
    "runs": ["tests/training/gpu_run.py", "tests/nn/gpu_mixed.py", "tests/nn/test_cuda_with_torch.py"],
    "ops": ["tests/ops/test_op_devices.py", "tests/compat/monolith/gpu_monolith.py", *MONOLITH],
}
ENGINE_TESTS = ["tests/table/engines"]
MEMORY_CHECK = "tests/table/engines/gpu_memory_check.py"
MEMORY_CASES = ("plain", "policies", "segments", "zeros", "atomic", "host_tier", "collection", "mixed_dims")
TAIL = 6000


class Part(NamedTuple):
    """A process: its name, command and variables."""

    name: str
    command: list[str]
    environment: dict[str, str]


class Outcome(NamedTuple):
    """How a part ended."""

    name: str
    code: int
    seconds: float
    output: str

    @property
    def summary(self) -> str:
        lines = [line for line in self.output.strip().splitlines() if line.strip()]
        last = lines[-1] if lines else ""
        return "ran out of time" if self.code in (124, -signal.SIGKILL) else last[:100]


def test_parts() -> list[Part]:
    """The parts of `make test-gpu`, the longest first."""
    pytest = [sys.executable, "-m", "pytest", "-m", "not soak", "--tb=short", "--durations=5"]
    parts = [
        Part(f"engine{k + 1}", [*pytest, *ENGINE_TESTS], {"MEGALITH_TEST_SHARE": f"{k}/{SHARES}"})
        for k in range(SHARES)
    ]
    return [*parts, *(Part(name, [*pytest, *files], {}) for name, files in TESTS.items())]


def memory_parts() -> list[Part]:
    """The parts of `make check-gpu-memory`."""
    return [
        Part(
            f"{tool}-{case}",
            [
                "compute-sanitizer",
                "--tool",
                tool,
                "--error-exitcode",
                "1",
                sys.executable,
                MEMORY_CHECK,
                case,
            ],
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
        for tool in ("memcheck", "racecheck")
        for case in MEMORY_CASES
    ]


def run(part: Part, limit: float) -> Outcome:
    """Run a part; after the limit, end it and the processes that it started."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            part.command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **part.environment},
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = 124
        output.seek(0)
        text = output.read().decode(errors="replace")
    outcome = Outcome(part.name, code, time.monotonic() - began, text)
    print(f"{part.name}: {'passed' if code == 0 else 'FAILED'} in {outcome.seconds:.0f} s", flush=True)
    return outcome


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen parts; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--memory", action="store_true", help="run kernels under compute-sanitizer instead")
    parser.add_argument("--parts", default="", help="names of parts, separated by commas; default all")
    parser.add_argument("--at-once", type=int, default=16, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of each part")
    chosen = parser.parse_args(arguments)
    known = memory_parts() if chosen.memory else test_parts()
    names = [name for name in chosen.parts.split(",") if name]
    unknown = set(names) - {part.name for part in known}
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}; known: {', '.join(part.name for part in known)}")
    os.chdir(Path(__file__).parents[1])
    began = time.monotonic()
    with ThreadPoolExecutor(chosen.at_once) as pool:
        parts = [part for part in known if not names or part.name in names]
        outcomes = list(pool.map(lambda part: run(part, chosen.seconds), parts))
    failed = [outcome for outcome in outcomes if outcome.code]
    for outcome in failed:
        print(f"\n==== {outcome.name}\n{outcome.output[-TAIL:]}")
    print(f"\n{'part':<20} {'result':<8} {'seconds':>7}  last line")
    for outcome in outcomes:
        result = "FAILED" if outcome.code else "passed"
        print(f"{outcome.name:<20} {result:<8} {outcome.seconds:>7.0f}  {outcome.summary}")
    print(
        f"{len(outcomes) - len(failed)} of {len(outcomes)} parts passed in {time.monotonic() - began:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
