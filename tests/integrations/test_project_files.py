"""Workflows, issue forms, citation and hooks are valid by their schemas; workflows give away no rights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("check_jsonschema")

ROOT = Path(__file__).parents[2]
SCHEMAS = {
    "vendor.github-workflows": ".github/workflows/*.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.citation-file-format": "CITATION.cff",
    "custom.github-workflows-require-timeout": ".github/workflows/test.yml",
}
LIMIT = 120


def check(*command: object) -> None:
    done = subprocess.run(
        [str(each) for each in command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_have_the_form_of_their_schema(schema: str) -> None:
    files = sorted(ROOT.glob(SCHEMAS[schema]))
    assert files
    check(sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files)


def test_zizmor_finds_nothing_in_the_workflows() -> None:
    zizmor = Path(sys.executable).parent / "zizmor"
    check(zizmor, "--offline", "--no-progress", "--min-severity", "medium", ".github/workflows")


def test_the_hooks_are_valid() -> None:
    check(sys.executable, "-m", "pre_commit", "validate-config", ".pre-commit-config.yaml")
