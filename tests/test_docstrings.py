"""Every public function and class explains its arguments and results: the API reference is made from this.

| what | its docstring |
| --- | --- |
| a public class, function or method | a first paragraph that ends with a period |
| its parameters | `Args:` names each; those of `__init__` are explained by the class |
| its result, if it has parameters | `Returns:` or `Yields:` |
| an override without a docstring | that of the base |
| a dataclass that users construct | each field, in the class or below the field |
| a name of compat.monolith or compat.torchrec | arguments and results where name and type do not say it |

The rules are checked on the syntax tree, so that no optional package is needed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import megalith

ROOT = Path(megalith.__file__).parent
PUBLIC = [
    "megalith",
    "megalith.checkpoint",
    "megalith.checkpoint.importers",
    "megalith.compat.dynamicemb",
    "megalith.compat.monolith",
    "megalith.compat.templar",
    "megalith.compat.torchrec",
    "megalith.data",
    "megalith.gather",
    "megalith.integrations.dcp",
    "megalith.integrations.trackers",
    "megalith.models",
    "megalith.nn",
    "megalith.ops",
    "megalith.ps",
    "megalith.serving",
    "megalith.serving.discovery",
    "megalith.shards",
    "megalith.table",
    "megalith.training",
]
"""Packages whose `__all__` are the public names."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, ast.Module]:
    """Return the modules of the package by path."""
    paths = sorted(ROOT.rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Return the classes of the package by name, which compat repeats; tests/test_architecture.py."""
    paths = sorted(modules(), key=lambda path: not path.startswith("compat/"))
    nodes = (node for path in paths for node in ast.walk(modules()[path]))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


@cache
def public_names() -> set[str]:
    """Return the public names, without aliases of types: another class may have that name."""
    modules = map(importlib.import_module, PUBLIC)
    found = ((name, vars(module).get(name)) for module in modules for name in module.__all__)
    return {
        name for name, value in found if value is None or inspect.isroutine(value) or inspect.isclass(value)
    }


def name_of(node: ast.expr) -> str:
    """Return the last name of a decorator or base class: `a.b(...)` and `b[...]` are "b"."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def decorators(node: Function | ast.ClassDef) -> set[str]:
    return {name_of(each) for each in node.decorator_list}


def methods(node: ast.ClassDef) -> dict[str, Function]:
    return {each.name: each for each in node.body if isinstance(each, Function)}


def inherits(node: ast.ClassDef, method: str) -> bool:
    """Return whether a base class explains a method; a base of another package is assumed to do so."""
    for base in map(name_of, node.bases):
        if base in ("object", "ABC", "Protocol", "NamedTuple", "Generic", "Enum", "Exception"):
            continue
        if base not in classes():
            return True
        found = methods(classes()[base]).get(method)
        if (found and ast.get_docstring(found)) or inherits(classes()[base], method):
            return True
    return False


def parameters(node: Function) -> list[str]:
    given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    return [each.arg for each in given if each.arg not in ("self", "cls")]


def is_command(node: Function) -> bool:
    """Return whether a function is a command: decorated as one, or with arguments of typer."""
    given = [each.annotation for each in (*node.args.args, *node.args.kwonlyargs) if each.annotation]
    options = any("typer." in ast.unparse(each) for each in given)
    return options or bool(decorators(node) & {"command", "callback"})


def returns_nothing(node: Function) -> bool:
    kind = node.returns
    return kind is None or ast.unparse(kind) in ("None", "NoReturn", "Never")


def lacking(text: str, names: list[str]) -> list[str]:
    return [name for name in names if f"{name}:" not in text and f"{name} (" not in text]


def function_problems(node: Function, owner: ast.ClassDef | None = None) -> Iterator[str]:
    if "jit" in decorators(node):
        return  # a kernel is code of the device: its module explains tensors and launches
    text = ast.get_docstring(node)
    if text is None:
        inherited = owner is not None and inherits(owner, node.name)
        if not inherited and not decorators(node) & {"overload", "setter"}:
            yield "no docstring"
        return
    if not text.split("\n\n")[0].rstrip().endswith((".", ":")):
        yield "the first paragraph does not end with a period"
    if is_command(node):
        return  # the options of a command have help texts of their own
    names = parameters(node)
    if names and "Args:" not in text:
        yield f"no Args: for {', '.join(names)}"
    elif lacking(text, names):
        yield f"Args: lacks {', '.join(lacking(text, names))}"
    needs_none = returns_nothing(node) or "contextmanager" in decorators(node)
    if names and not needs_none and "Returns:" not in text and "Yields:" not in text:
        yield "no Returns:"


def class_problems(node: ast.ClassDef) -> Iterator[str]:
    text = ast.get_docstring(node)
    if text is None:
        yield "no docstring"
        return
    if not text.split("\n\n")[0].rstrip().endswith((".", ":")):
        yield "the first paragraph does not end with a period"
    init = methods(node).get("__init__")
    if init is not None:
        explained = text + (ast.get_docstring(init) or "")
        if lacking(explained, parameters(init)):
            yield f"Args: lacks {', '.join(lacking(explained, parameters(init)))}"
    elif "dataclass" in decorators(node) and node.name in public_names():
        fields = field_texts(node)
        missing = [name for name in lacking(text, list(fields)) if not fields[name]]
        if missing:
            yield f"Args: lacks {', '.join(missing)}"


def field_texts(node: ast.ClassDef) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, inherited ones included; "" if it has none."""
    found: dict[str, str] = {}
    for base in map(name_of, node.bases):
        found |= field_texts(classes()[base]) if base in classes() else {}
    for each, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
            continue
        text = ast.unparse(each)
        if each.target.id.startswith("_") or "ClassVar" in text or "init=False" in text:
            continue
        documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        found[each.target.id] = str(following.value.value) if documented else ""  # type: ignore[union-attr]
    return found


def problems(path: str) -> Iterator[str]:
    repeated = path.startswith(("compat/monolith/", "compat/torchrec/"))
    optional = ("Args: lacks", "no Args:", "no Returns:") if repeated else ()
    yield from (each for each in _problems(path) if not any(f": {text}" in each for text in optional))


def _problems(path: str) -> Iterator[str]:
    for node in modules()[path].body:
        if not isinstance(node, Function | ast.ClassDef) or node.name not in public_names():
            continue
        where = f"{path}:{node.lineno} {node.name}"
        if isinstance(node, Function):
            yield from (f"{where}: {problem}" for problem in function_problems(node))
            continue
        yield from (f"{where}: {problem}" for problem in class_problems(node))
        for name, method in methods(node).items():
            if not name.startswith("_"):
                where = f"{path}:{method.lineno} {node.name}.{name}"
                yield from (f"{where}: {problem}" for problem in function_problems(method, node))


@pytest.mark.parametrize("package", sorted({path.partition("/")[0] for path in modules()}))
def test_functions_and_classes_are_documented(package: str) -> None:
    paths = [path for path in modules() if path.partition("/")[0] == package]
    assert [problem for path in paths for problem in problems(path)] == []
