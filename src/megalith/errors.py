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
