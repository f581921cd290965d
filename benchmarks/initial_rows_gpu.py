"""Checks that initial rows are bit-identical on a GPU and on the CPU, and records the result.

    python benchmarks/initial_rows_gpu.py [--ids N] [--output PATH]

Needs CUDA. CI has no GPU; the dated result file in benchmarks/results is the record.
"""

import argparse
import sys
from pathlib import Path

import torch
from harness import Bar, command_line, machine, print_bars, versions, write_result

from megalith import Constant, Normal, Table, TableConfig, TruncatedNormal, Uniform
from megalith.table.initializers import initial_rows, table_key
from megalith.table.optimizers import SGD

DIM = 24


def main() -> None:
    parser = argparse.ArgumentParser(description="benchmarks/initial_rows_gpu.py")
    parser.add_argument("--ids", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path, help="where to save the result")
    options = parser.parse_args()
    extremes = torch.tensor([0, -1, 1, 2**63 - 1, -(2**63)])
    ids = torch.cat([extremes, torch.randint(-(2**62), 2**62, (options.ids,))])
    key = table_key(7, "t")
    checks: dict[str, dict[str, int]] = {}
    for initializer in (Constant(0.3), Uniform(), Normal(0.1, 2.0), TruncatedNormal(0.0, 0.01)):
        on_cpu = initial_rows(key, ids, [(DIM, initializer)])
        on_gpu = initial_rows(key, ids.cuda(), [(DIM, initializer)]).cpu()
        native = Table(TableConfig("t", dim=DIM, optimizer=SGD(), initializer=initializer), seed=7).lookup(
            ids
        )
        bits = [x.contiguous().view(torch.int32) for x in (on_cpu, on_gpu, native)]
        checks[repr(initializer)] = {
            "values": on_cpu.numel(),
            "gpu_differs": int((bits[0] != bits[1]).sum()),
            "native_differs": int((bits[0] != bits[2]).sum()),
        }
    differ = {side: sum(c[side] for c in checks.values()) for side in ("gpu_differs", "native_differs")}
    bars = [Bar(side, number, 0, at_most=True) for side, number in differ.items()]
    print_bars(bars)
    if options.output:
        content = {
            "benchmark": "initial_rows_gpu",
            "command": command_line(sys.argv[1:]),
            "machine": machine(),
            "versions": versions(("megalith", "torch")),
            "gpu": torch.cuda.get_device_name(),
            "checks": checks,
            "bars": bars,
        }
        write_result(options.output, content)
    assert not any(differ.values()), checks


if __name__ == "__main__":
    main()
