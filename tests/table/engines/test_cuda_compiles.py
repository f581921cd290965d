"""The kernels of the cuda engine compile for a GPU, also where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.table.engines.cuda_configs import OPTIMIZERS

ROOT = Path(__file__).parents[3]
SHARES = 6


def compile_kernels(*names: str) -> str:
    """What compile_kernels.py prints; a process of its own, because Triton's mode is fixed at its import."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, str(ROOT / "tests/table/engines/compile_kernels.py"), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.soak
@pytest.mark.parametrize("share", range(SHARES))
def test_the_steps_of_every_optimizer_compile(share: int) -> None:
    names = [name for name in OPTIMIZERS if name != "in_torch"]
    assert "kernels compiled for cuda 90" in compile_kernels(*names[share::SHARES])


@pytest.mark.soak
def test_all_other_kernels_compile() -> None:
    assert "kernels compiled for cuda 90" in compile_kernels("calls")
