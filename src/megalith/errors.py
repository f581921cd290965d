"""The errors that Megalith raises.

A message names what was wrong, where, and the remedy. Each error is a `MegalithError` and also a built-in
error that a caller expects, so `except ValueError` works as usual.
"""

from __future__ import annotations

from typing import Self


class MegalithError(Exception):
    """Base class of all errors that Megalith raises."""


class InputError(MegalithError, ValueError):
    """An argument has the wrong type, shape, device or value. Nothing was written."""


class UnknownNameError(MegalithError, KeyError):
    """No table, feature or consumer has this name."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class UsageError(MegalithError, RuntimeError):
    """The state of an object does not allow this call."""


class TableFullError(MegalithError, ValueError):
    """A table would exceed its maximum number of rows. Nothing was written to that table."""


class NativeMissingError(MegalithError, ImportError):
    """The native module is not built."""


class CheckpointError(MegalithError, ValueError):
    """A checkpoint is missing, incomplete, damaged, or belongs to another model."""


class ExportError(MegalithError, ValueError):
    """An exported model is missing, incomplete, damaged, or does not match."""


class MissingDependencyError(MegalithError, ImportError):
    """An optional package is not installed."""

    @classmethod
    def of_extra(cls, problem: str, extra: str) -> Self:
        """Make the error for a package of one of Megalith's extras.

        Args:
            problem: What needs which package: "metrics need prometheus-client".
            extra: Name of the extra in pyproject.toml.

        Returns:
            The error; its message holds the command that installs the extra.
        """
        return cls(f"{problem}: run `pip install '.[{extra}]'` in a checkout of Megalith")


class BudgetError(MegalithError, ValueError):
    """A memory budget is smaller than one unit of the work. Nothing was written."""


class StoreError(MegalithError, OSError):
    """An object store does not answer, denies access, or returns an unexpected object."""


class ArtifactError(MegalithError, ValueError):
    """A gather artifact is missing, incomplete, damaged, or produces different weights."""


class RankTimeoutError(MegalithError, TimeoutError):
    """Other ranks did not join an exchange within its timeout."""


class RankFailedError(MegalithError, RuntimeError):
    """Another rank failed, so this rank cannot continue. The log of that rank has the full error."""


class WorkerFailedError(MegalithError, RuntimeError):
    """A worker of a run raised an error that is not one of Megalith. The message has its traceback."""


class ServerLostError(MegalithError, ConnectionError):
    """A parameter server has ended."""


class ServerRestartedError(ServerLostError):
    """A parameter server was started again and does not know the tables or the worker of a call."""


class DiscoveryError(MegalithError, ConnectionError):
    """A discovery service does not answer, denies access, or does not list enough servers in time."""


class RemoteError(MegalithError, ConnectionError):
    """A server does not answer in time, rejects a request, or sends an unexpected answer."""

    def __init__(self, message: str, *, code: str = "UNKNOWN", targets: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.targets = targets


class SequenceError(MegalithError, RuntimeError):
    """A pushed message does not follow the last one: the publisher must ask for the next expected
    position."""
