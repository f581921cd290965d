"""A model server in a process of its own, for tests that kill it.

Run as a program: python server_process.py DIRECTORY [DISCOVERY]. It prints its address, and serves until it
is killed or its standard input ends.
"""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIMIT = 120.0
"""Seconds in which a process must have come up."""


class ServerProcess:
    """A running server: its address, and how to kill it."""

    def __init__(self, directory: Path, discovery: str | None = None) -> None:
        command = [sys.executable, __file__, str(directory)]
        self._process = subprocess.Popen(
            command + ([] if discovery is None else [discovery]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> str:
        """Its address, as soon as it serves."""
        assert self._process.stdout is not None
        ready = select.select([self._process.stdout], [], [], LIMIT)[0]
        assert ready, f"the server has not started after {LIMIT:g} s"
        address = self._process.stdout.readline().strip()
        assert address, "the server did not start; see its output"
        return address

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self._process.kill()
        self._process.communicate(timeout=LIMIT)


@contextmanager
def server_processes(*directories: Path, discovery: str | None = None) -> Iterator[list[ServerProcess]]:
    """One for each directory, started side by side; all are killed at the end."""
    servers: list[ServerProcess] = []
    try:
        for directory in directories:
            servers.append(ServerProcess(directory, discovery))
        yield servers
    finally:
        for server in servers:
            server.kill()


def main() -> None:
    import torch

    from megalith.serving.server.model_server import ModelServer
    from megalith.serving.server.server_config import ServerConfig

    torch.set_num_threads(1)
    discovery = sys.argv[2] if len(sys.argv) > 2 else None
    with ModelServer(sys.argv[1], ServerConfig(discovery=discovery, poll_seconds=60.0)) as server:
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
