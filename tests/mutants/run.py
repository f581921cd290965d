"""Runs the tests against stored mutants: does a test fail if a statement of the source is wrong?

    python tests/mutants/run.py --out results.json                all mutants, sources and tests of this tree
    python tests/mutants/run.py --only 1,2 --source A --tests B   two mutants of the sources A, tests of B
    python tests/mutants/run.py --known baseline.json             first the tests that caught mutants before

mutants.json lists the mutants: a path, a function, a statement of it, and what replaces the statement. The
function is searched in the whole tree, so a mutant is found again after its file was moved or renamed. For
each mutant pytest runs, in a copy of the tree, the tests of the mutated package and then tests/distributed.
For a native mutant it runs the folders that its entry names, tests/table and tests/ops, with a module built
for it.

A mutant is "caught" if a test fails within the limit, or the test process dies from a signal; "survived" if
all tests pass; "timeout" if the limit passed before one failed; "missing" if its statement is not in the
sources. A test that also fails without a mutant catches nothing: it is deselected and its mutants run again.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SKIPPED = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "site", "runs", "results", "__pycache__", ".*_cache", ".hypothesis"
)
Mutant = dict[str, Any]
Result = dict[str, Any]

# A plugin of pytest: runs the folders in the order of the command line, and writes each outcome as it comes.
PLUGIN = """
import os

import pytest

FOLDERS = os.environ["MUTANT_FOLDERS"].split(",")


def note(outcome, test):
    with open(os.environ["MUTANT_OUTCOMES"], "a") as file:
        file.write(f"{outcome} {test}\\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    def place(item):
        return next((i for i, at in enumerate(FOLDERS) if at and item.nodeid.startswith(at)), len(FOLDERS))

    items.sort(key=place)


def pytest_collectreport(report):
    if report.failed:
        note("failed", report.nodeid)


def pytest_runtest_logreport(report):
    if report.failed:
        note("failed", report.nodeid)
    elif report.when == "call":
        note("passed", report.nodeid)
"""


class Missing(Exception):
    """The statement of a mutant is not in the sources."""


class Place(NamedTuple):
    """Where a mutant is in the sources: bytes of a file."""

    path: Path
    start: int
    stop: int


def python_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """The name, start and end of each function of a module, in bytes; inner functions are not listed."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def walk(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.If | ast.Try):
                yield from walk(child, (*names, child.name) if isinstance(child, ast.ClassDef) else names)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                stop = starts[(child.end_lineno or 1) - 1] + (child.end_col_offset or 0)
                yield ".".join((*names, child.name)), starts[child.lineno - 1] + child.col_offset, stop

    return walk(ast.parse(text), ())


def native_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """The name, start and end of everything that looks like `name(...) ... {...}`, in bytes."""
    for found in re.finditer(r"([A-Za-z_][\w:]*)\s*\(", text):
        opened = re.compile(r"[{;]").search(text, found.end())
        if opened is None or opened[0] == ";":
            continue
        depth = 0
        for brace in re.compile(r"[{}]").finditer(text, opened.start()):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                start, stop = len(text[: found.start()].encode()), len(text[: brace.end()].encode())
                yield found[1], start, stop
                break


def matches(mutant: Mutant, path: Path) -> list[tuple[str, Place]]:
    """The functions of a file in which the statement of a mutant is once, and its place."""
    # White space may be different, if the formatter wrapped the lines in another way.
    words = re.findall(rb"\w+|\S", mutant["old"].encode())
    pattern = re.compile(rb"(?<!\w)" + rb"\s*".join(map(re.escape, words)) + rb"(?!\w)")
    text = path.read_text()
    data = text.encode()
    if pattern.search(data) is None:
        return []
    functions = python_functions(text) if path.suffix == ".py" else native_functions(text)
    places = ((name, list(pattern.finditer(data, start, stop))) for name, start, stop in functions)
    return [(name, Place(path, *found[0].span())) for name, found in places if len(found) == 1]


def locate(mutant: Mutant, root: Path) -> Place:
    """The place that fits best: the function in its file, then in another file, then any other function."""
    folder = root / ("native" if mutant["path"].startswith("native/") else "src")
    function, last = mutant["function"], mutant["function"].rpartition(".")[2]
    best: dict[int, set[Place]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".hpp", ".inl", ".cpp")):
        same_file = path.relative_to(root).as_posix() == mutant["path"]
        for name, place in matches(mutant, path):
            short = re.split(r"\.|::", name)[-1]
            rank = 0 if name == function else 1 if short == last else 2
            best.setdefault(2 * rank + (not same_file), set()).add(place)
    for rank in sorted(best):
        if len(best[rank]) == 1:
            return best[rank].pop()
        raise Missing(f"{len(best[rank])} functions contain the statement")
    raise Missing("no function contains the statement")


