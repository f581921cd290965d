"""The wheel as pip builds it."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import megalith

ROOT = Path(__file__).parents[2]


def test_the_wheel_is_small_and_holds_what_it_should(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "."]
    done = subprocess.run(
        [*build, "-w", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob(f"megalith-{megalith.__version__}-*.whl")
    assert wheel.stat().st_size < 10_000_000
    names = zipfile.ZipFile(wheel).namelist()
    assert any(re.match(r"megalith/_native\..*so", name) for name in names)
    assert "megalith/py.typed" in names
    assert not any(name.startswith(("tests", "native", "benchmarks")) for name in names)
