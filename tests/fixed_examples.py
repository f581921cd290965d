"""The number of examples of a property test: few in `make test`, more in `make soak`."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def fixed_examples(number: int, explored: int = 300, **options: Any) -> settings:
    """Settings with `number` of the fixed examples of `make test`, or `explored` new ones of `make soak`."""
    return settings(max_examples=number if settings.default.derandomize else explored, **options)  # type: ignore[union-attr]
