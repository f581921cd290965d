"""LookupSeries: lookups that all ranks make ahead of earlier updates, and how they end after an error.

A rank that stops must not leave the others waiting for it. Lookups that are made ahead are in progress when a
rank finds an error, so a series defines which of its exchanges still take place:

    event on any rank                              later lookups    rows and updates of earlier lookups
    a lookup fails (its batch is bad)              not made         made
    a rank leaves: it fails a lookup or update     not made         not made

All ranks take part in the exchange that fails, and all later exchanges come after it on every rank. So every
rank leaves out the same exchanges, which raise the error of the event instead.
"""

from __future__ import annotations


class LookupSeries:
    """The state of one series. Pass the same object to each of its lookups, in the same order on all ranks.

    The thread of the exchange changes it; other threads read it after they have waited for an exchange.
    """

    def __init__(self) -> None:
        self._lookup_error: Exception | None = None
        self._leave_error: Exception | None = None

    @property
    def is_open(self) -> bool:
        """Whether further lookups of the series are made."""
        return self._lookup_error is None and self._leave_error is None

    def check_lookup(self) -> None:
        """Raise the error of the series if a lookup has failed or a rank has left."""
        self.check()
        if self._lookup_error is not None:
            raise self._lookup_error

    def check(self) -> None:
        """Raise the error of the series if a rank has left."""
        if self._leave_error is not None:
            raise self._leave_error

    def fail_lookups(self, error: Exception) -> None:
        """Record that a lookup has failed."""
        self._lookup_error = self._lookup_error or error

    def leave(self, error: Exception) -> None:
        """Record that a rank has left."""
        self._leave_error = self._leave_error or error
