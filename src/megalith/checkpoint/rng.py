"""Random number generators as JSON data, so that a resumed run draws the numbers of an uninterrupted one."""

from __future__ import annotations

import base64
import random
from typing import Any

import torch

from megalith.errors import CheckpointError


def rng_state() -> dict[str, Any]:
    """Return the state of torch's CPU generator and of Python's `random` as JSON data.

    Pass it to `save(progress=...)`.
    """
    version, numbers, gauss = random.getstate()
    state = torch.get_rng_state().numpy().tobytes()
    return {"torch": base64.b64encode(state).decode(), "python": [version, list(numbers), gauss]}


def set_rng_state(state: dict[str, Any]) -> None:
    """Set both generators to a state.

    Args:
        state: The result of `rng_state`.

    Raises:
        CheckpointError: The data is not such a state.
    """
    try:
        raw = bytearray(base64.b64decode(state["torch"], validate=True))
        version, numbers, gauss = state["python"]
        torch.set_rng_state(torch.frombuffer(raw, dtype=torch.uint8))
        random.setstate((version, tuple(numbers), gauss))
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"not a state of random number generators: {error}") from None
