"""The version, and the instructions in the native module that is installed."""

import platform
import re
import subprocess
from pathlib import Path

import pytest

import megalith

ROOT = Path(__file__).parent.parent


def test_the_changelog_begins_with_the_version_of_the_sources() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    first = re.search(r"^## (\S+) \((.*)\)$", changes, re.MULTILINE)
    assert first is not None
    assert first[1] == megalith.__version__


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def objects() -> dict[str, Path]:
    """The compiled files behind the installed module, by source name."""
    found = {path.name: path for path in (ROOT / "build").glob("cp*/native/CMakeFiles/*.dir/**/*.o")}
    assert found, "no build found: run `make test`, or pip install --no-build-isolation -e ."
    return found


@pytest.mark.skipif(platform.machine() != "x86_64", reason="about x86-64 instruction sets")
def test_wide_instructions_stay_in_the_dispatched_kernels() -> None:
    """One binary for any x86-64-v2 machine: wide registers only in the kernels of their instruction set, and
    nothing there that the linker could take as everybody's copy of an inline function; nothing fused."""
    compiled = objects()
    wide = {"kernels_avx2.cpp.o": {"%ymm"}, "kernels_avx512.cpp.o": {"%ymm", "%zmm"}}
    for name, path in compiled.items():
        code = run("objdump", "-d", str(path))
        assert {r for r in ("%ymm", "%zmm") if r in code} == wide.get(name, set()), name
        assert not re.search("vfn?m(add|sub)", code), name
    for name in wide:
        symbols = run("nm", "-C", str(compiled[name]))
        assert not [line for line in symbols.splitlines() if re.search(r" [WVuw] ", line)], name
