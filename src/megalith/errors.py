"""The errors Megalith raises.

Each says what was wrong, where, and what to do. All are `MegalithError`s, and also the
built-in kind a caller would expect, so `except ValueError` works as usual.
"""


class MegalithError(Exception):
    """Base of all errors raised by Megalith."""


class InputError(MegalithError, ValueError):
    """An argument has the wrong type, shape, device or value. Nothing was written."""


class UnknownNameError(MegalithError, KeyError):
    """A table, feature or consumer name that does not exist."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class UsageError(MegalithError, RuntimeError):
    """A call that the state of an object does not allow."""


class TableFullError(MegalithError, ValueError):
    """A table would exceed the number of rows a shard can hold. Nothing was written to that table."""


class NativeMissingError(MegalithError, ImportError):
    """The native module was never built."""


class CheckpointError(MegalithError, ValueError):
    """A checkpoint that is missing, incomplete, damaged, or of another model."""


class ExportError(MegalithError, ValueError):
    """An exported model is missing, incomplete, damaged, or does not fit."""


class MissingDependencyError(MegalithError, ImportError):
    """A package that only some installations have."""


class BudgetError(MegalithError, ValueError):
    """A memory budget that one unit of the work does not fit into. Nothing was written."""


class StoreError(MegalithError, OSError):
    """An object store that does not answer, refuses, or holds something else than was asked for."""


class ArtifactError(MegalithError, ValueError):
    """A gather artifact that is missing, incomplete, damaged, or leads to other weights."""


class RankTimeoutError(MegalithError, TimeoutError):
    """Other ranks did not come to an exchange within its timeout."""


class RankFailedError(MegalithError, RuntimeError):
    """Another rank met an error, which its own log tells; this one cannot go on without it."""


class DiscoveryError(MegalithError, ConnectionError):
    """A discovery that does not answer, refuses, or does not know enough servers in time."""


class RemoteError(MegalithError, ConnectionError):
    """A server that does not answer in time, refuses, or answers with something else than was asked for.

    code: the name of gRPC's status, such as "UNAVAILABLE". targets: the addresses tried, in order.
    """

    def __init__(self, message: str, *, code: str = "UNKNOWN", targets: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.targets = targets


class SequenceError(MegalithError, RuntimeError):
    """A pushed message that does not follow the last one: its publisher must ask where to go on."""
