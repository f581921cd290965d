"""kill -9 at any point of a save: what is loaded afterwards is the last complete state, bit by bit.

Children are forked from a parent that holds the model, so each costs milliseconds. The parent then does what
a restarted run does: it loads the checkpoint and goes on from there, over whatever the dead child left.
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
from megalith.checkpoint import piece_writer as pen
from megalith.storage.store import LocalStore
from tests.checkpoint.support import Model, State, assert_same, state_of, train

Save = Callable[[Model, Path], object]
SECONDS = 60


def async_save(model: Model, path: Path, *, delta: bool) -> None:
    handle = checkpoint.async_save(model, path, delta=delta)
    seed = 10_000
    while not handle.done():  # training that must not reach the files
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
    """Counts a process's steps on the disk, and kills it at one of them. Set in a child: it is never removed.

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

        def write(store: LocalStore, name: str, parts: Any) -> Any:
            return real(store, name, self._each(parts))  # type: ignore[arg-type]

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
    """A forked process that does some work under a trap; `steps` once it has ended by itself."""

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
            sys.setswitchinterval(1e-4)  # else training keeps the saving thread waiting
            trap.set()
            os.write(write, b"begins")
            work()
            os.write(write, f"ends {trap.steps}".encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def kill_after(self, seconds: float) -> None:
        """Kills it that long after its work has begun, unless it ends before."""
        os.read(self._read, 6)
        if not select.select([self._read], [], [], seconds)[0]:
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> None:
        said = b""
        while part := os.read(self._read, 100):
            said += part
        os.close(self._read)
        _, status = os.waitpid(self._pid, 0)
        self.killed = os.WIFSIGNALED(status)
        if self.killed:
            assert os.WTERMSIG(status) == signal.SIGKILL, f"the child ended by signal {os.WTERMSIG(status)}"
            return
        assert b"ends " in said, "the child failed"
        self.steps = int(said.partition(b"ends ")[2])


class Run:
    """A run whose saves die, and which goes on from what it finds."""

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
        """A save nobody disturbs: its steps and how long it takes. It leaves no file without a name."""
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
        """One save that dies at disk step `at` (None: a random one), or at a random time with by_clock."""
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
        # Every save dies at a step of the disk and by the clock, in turn.
        run.crash(names[number % len(names)], by_clock=number // len(names) % 3 == 2)
    for name in names:  # whatever the clock did above: one save that dies at once, one that nothing kills
        run.crash(name, at=0)
        run.crash(name, at=sys.maxsize)
    return run.outcomes


def assert_all_outcomes(outcomes: Counter[str], rounds: int) -> None:
    """How many saves die late depends on the clock; each outcome must have happened."""
    kinds = len(SAVES)
    assert outcomes["killed"] + outcomes["ended"] == rounds + 2 * kinds
    assert outcomes["killed"] >= kinds
    assert outcomes["ended"] >= kinds
    assert outcomes["old"] >= kinds
    assert outcomes["new"] >= kinds - 1  # a compaction may leave the state's name as it was


@pytest.fixture(autouse=True)
def many_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pen, "PIECE_BYTES", 1000)


def test_fifty_saves_die_and_none_does_harm(tmp_path: Path) -> None:
    assert_all_outcomes(crash_many(tmp_path, 50, seed=1), 50)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_saves_die_and_none_does_harm(tmp_path: Path, seed: int) -> None:
    assert_all_outcomes(crash_many(tmp_path, 250, seed=seed + 100), 250)


@pytest.mark.parametrize("kind", ["save", "delta"])
def test_a_save_that_dies_right_before_or_after_the_rename_of_the_manifest(tmp_path: Path, kind: str) -> None:
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


def test_a_rotation_that_dies_has_a_latest_checkpoint_to_load(tmp_path: Path) -> None:
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
