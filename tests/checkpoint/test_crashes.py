"""kill -9 at any point of a save: afterwards the last complete state is loaded, bit for bit.

Children are forked from a parent that holds the model, so each costs milliseconds. The parent then acts as a
restarted run: it loads the checkpoint and continues, with the remains of the dead child on the disk.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalith import checkpoint
from megalith.checkpoint import saved_rows
from megalith.storage.store import LocalStore
from tests.checkpoint.support import Model, State, assert_same, state_of, train

Save = Callable[[Model, Path], object]
SECONDS = 60


def async_save(model: Model, path: Path, *, delta: bool) -> None:
    handle = checkpoint.async_save(model, path, delta=delta)
    seed = 10_000
    while not handle.done():  # training that must not change the files
        train(model, seed := seed + 1)
    handle.wait()


SAVES: dict[str, Save] = {
    "save": checkpoint.save,
    "delta": checkpoint.save_delta,
    "async save": lambda model, path: async_save(model, path, delta=False),
    "async delta": lambda model, path: async_save(model, path, delta=True),
    "compact": lambda model, path: checkpoint.compact(path),
}


class Trap:
    """Counts the disk operations of a process and kills it at one of them. Set in a child, never removed.

    Steps: before and after each fsync and rename, before each part of a file, each new directory and each
    deletion.
    """

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.steps = 0

    def step(self) -> None:
        if self.steps == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1

    def set(self) -> None:
        for name in ("fsync", "replace", "mkdir", "unlink", "rmdir"):
            setattr(os, name, self._around(getattr(os, name), after=name in ("fsync", "replace")))
        real = LocalStore.write

        def write(store: LocalStore, name: str, parts: Any, **options: Any) -> Any:
            return real(store, name, self._each(parts), **options)  # type: ignore[arg-type]

        LocalStore.write = write  # type: ignore[method-assign]

    def _around(self, call: Callable[..., Any], after: bool) -> Callable[..., Any]:
        def trapped(*args: Any, **options: Any) -> Any:
            self.step()
            result = call(*args, **options)
            if after:
                self.step()
            return result

        return trapped

    def _each(self, parts: Any) -> Any:
        for part in parts:
            self.step()
            yield part


class Child:
    """A forked process that runs a function under a trap; it counts `steps` if it is not killed."""

    def __init__(self, work: Callable[[], object], trap: Trap) -> None:
        self.killed = False
        self.steps = 0
        self._read, write = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(write)
            return
        try:
            signal.alarm(SECONDS)
            sys.setswitchinterval(1e-4)  # otherwise training delays the saving thread
            trap.set()
            os.write(write, b"begins")
            work()
            os.write(write, f"ends {trap.steps}".encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def kill_after(self, seconds: float) -> None:
        """Kill the process a number of seconds after its work has begun, unless it has ended."""
        os.read(self._read, 6)
        if not select.select([self._read], [], [], seconds)[0]:
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> None:
        output = b""
        while part := os.read(self._read, 100):
            output += part
        os.close(self._read)
        _, status = os.waitpid(self._pid, 0)
        self.killed = os.WIFSIGNALED(status)
        if self.killed:
            assert os.WTERMSIG(status) == signal.SIGKILL, f"the child ended by signal {os.WTERMSIG(status)}"
            return
        assert b"ends " in output, "the child failed"
        self.steps = int(output.partition(b"ends ")[2])


class Run:
    """A run whose saves are killed and which continues from the remaining checkpoint."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.random = random.Random(seed)
        self.model = Model()
        self.outcomes: Counter[str] = Counter()
        self._seed = 0
        self._saved: State = {}
        train(self.model, 0)
        checkpoint.save(self.model, root)
        whole = {name: self._whole(save) for name, save in SAVES.items()}
        self._steps = {name: steps for name, (steps, _) in whole.items()}
        self._seconds = {name: seconds for name, (_, seconds) in whole.items()}

    def _whole(self, save: Save) -> tuple[int, float]:
        """Run a save without a kill; return its steps and its seconds. It leaves no unnamed file."""
        train(self.model, self._next())
        if save is SAVES["compact"]:
            checkpoint.save_delta(self.model, self.root)
        self._saved = state_of(self.model)
        began = time.perf_counter()
        child = Child(lambda: save(self.model, self.root), Trap(None))
        child.wait()
        seconds = time.perf_counter() - began
        checkpoint.load(self.model, self.root)
        assert_same(state_of(self.model), self._saved)
        named = {file.path for file in checkpoint.read_manifest(self.root).all_files()}
        there = {str(p.relative_to(self.root)) for p in self.root.rglob("*") if p.is_file()}
        assert there == named | {"manifest.json"}
        return child.steps, seconds

    def crash(self, name: str, *, by_clock: bool = False, at: int | None = None) -> None:
        """Kill one save at disk step `at` (None: a random one), or at a random time with by_clock."""
        train(self.model, self._next())
        before = state_of(self.model)
        if name == "compact":
            checkpoint.save_delta(self.model, self.root)
            self._saved = before
        tip = checkpoint.read_manifest(self.root).tip

        if at is None:
            at = self.random.randrange(self._steps[name])
        trap = Trap(None if by_clock else at)
        child = Child(lambda: SAVES[name](self.model, self.root), trap)
        if by_clock:
            child.kill_after(self.random.random() * self._seconds[name])
        child.wait()

        checkpoint.load(self.model, self.root)
        found = state_of(self.model)
        is_new = checkpoint.read_manifest(self.root).tip != tip
        assert_same(found, before if is_new else self._saved)
        assert child.killed or is_new or name == "compact", "a save that ended is there"
        self._saved = found
        self.outcomes["killed" if child.killed else "ended"] += 1
        self.outcomes["new" if is_new else "old"] += 1

    def _next(self) -> int:
        self._seed += 1
        return self._seed