def folders_of(mutant: Mutant, place: Place, root: Path, tests: Path) -> list[str]:
    """What pytest runs: the folder that mirrors the package (of a top-level module: the top-level tests)."""
    if mutant["path"].startswith("native/"):
        return [*mutant.get("tests", []), "tests/table", "tests/ops"]
    package = place.path.relative_to(root / "src" / "megalith").parent
    while package.parts and not (tests / "tests" / package).is_dir():
        package = package.parent
    if package.parts:
        mirrored = [(Path("tests") / package).as_posix()]
    else:
        names = sorted(p.name for p in (tests / "tests").glob("test_*.py"))
        own = f"test_{place.path.stem}.py"
        mirrored = [f"tests/{name}" for name in sorted(names, key=lambda name: name != own)]
    return list(dict.fromkeys([*mirrored, "tests/distributed"]))


class Tree:
    """A copy of the sources and tests, with a Python environment of its own that imports the copy."""

    def __init__(self, source: Path, tests: Path, top: Path) -> None:
        self.root = top / "tree"
        self.outcomes, self.plugin, self.temporary = top / "outcomes", top / "plugin", top / "t"
        shutil.copytree(source, self.root, ignore=SKIPPED, symlinks=True)
        if tests != source:
            shutil.rmtree(self.root / "tests", ignore_errors=True)
            shutil.copytree(tests / "tests", self.root / "tests", ignore=SKIPPED, symlinks=True)
        self.plugin.mkdir()
        (self.plugin / "mutant_outcomes.py").write_text(PLUGIN)
        environment = self.root / ".venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        (packages,) = environment.glob("lib/python*/site-packages")
        here = [p for p in sys.path if p.endswith("-packages")]
        (packages / "paths.pth").write_text("\n".join([*here, str(self.root / "src")]) + "\n")
        self.python = environment / "bin" / "python"
        native = importlib.util.find_spec("megalith._native")  # an editable install has it elsewhere
        if native is not None and not list((self.root / "src" / "megalith").glob("_native.*.so")):
            shutil.copy(str(native.origin), self.root / "src" / "megalith")
        imported = self._output("import megalith; print(megalith.__file__)")
        if not imported.startswith(str(self.root)):
            raise RuntimeError(f"the copy imports {imported}, not its own sources")

    def _output(self, code: str) -> str:
        return subprocess.run(
            [self.python, "-c", code], cwd=self.root, check=True, capture_output=True, text=True
        ).stdout.strip()

    def build(self) -> None:
        """Builds the native module of the copy; only what changed is compiled again."""
        import cmake
        import nanobind  # type: ignore[import-untyped]
        import ninja

        tool = Path(cmake.CMAKE_BIN_DIR) / "cmake"
        build = self.root / "build" / "mutant"
        variables = {**os.environ, "PYTHONPATH": str(Path(nanobind.__file__).parents[1])}
        make, python = Path(ninja.BIN_DIR) / "ninja", f"-DPython_EXECUTABLE={self.python}"
        configure = [
            "-S",
            str(self.root),
            "-B",
            str(build),
            "-GNinja",
            f"-DCMAKE_MAKE_PROGRAM={make}",
            python,
        ]
        for arguments in (configure, ["--build", str(build)]):
            subprocess.run([tool, *arguments], env=variables, check=True, capture_output=True)
        for module in build.glob("_native.*.so"):
            shutil.copy(module, self.root / "src" / "megalith")

    def pytest(self, arguments: Sequence[str], limit: float) -> tuple[int | None, float]:
        """Runs pytest; returns its exit code, None if the limit passed, and the seconds."""
        self.outcomes.write_text("")
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir()
        mark = uuid.uuid4().hex
        variables = {
            **os.environ,
            "MUTANT_RUN": mark,
            "MUTANT_OUTCOMES": str(self.outcomes),
            "MUTANT_FOLDERS": ",".join(a for a in arguments if not a.startswith("-")),
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": str(self.plugin),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        options = ["-q", "--tb=no", "-m", "not soak", "-p", "mutant_outcomes", "-p", "no:cacheprovider"]
        begin = time.monotonic()
        process = subprocess.Popen(
            [self.python, "-m", "pytest", *options, *arguments],
            cwd=self.root,
            env=variables,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - begin
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kill_marked(mark)
        return code, seconds

    def lines(self, outcome: str) -> list[str]:
        """The tests with an outcome."""
        return [
            line.partition(" ")[2]
            for line in self.outcomes.read_text().splitlines()
            if line.startswith(outcome + " ")
        ]


def kill_marked(mark: str) -> None:
    """Ends processes that the tests left, in whatever session they are: they inherited MUTANT_RUN."""
    for _ in range(3):
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if f"MUTANT_RUN={mark}".encode() in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)


def run_mutant(
    mutant: Mutant, tree: Tree, limit: float, deselected: Sequence[str], known: str | None = None
) -> Result:
    """Applies a mutant to the copy, runs its tests, and restores the copy.

    A known test that caught the mutant before runs alone and first; the others run if it passes or is gone.
    """
    result = {"n": mutant["n"], "path": mutant["path"], "function": mutant["function"]}
    try:
        place = locate(mutant, tree.root)
    except Missing as problem:
        return {**result, "status": "missing", "why": str(problem)}
    before = place.path.read_bytes()
    place.path.write_bytes(before[: place.start] + mutant["new"].encode() + before[place.stop :])
    modules = {path: path.read_bytes() for path in (tree.root / "src" / "megalith").glob("*.so")}
    try:
        if mutant["path"].startswith("native/"):
            tree.build()
        folders = [f for f in folders_of(mutant, place, tree.root, tree.root) if (tree.root / f).exists()]
        tree.outcomes.write_text("")
        code, seconds = None, 0.0
        if known is not None and known not in deselected and (tree.root / known.partition("::")[0]).exists():
            code, seconds = tree.pytest(["-x", known], limit)
        if not tree.lines("failed"):
            code, seconds = tree.pytest(["-x", *folders, *(f"--deselect={t}" for t in deselected)], limit)
    finally:
        for path, data in {place.path: before, **modules}.items():
            path.write_bytes(data)
    failed = tree.lines("failed")
    if failed:
        status: Result = {"status": "caught", "test": failed[0]}
    elif code is None:
        status = {"status": "timeout"}
    elif code < 0:
        status = {"status": "caught", "signal": signal.Signals(-code).name}
    elif code == 0:
        status = {"status": "survived"}
    else:
        raise RuntimeError(f"mutant {mutant['n']}: pytest ended with {code}, and no test failed")
    return {**result, **status, "seconds": round(seconds, 1), "passed": len(tree.lines("passed"))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, default=ROOT, help="tree whose src and native are mutated")
    parser.add_argument("--tests", type=Path, default=ROOT, help="tree whose tests run")
    parser.add_argument("--only", help="numbers of mutants, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--limit", type=float, default=120, help="seconds of tests for each mutant")
    parser.add_argument("--known", type=Path, help="results of an earlier run: its tests run first")
    parser.add_argument("--out", type=Path, help="file of the results, written after each mutant")
    options = parser.parse_args()
    source, tests = options.source.resolve(), options.tests.resolve()
    mutants: list[Mutant] = json.loads((HERE / "mutants.json").read_text())
    if options.only:
        wanted = {int(n) for n in options.only.split(",")}
        mutants = [mutant for mutant in mutants if mutant["n"] in wanted]
    earlier = json.loads(options.known.read_text()) if options.known else []
    known = {result["n"]: result.get("test") for result in earlier}
    results: dict[int, Result] = {}
    broken: set[str] = set()
    writing = threading.Lock()

    with tempfile.TemporaryDirectory(prefix="mu") as top:
        trees: Queue[Tree] = Queue()
        for number in range(options.jobs):
            (Path(top) / str(number)).mkdir()
            trees.put(Tree(source, tests, Path(top) / str(number)))

        def run(mutant: Mutant) -> None:
            tree = trees.get()
            try:
                result = run_mutant(mutant, tree, options.limit, sorted(broken), known.get(mutant["n"]))
            finally:
                trees.put(tree)
            with writing:
                results[mutant["n"]] = result
                print(json.dumps(result), flush=True)
                write()

        def write() -> None:
            if options.out:
                lines = ",\n".join(json.dumps(results[n]) for n in sorted(results))
                options.out.write_text(f"[\n{lines}\n]\n")

        while mutants:
            with ThreadPoolExecutor(options.jobs) as pool:
                list(pool.map(run, mutants))
            # Not every failure is due to its mutant: the tests that failed run once more without one.
            tree = trees.get()
            again = {mutant["n"] for mutant in mutants}
            suspects = sorted({r["test"] for n, r in results.items() if n in again and "test" in r})
            failing: set[str] = set()
            if suspects:
                tree.pytest(suspects, 60 + 60 * len(suspects))
                failing = set(tree.lines("failed"))
                if not set(suspects) <= failing | set(tree.lines("passed")):
                    raise RuntimeError(f"some of these tests did not run without a mutant: {suspects}")
            trees.put(tree)
            broken |= failing
            mutants = [m for m in mutants if results[m["n"]].get("test") in failing]
            for test in sorted(failing):
                print(f"fails without a mutant too: {test}", flush=True)

    counts = {
        s: sum(r["status"] == s for r in results.values())
        for s in ("caught", "survived", "timeout", "missing")
    }
    print(", ".join(f"{count} {status}" for status, count in counts.items()), f"of {len(results)}")


if __name__ == "__main__":
    main()
