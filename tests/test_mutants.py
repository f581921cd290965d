"""The stored mutants of tests/mutants: each is still a statement of the sources."""

from __future__ import annotations

import json

import pytest

from tests.mutants.run import HERE, ROOT, matches


@pytest.mark.parametrize("mutant", json.loads((HERE / "mutants.json").read_text()), ids=lambda m: m["n"])
def test_a_mutant_is_one_statement_of_its_function(mutant: dict[str, str]) -> None:
    path = ROOT / mutant["path"]
    found = matches(mutant, path) if path.exists() else []
    assert [name for name, _ in found].count(mutant["function"]) == 1, f"update mutants.json: {found}"
