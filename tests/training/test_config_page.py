"""The reference page of all options."""

from __future__ import annotations

from dataclasses import fields

from docs.config_page import PAGE, page

from megalith.training import DataConfig, ModelConfig, TrainConfig


def test_the_committed_page_is_made_from_the_config_dataclasses() -> None:
    made = page()
    for section in (DataConfig, ModelConfig, TrainConfig):
        assert all(f"| `{field.name}` |" in made for field in fields(section))
    assert PAGE.read_text(encoding="utf-8") == made, "run python -m docs.config_page"