def crash_many(root: Path, rounds: int, seed: int) -> Counter[str]:
    run = Run(root, seed)
    names = list(SAVES)
    for number in range(rounds):
        # In turn, each kind of save is killed at a disk step and by the clock.
        run.crash(names[number % len(names)], by_clock=number // len(names) % 3 == 2)
    for name in names:  # always: one save that is killed at once, one that is not killed
        run.crash(name, at=0)
        run.crash(name, at=sys.maxsize)
    return run.outcomes


def assert_all_outcomes(outcomes: Counter[str], rounds: int) -> None:
    """Each outcome must have occurred; how often depends on the clock."""
    kinds = len(SAVES)
    assert outcomes["killed"] + outcomes["ended"] == rounds + 2 * kinds
    assert outcomes["killed"] >= kinds
    assert outcomes["ended"] >= kinds
    assert outcomes["old"] >= kinds
    assert outcomes["new"] >= kinds - 1  # a compaction may keep the id of the state


@pytest.fixture(autouse=True)
def many_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_rows, "PIECE_BYTES", 1000)


def test_killed_saves_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    assert_all_outcomes(crash_many(tmp_path, 25, seed=1), 25)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_killed_saves_leave_a_complete_checkpoint(tmp_path: Path, seed: int) -> None:
    assert_all_outcomes(crash_many(tmp_path, 250, seed=seed + 100), 250)


class DiskOrder:
    """Records, by inode, when each file and directory was made or renamed, and when it was flushed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.named: dict[int, int] = {}
        self.flushed: dict[int, int] = {}
        self.commits: list[set[str]] = []
        self._time = 0
        real_fsync, real_replace, real_mkdir = os.fsync, os.replace, os.mkdir

        def fsync(handle: int) -> None:
            real_fsync(handle)
            self.flushed[os.fstat(handle).st_ino] = self._next()

        def replace(source: Any, target: Any) -> None:
            if Path(target).name == "manifest.json":
                self.commits.append(self._unsafe(Path(target).parent))
            real_replace(source, target)
            self.named[os.stat(target).st_ino] = self._next()

        def mkdir(path: Any, *args: Any, **options: Any) -> None:
            real_mkdir(path, *args, **options)
            self.named[os.stat(path).st_ino] = self._next()

        for name, call in (("fsync", fsync), ("replace", replace), ("mkdir", mkdir)):
            monkeypatch.setattr(os, name, call)

    def _next(self) -> int:
        self._time += 1
        return self._time

    def _unsafe(self, root: Path) -> set[str]:
        """Return what a power failure now could lose: content that was not flushed, or a name."""
        unsafe = set()
        for path in root.rglob("*"):
            inode, folder = path.stat().st_ino, path.parent.stat().st_ino
            content = path.is_dir() or inode in self.flushed
            if not content or self.flushed.get(folder, 0) < self.named.get(inode, 0):
                unsafe.add(path.name)
        return unsafe - {"manifest.json.tmp"}  # its name does not matter


@pytest.mark.parametrize("kind", ["save", "delta", "compact"])
def test_the_manifest_is_replaced_after_all_other_files_are_on_the_disk(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    order = DiskOrder(monkeypatch)
    train(model, 0)
    checkpoint.save(model, tmp_path)
    train(model, 1)
    if kind == "compact":
        checkpoint.save_delta(model, tmp_path)
    SAVES[kind](model, tmp_path)

    assert order.commits == [set()] * (3 if kind == "compact" else 2)
    assert order.flushed[(tmp_path / "manifest.json").stat().st_ino]


@pytest.mark.parametrize("kind", ["save", "delta"])
def test_a_save_killed_right_before_or_after_the_rename_of_the_manifest(tmp_path: Path, kind: str) -> None:
    for after in (False, True):
        root = tmp_path / str(after)
        model = Model()
        train(model, 0)
        checkpoint.save(model, root)
        last = state_of(model)
        train(model, 1)
        real = os.replace

        def dies(source: Any, target: Any, after: bool = after, real: Any = real) -> None:
            if Path(target).name != "manifest.json":
                return real(source, target)
            if after:
                real(source, target)
            os.kill(os.getpid(), signal.SIGKILL)

        def save(model: Model = model, root: Path = root, dies: Any = dies) -> None:
            os.replace = dies
            SAVES[kind](model, root)

        child = Child(save, Trap(None))
        child.wait()

        assert child.killed
        loaded = Model()
        checkpoint.load(loaded, root)
        assert_same(state_of(loaded), state_of(model) if after else last)


def test_a_killed_rotation_has_a_latest_checkpoint_to_load(tmp_path: Path) -> None:
    rotation = checkpoint.Rotation(tmp_path, keep_last=2)
    model = Model()
    train(model, 0)
    rotation.save(model, 0)
    states = {0: state_of(model)}
    generator = random.Random(3)
    for step in range(1, 9):
        train(model, step)
        states[step] = state_of(model)
        child = Child(lambda step=step: rotation.save(model, step), Trap(generator.randrange(60)))  # type: ignore[misc]
        child.wait()

        latest = rotation.latest()
        assert latest is not None
        found = rotation.steps()[-1]
        assert latest == rotation.path(found)
        assert child.killed or found == step
        loaded = Model()
        checkpoint.load(loaded, latest)
        assert_same(state_of(loaded), states[found])

    rotation.save(model, 9)
    assert len(rotation.steps()) == len(list(tmp_path.iterdir())) == 2
