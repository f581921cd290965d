"""The examples: gathering every H steps is as good as one trainer that has all data."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_two_peers_reach_the_loss_of_one_with_the_data_of_both_within_two_percent() -> None:
    example = runpy.run_path(str(EXAMPLES / "diloco.py"))
    gathered, single = example["together"](30, 32), example["alone"](30 * 32)
    assert gathered <= 1.02 * single
    assert single < 0.5 * example["held_out_loss"](example["new_model"]())


def test_two_data_centres_reach_the_auc_of_one_trainer_within_one_percent() -> None:
    example = runpy.run_path(str(EXAMPLES / "two_data_centres.py"))
    gathered, sent = example["together"](15, 16)
    assert gathered >= 0.99 * example["alone"](15, 16)
    assert gathered > 0.65
    assert 0 < sent < 3_000_000
