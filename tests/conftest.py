"""Fixtures and settings all tests share."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings

from tests import stacks

# `make test` repeats the same examples on every machine; `make soak` explores new ones.
# Neither shrinks nor explains there: an example that fails is reported at once.
SEARCH = (Phase.explicit, Phase.generate)
settings.register_profile("fixed", deadline=None, print_blob=True, derandomize=True, phases=SEARCH)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=300)
settings.load_profile(os.environ.get("MEGALITH_EXAMPLES", "fixed"))

# One thread per test: small tensors gain nothing from more, and two test processes share the machine. Tests
# about threads set their own number.
torch.set_num_threads(1)

# Without a GPU the kernels of the cuda engine run in Triton's interpreter, which reads this at its import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# MEGALITH_TEST_ENGINES=cuda runs the tests of the contract on the cuda engine; see CONTRIBUTING.md.
ENGINES = os.environ.get("MEGALITH_TEST_ENGINES", "reference,cpu").split(",")

_BFLOAT16_TRAINING = """
import torch
layer = torch.nn.Linear(64, 64)
with torch.autocast("cpu", dtype=torch.bfloat16):
    layer(torch.ones(64, 64)).sum().backward()
"""


@pytest.fixture(scope="session")
def bfloat16_matmul() -> None:
    """Skips a test where torch's own bfloat16 matmul kills the process.

    Some virtual CPUs announce AMX and then raise SIGILL on its instructions.
    """
    probe = subprocess.run([sys.executable, "-c", _BFLOAT16_TRAINING], capture_output=True, timeout=120)
    if probe.returncode < 0:
        pytest.skip(f"torch's bfloat16 matmul dies with signal {-probe.returncode} on this CPU")
    assert probe.returncode == 0, probe.stderr.decode()


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine in turn: the contract does not know which one it is."""
    name: str = request.param
    return name


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """Lets a test change the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# Files of these folders mostly wait for other processes, the others compute: a worker of pytest-xdist that
# waits leaves a core to one that computes.
WAITING = ("tests/distributed/", "tests/cli/", "tests/serving/", "tests/gather/", "tests/ps/")
# Quick tests of single functions and classes.
FIRST = ("tests/test_", "tests/golden/", "tests/ops/", "tests/storage/", "tests/nn/", "tests/table/test_")


def pytest_collection() -> None:
    """Collect without Python's garbage collector, which visits all syntax trees again and again."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Let later collections pass over the million objects that stay."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts unit tests first, so that a failure shows soon, then mixes files that wait and files that compute.

    Files that wait come to an end before the others, so that none is left alone.
    """
    kinds: dict[str, list[str]] = {"first": [], "waiting": [], "other": []}
    for name in sorted({item.nodeid.partition("::")[0] for item in items}):
        kind = "first" if name.startswith(FIRST) else "waiting" if name.startswith(WAITING) else "other"
        kinds[kind].append(name)
    place: dict[str, float] = {}
    for kind, begin, end in (("first", 0.0, 0.1), ("waiting", 0.1, 0.85), ("other", 0.1, 1.0)):
        names = kinds[kind]
        place |= {name: begin + (end - begin) * i / len(names) for i, name in enumerate(names)}

    def order(item: pytest.Item) -> tuple[float, str]:
        name = item.nodeid.partition("::")[0]
        return place[name], name

    items.sort(key=order)
    share = os.environ.get("MEGALITH_TEST_SHARE")  # "k/n": every n-th test from the k-th on; see gpu_parts.py
    if share:
        first, step = map(int, share.split("/"))
        items[:] = items[first::step]


def pytest_configure(config: pytest.Config) -> None:
    """Lets every Python process that a test starts write its stacks when it is asked; see stacks.py."""
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist inherit the environment
        os.environ[stacks.FOLDER] = tempfile.mkdtemp(prefix="megalith-stacks-")
        hook = str(Path(__file__).parent / "child_stacks")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [hook, os.environ.get("PYTHONPATH")]))
        sys.path.append(hook)  # commands of Megalith start their processes with it


def pytest_unconfigure(config: pytest.Config) -> None:
    """Prints where the stacks are; without any, removes the folder."""
    if not hasattr(config, "workerinput"):
        folder = Path(os.environ[stacks.FOLDER])
        if any("exceeded its time limit" in path.read_text(errors="replace") for path in folder.iterdir()):
            print(f"\nThe stacks of tests that exceeded their time limit are in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool:
    """Keeps the stacks, kills what the test has started, then does what pytest-timeout does."""
    import pytest_timeout

    def expire() -> None:
        try:
            stacks.keep(item.nodeid)
            stacks.kill_tree(os.getpid(), itself=False)
        finally:
            pytest_timeout.timeout_timer(item, settings)  # ends this process

    timer = threading.Timer(settings.timeout, expire)
    timer.name = f"pytest_timeout {item.nodeid}"
    timer.daemon = True
    timer.start()
    item.cancel_timeout = timer.cancel
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """Stops the whole run as soon as pytest-xdist loses a worker; its report names the test."""
    session = node.config.pluginmanager.getplugin("dsession")
    if error and not session.shouldstop:
        session.shouldstop = (
            f"worker lost: {error}. The first test that is reported as crashed is the one that ended its "
            "process or exceeded its time limit; the others ran when their workers were stopped"
        )
        for other in session.nodemanager.group:  # xdist would let them finish all the tests they were given
            stacks.kill_tree(other._io.popen.pid, itself=False)
            other._io.kill()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Ends a whole run with the number of tests of each package."""
    counts: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                folder = report.nodeid.split("/")[1]
                counts[folder if not folder.startswith("test_") else "top level"] += 1
    if len(counts) > 1:
        terminalreporter.section("tests per package")
        terminalreporter.line(", ".join(f"{name} {count:,}" for name, count in counts.most_common()))
