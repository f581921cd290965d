"""The rules of the source tree: imports point one way, and a class name has one meaning.

CONTRIBUTING.md shows the packages as a picture. These tests read the sources and import nothing.
"""

from __future__ import annotations

import ast
import gc
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "megalith"
TESTS = Path(__file__).parent

LAYERS = [
    ("errors", "lazy"),
    ("units", "metrics", "bits", "library"),
    ("hashing",),
    ("ragged", "routing"),
    ("ops",),
    ("storage", "distributed"),
    ("table",),
    ("shards",),
    ("ps",),
    ("nn",),
    ("checkpoint",),
    ("serving",),
    ("data", "models"),
    ("training", "reporting"),
    ("cli",),
]
"""From the bottom up. A package imports only packages of layers below its own."""

GATHER_IMPORTS = {"errors", "units", "ops", "distributed", "storage"}


class Import(NamedTuple):
    """An import statement of a module, at its top or inside a function."""

    module: str
    line: int
    target: str


def modules() -> list[Path]:
    return sorted(SOURCES.rglob("*.py"))


@pytest.fixture(scope="module", autouse=True)
def without_garbage_collection() -> Iterator[None]:
    """A collection visits all nodes of all syntax trees, which takes five times as long as parsing them."""
    gc.disable()
    yield
    tree.cache_clear()
    gc.enable()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    """megalith/nn/features.py -> nn.features; a package's __init__.py -> the package."""
    parts = path.relative_to(SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@cache
def imports(path: Path) -> list[Import]:
    """The packages of megalith that a module imports, imports inside functions included.

    `from megalith import ops` counts as ops. A string such as "megalith.compat.monolith" does not count:
    that is how commands and registries load compat.
    """
    found = []
    for node in ast.walk(tree(path)):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports are not used"
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        for target in targets:
            root, _, rest = target.partition(".")
            if root == "megalith" and rest:
                found.append(Import(name_of(path), getattr(node, "lineno", 0), rest))
    return found


def package_of(module: str) -> str:
    return module.partition(".")[0]


def height(package: str) -> int | None:
    return next((number for number, layer in enumerate(LAYERS) if package in layer), None)


def test_every_package_has_a_layer() -> None:
    packages = {package_of(name_of(path)) for path in modules()} - {"__init__", "__main__", "_native"}
    assert packages - {"compat", "gather", "integrations"} == {name for layer in LAYERS for name in layer}


def test_imports_point_down() -> None:
    wrong = []
    for path in modules():
        for found in imports(path):
            source, target = package_of(found.module), package_of(found.target)
            own, other = height(source), height(target)
            if source == target or own is None or (other is None and target not in ("compat", "gather")):
                continue  # compat, gather and the top-level __init__ have their own rules
            if source == "cli" and target == "gather":
                continue
            if other is None or other >= own:
                wrong.append(f"{found.module}:{found.line} imports {found.target}")
    assert wrong == []


def test_gather_needs_little() -> None:
    wrong = [
        f"{found.module}:{found.line} imports {found.target}"
        for path in modules()
        for found in imports(path)
        if package_of(found.module) == "gather"
        and package_of(found.target) not in GATHER_IMPORTS | {"gather"}
        and height(package_of(found.target)) is not None
    ]
    assert wrong == []


def test_nothing_in_the_core_imports_compat_or_integrations() -> None:
    wrong = [
        f"{found.module}:{found.line} imports {found.target}"
        for path in modules()
        for found in imports(path)
        if package_of(found.target) in ("compat", "integrations")
        and package_of(found.module) != package_of(found.target)
    ]
    assert wrong == []


def test_a_class_name_is_defined_once() -> None:
    homes = defaultdict(list)
    for path in modules():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and package_of(name_of(path)) != "compat":
                homes[node.name].append(name_of(path))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_a_module_name_is_used_once_in_its_package() -> None:
    homes = defaultdict(list)
    for path in modules():
        name = name_of(path)
        if path.stem != "__init__" and package_of(name) != "compat":  # compat repeats names of other systems
            homes[package_of(name), path.stem].append(name)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_tests_mirror_the_sources() -> None:
    """Every folder of tests is a package of src/megalith, or is listed here with what it holds."""
    other = {
        "benchmarks": "benchmarks as scripts",
        "checkpoint/malformed": "damaged checkpoints",
        "golden": "files of an earlier version",
        "table/policies": "admission and eviction on every engine",
        "integrations": "frameworks that are not installed for `make test`; `make test-integrations` runs it",
    }
    folders = {str(path.parent.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")} - {"."}
    packages = {str(path.parent.relative_to(SOURCES)) for path in SOURCES.rglob("__init__.py")}
    assert folders - packages - other.keys() == set()
    assert other.keys() <= folders


FACTORIES = [
    *(
        "arange",
        "as_tensor",
        "asarray",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "logspace",
        "ones",
    ),
    *("ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices"),
    *("triu_indices", "zeros"),
]
"""Functions of torch whose result is on the default device, which users may change."""


def test_every_new_tensor_names_its_device() -> None:
    """`torch.set_default_device("cuda")` is for the tensors of the user. Layers of models follow it too."""
    found = []
    for path in modules():
        if path.is_relative_to(SOURCES / "models"):
            continue
        for call in ast.walk(tree(path)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                of_torch = isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
                named = any(keyword.arg in ("device", None) for keyword in call.keywords)
                if of_torch and call.func.attr in FACTORIES and not named:
                    found.append(f"{path.relative_to(SOURCES)}:{call.lineno} torch.{call.func.attr}")
    assert not found, 'pass device= (usually "cpu")'


WAITS = {"acquire": 0, "communicate": 0, "get": 0, "join": 0, "result": 0, "wait": 0, "wait_for": 1}
"""Methods that wait for ever without another argument, and how many arguments they need besides the limit."""
WAITING_CALLS = {
    *("ray.get", "ray.wait", "socket.create_connection", "urllib.request.urlopen", "wait", "as_completed"),
    *("subprocess.call", "subprocess.check_call", "subprocess.check_output", "subprocess.run"),
}
"""Functions that wait for ever without the argument `timeout`."""
LIMITED = {"shards/sync.py": "results of the thread of an Exchange: each of its collectives has a limit"}
"""Modules that need no limits of their own, and why."""


def waits_for_ever(call: ast.Call) -> bool:
    if any(keyword.arg is None or "timeout" in keyword.arg for keyword in call.keywords):
        return False
    name = ast.unparse(call.func)
    if name in WAITING_CALLS:
        return len(call.args) < 2
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return method in WAITS and len(call.args) <= WAITS[method] and not call.keywords


def test_every_wait_has_a_limit() -> None:
    """A wait that needs none says why, in the same line: `# no limit: the next piece of work`."""
    found = []
    for path in modules():
        if str(path.relative_to(SOURCES)) in LIMITED:
            continue
        lines = path.read_text().splitlines()
        for call in ast.walk(tree(path)):
            if isinstance(call, ast.Call) and waits_for_ever(call):
                text = " ".join(lines[call.lineno - 1 : call.end_lineno])
                if "# no limit: " not in text:
                    found.append(f"{path.relative_to(SOURCES)}:{call.lineno} {ast.unparse(call)[:80]}")
    assert not found, "pass a limit, and name in the error what did not happen in time"
