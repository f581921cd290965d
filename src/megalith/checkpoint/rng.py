"""Random number generators as JSON, so that a resumed run draws what an uninterrupted one would."""

from __future__ import annotations

import base64
import random
from typing import Any

import torch

from megalith.errors import CheckpointError


def rng_state() -> dict[str, Any]:
    """The state of torch's CPU generator and Python's `random`, JSON-able: for `save(progress=...)`."""
    version, numbers, gauss = random.getstate()
    state = torch.get_rng_state().numpy().tobytes()
    return {"torch": base64.b64encode(state).decode(), "python": [version, list(numbers), gauss]}


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts the generators back to what `rng_state` gave."""
    try:
        raw = bytearray(base64.b64decode(state["torch"], validate=True))
        version, numbers, gauss = state["python"]
        torch.set_rng_state(torch.frombuffer(raw, dtype=torch.uint8))
        random.setstate((version, tuple(numbers), gauss))
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"no state of random number generators: {error}") from None
