"""Commands as processes of their own, forked by one that has imported everything; see distributed/ranks.py.

A process that imports torch and Megalith by itself takes seconds before it does anything.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.distributed.ranks import IMPORTED

LIMIT = 120.0


class Forked:
    """A running process of `work(*arguments)`, a function at the top of a module; a file has its output."""

    def __init__(self, output: Path, work: Callable[..., object], *arguments: object) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self._output = output
        output.touch()
        self._process = context.Process(target=_run, args=(output, work, arguments))  # it may have children
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> Forked:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in [*self.children, self.pid] if self._process.is_alive() else []:
            os.kill(pid, signal.SIGKILL)
        self._process.join(LIMIT)

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def children(self) -> list[int]:
        listed = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(pid) for pid in listed.read_text().split()] if listed.exists() else []

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Returns when something has become true; the process must not end before."""
        deadline = time.monotonic() + LIMIT
        while not what():
            assert self._process.is_alive(), self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def printed(self, pattern: str) -> str:
        """Waits until the output matches a pattern, and returns its group."""
        self.wait_for(lambda: re.search(pattern, self.output) is not None)
        found = re.search(pattern, self.output)
        assert found is not None
        return found[1]

    def end(self, number: signal.Signals | None = None) -> int:
        """Sends a signal, if there is one, and returns the exit code."""
        if number is not None:
            os.kill(self.pid, number)
        self._process.join(LIMIT)
        code: Any = self._process.exitcode
        assert code is not None, f"still runs after {LIMIT:g} s: {self.output}"
        return int(code)


def _run(output: Path, work: Callable[..., object], arguments: tuple[object, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), write_through=True)
    work(*arguments)


def megalith(*arguments: object) -> None:
    """The command line."""
    from megalith.__main__ import main

    sys.argv = ["megalith", *map(str, arguments)]
    main()


def torchrun(ranks: int, restarts: int, *arguments: object) -> None:
    """What `torchrun --standalone -m megalith` does, its agent in this process; ranks are forked."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, megalith)(*arguments)
