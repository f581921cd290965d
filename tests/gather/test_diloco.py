"""The example with two peers: gathering every H steps is as good as one peer that has all data."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "diloco.py"


def test_two_peers_reach_the_loss_of_one_with_twice_the_data_within_two_percent() -> None:
    example = runpy.run_path(str(EXAMPLE))
    gathered, single = example["together"](30, 32), example["alone"](2 * 30 * 32)
    assert gathered <= 1.02 * single
    assert single < 0.5 * example["held_out_loss"](example["new_model"]())
