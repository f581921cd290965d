"""Checks that initial rows are bit-identical on a GPU and on the CPU, and records the result.

Needs CUDA: python benchmarks/initial_rows_gpu.py [OUTPUT.json]. CI has no GPU; the dated result file in
benchmarks/results is the record.
"""

import datetime
import json
import platform
import sys
from pathlib import Path

import torch

from megalith import Constant, Normal, Table, TableConfig, TruncatedNormal, Uniform
from megalith.table.initializers import initial_rows, table_key
from megalith.table.optimizers import SGD

IDS, DIM = 1_000_000, 24


def main() -> None:
    extremes = torch.tensor([0, -1, 1, 2**63 - 1, -(2**63)])
    ids = torch.cat([extremes, torch.randint(-(2**62), 2**62, (IDS,))])
    key = table_key(7, "t")
    checks: dict[str, dict[str, object]] = {}
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
    result = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "checks": checks,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")
    assert all(c["gpu_differs"] == 0 and c["native_differs"] == 0 for c in checks.values())


if __name__ == "__main__":
    main()
