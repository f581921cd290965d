"""The snippets of docs/guides/frameworks.md, in a process of their own: they make process groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import ROOT, snippets

PAGE = ROOT / "docs" / "guides" / "frameworks.md"


def test_snippets_run(tmp_path: Path) -> None:
    for package in ("lightning", "accelerate", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    script = tmp_path / "page.py"
    script.write_text("\n".join(snippets(PAGE)))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
