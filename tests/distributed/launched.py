"""What a launcher starts in test_launch.py: `python -m tests.distributed.launched FOLDER`, once a rank.

Each rank writes what it found out to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from megalith.distributed.launcher_environment import configure

SECONDS = 60


class Model(nn.Module):
    """Weights and buffers of many types; those of different seeds differ in every one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(3, 2)
        self.tied = self.layer.weight
        self.turned = nn.Parameter(torch.randn(2, 5).t())  # not contiguous
        self.short = nn.Parameter(torch.randn(7).bfloat16(), requires_grad=False)
        self.norm = nn.BatchNorm1d(2)
        self.norm.num_batches_tracked += seed
        self.register_buffer("mask", torch.tensor([seed % 2 == 0, True, False]))
        self.register_buffer("phase", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("unsaved", torch.tensor(float("nan") if seed == 7 else 1.0), persistent=False)
        self.register_buffer("empty", torch.empty(0))

    def lists(self) -> dict[str, list[int]]:
        """Every tensor, bit for bit."""
        named = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {
            name: x.detach().contiguous().reshape(-1).view(torch.uint8).tolist() for name, x in named.items()
        }


def main(folder: Path) -> None:
    signal.alarm(SECONDS)  # whatever it hangs in
    torch.set_num_threads(1)
    before = dict(os.environ)
    setup = configure(folder / "run")
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    skipped, model = Model(setup.rank + 7), Model(setup.rank + 7)
    configure(folder / "run", model=skipped, broadcast=False)
    again = configure(setup.run_dir, model=model)
    found = {
        "rank": [setup.rank, setup.size, setup.local_rank, setup.local_size],
        "group": [dist.get_rank(), dist.get_world_size()],
        "launcher": setup.launcher,
        "run_dir": str(setup.run_dir.relative_to(folder)),
        "again": again == setup,
        "environ is as it was": dict(os.environ) == before,
        "skipped": skipped.lists(),
        "model": model.lists(),
    }
    (folder / f"{setup.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
