"""The contracts of policies: which ids get a row (`Admission`) and which rows are removed (`Eviction`).

A policy holds settings only. The rows, counts and logs belong to the engine, so one policy object may serve
several tables. A new eviction policy is one file in this folder and one line in its `__init__.py`.
Admission is decided in the engines, for speed: native/table_admit.hpp and engines/reference_policies.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any, ClassVar

from torch import Tensor

from megalith.errors import InputError
from megalith.table.table_data import Chunk


class Admission:
    """Decides which new ids of an update get a row.

    `Table.assign`, `assign_add`, `reinitialize` and `restore` create rows without asking the policy.
    """

    name: ClassVar[str]
    """The name of the policy in configs of runs and in errors."""


def describe_policy(policy: Admission | Eviction) -> dict[str, Any]:
    """Describe a policy as JSON data, for manifests and messages."""
    names: list[str] = [field.name for field in fields(policy)] if is_dataclass(policy) else []
    return {"name": policy.name, "settings": {name: _plain(getattr(policy, name)) for name in names}}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return getattr(value, "__qualname__", None) or repr(value)


class Eviction(ABC):
    """Decides which rows `Table.evict` removes."""

    name: ClassVar[str]
    """The name of the policy in configs of runs and in errors."""

    needs_rows: ClassVar[bool] = False
    """Whether `expired` reads weights and optimizer state. Without them a pass over a table is cheaper."""

    @abstractmethod
    def expired(self, chunk: Chunk, now: int) -> Tensor:
        """Return which rows are to be removed.

        Args:
            chunk: Rows of the table. Without `needs_rows` it holds ids, times, counts and steps only.
            now: The time of the call in seconds.

        Returns:
            bool [n].
        """


def check_integer(where: str, value: Any, low: int) -> int:
    """Check an integer setting of a policy."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InputError(f"{where} must be an integer >= {low}, got {value!r}")
    return value


def check_real(where: str, value: Any, *, above: float, most: float) -> float:
    """Check a real setting of a policy."""
    if isinstance(value, bool) or not isinstance(value, Real) or not above < float(value) <= most:
        raise InputError(f"{where} must be a number above {above:g} and at most {most:g}, got {value!r}")
    return float(value)
