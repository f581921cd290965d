"""A model server in a process of its own, for tests that kill it."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.forked import Forked


class ServerProcess:
    """A running server: its address, and how to kill it."""

    def __init__(self, process: Forked) -> None:
        self._process = process

    def wait(self) -> str:
        """Its address, as soon as it serves."""
        return self._process.printed(r"serving on (\S+)\n")

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        assert self._process.end(signal.SIGKILL) == -signal.SIGKILL


@contextmanager
def server_processes(*directories: Path, discovery: str | None = None) -> Iterator[list[ServerProcess]]:
    """One for each directory, started side by side; all are killed at the end."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
        outputs = [Path(folder) / str(k) for k in range(len(directories))]
        yield [
            ServerProcess(started.enter_context(Forked(output, _serve, directory, discovery)))
            for output, directory in zip(outputs, directories, strict=True)
        ]


def _serve(directory: Path, discovery: str | None) -> None:
    from megalith.serving.server.model_server import ModelServer
    from megalith.serving.server.server_config import ServerConfig

    with ModelServer(directory, ServerConfig(discovery=discovery, poll_seconds=60.0)) as server:
        print(f"serving on {server.address}", flush=True)
        signal.pause()
