"""Errors that name an option of the command line also give the remedy in Python."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import megalith.serving

OPTION = re.compile(r"(?<![\\w-])--[a-z][a-z-]+")


def test_remedies_are_given_for_the_command_line_and_for_python() -> None:
    wrong = []
    for path in sorted(Path(megalith.serving.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Raise):
                continue
            texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            text = "".join(each for each in texts if isinstance(each, str))
            if OPTION.search(text) and "in Python" not in text:
                wrong.append(f"{path.name}:{node.lineno}: {text}")
    assert not wrong
