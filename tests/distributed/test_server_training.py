"""Runs on parameter servers: bits, workers that join and leave, processes that are killed.

Ray starts once for this file, because a start takes seconds, and so does each process.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megalith import checkpoint
from megalith.cli import train as cli
from megalith.cli.servers import workers as workers_command
from megalith.cli.train import TrainingBar
from megalith.errors import InputError, RankTimeoutError, UsageError, WorkerFailedError
from megalith.ps.launch import ray_module, start_ray, stop_ray
from megalith.ps.messages import Failure, SpaceSpec
from megalith.ps.table_space import TableSpace
from megalith.ps.update_log import read_records
from megalith.training import Run, RunConfig, load_trained
from megalith.training import workers as worker_pool
from megalith.training.worker_batches import WorkerBatches
from megalith.training.workers import PoolWorker, TrainingWorker, WorkerPool
from tests.cli.test_train import megalith, write_clicks, write_config
from tests.distributed.ending_worker import EndingWorker
from tests.distributed.ranks import assert_same_checkpoints
from tests.serving.sync.test_training import PushWatcher, assert_served
from tests.serving.zookeeper import free_port
from tests.test_docs import ROOT, snippets

pytestmark = pytest.mark.usefixtures("restore_threads")
TIMEOUT = 60.0
"""Seconds of every wait of a run: its error must come before the time limit of a test."""


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    try:
        start_ray(object_store_bytes=128 << 20)
        yield
    finally:
        stop_ray()


def config(num_batches: int, **train: Any) -> RunConfig:
    return RunConfig.from_dict(
        {
            "data": {"kind": "synthetic", "batch_size": 32, "options": {"num_batches": num_batches}},
            "model": {"dim": 4, "options": {"hidden": [8]}},
            "train": {"log_every": 4, "threads": 1, "timeout": TIMEOUT, **train},
        }
    )


def rows_of(shards: Any) -> dict[str, list[Any]]:
    """Rows with optimizer state and times, sorted by id."""
    found = {}
    for name in shards.configs:
        columns = [(c.ids, c.rows, *c.state.values(), c.time) for c in shards.scan(name)]
        found[name] = sorted(row for each in columns for row in zip(*(x.tolist() for x in each), strict=True))
    return found


class Script(TrainingBar):
    """Calls functions after steps; copies the logs of the tables before the last save truncates them."""

    def __init__(self, run: Run, work: dict[int, Callable[[], object]], logs: Path | None = None) -> None:
        super().__init__(run)
        self.run, self.work, self.logs = run, work, logs

    def batch(self, step: int, samples: int, loss: float) -> None:
        super().batch(step, samples, loss)
        self.work.get(step, lambda: None)()

    def saving(self, rows: int) -> None:
        super().saving(rows)
        if self.logs is not None and not self.logs.exists():  # a save during which a server ends is repeated
            (found,) = self.run.directory.glob("servers/*/log/tables")
            shutil.copytree(found, self.logs)


def workers(run: Run) -> WorkerBatches:
    assert isinstance(run.batches, WorkerBatches)
    return run.batches


def wait_for_started(run: Run) -> None:
    """Waits until the processes of workers that join have started; they join at the next step."""
    wait_for_all([each.prepared for each in workers(run).pool._starting.values()])


def wait_for_all(calls: list[Any]) -> None:
    if calls:
        _, missing = ray_module().wait(calls, num_returns=len(calls), timeout=TIMEOUT)
        assert not missing, (
            f"{len(missing)} of {len(calls)} calls of workers have no answer after {TIMEOUT} s"
        )


def leave_one(run: Run) -> None:
    """Lets worker 2 leave, and waits until it has computed what is in its queue; then it has its turn."""
    run.set_workers(1)
    wait_for_all([reference for _, reference in workers(run).pool.workers[2].calls])


def kill_server(run: Run, number: int = 0) -> None:
    shards: Any = run.model.embeddings.shards
    os.kill(shards.describe_servers()[number]["pid"], signal.SIGKILL)


def kill_worker(run: Run, number: int) -> None:
    os.kill(workers(run).pool.workers[number].pid, signal.SIGKILL)


def test_synchronous_workers_have_the_bits_of_one_process() -> None:
    """The guide; a worker leaves in the midst of the epoch."""
    scope: dict[str, Any] = {}
    (code,) = snippets(ROOT / "docs" / "guides" / "server-training.md")
    exec(compile(code, "server-training.md", "exec"), scope)
    assert_same_checkpoints(scope["folder"] / "servers", scope["folder"] / "alone")
    assert not (scope["folder"] / "servers" / "servers").exists()


def replayed(run: Run, logs: Path) -> tuple[dict[str, list[Any]], list[tuple[int, int, int]]]:
    """Applies the updates of a log once, in one process: rows, and (worker, number, step) of pushes."""
    shards: Any = run.model.embeddings.shards
    spec = SpaceSpec(list(shards.configs.values()), "cpu", 0, ("float32",) * 2, False, None, 1, 60.0, "")
    space, pushes = TableSpace(spec, 0, 1), []
    (folder,) = logs.glob("server-*")
    for path in sorted(folder.glob("log-*.bin")):
        for worker, number, write in read_records(path, last=True):
            space.replay(worker, number, write)
            if write.kind == "push":
                pushes.append((worker, number, write.header["step"]))
    return rows_of(space.part.shards), pushes


def check_log(run: Run, logs: Path) -> None:
    """On one server with the synchronous log: each batch was applied exactly once, in the recorded order."""
    expected, pushes = replayed(run, logs)
    assert rows_of(load_trained(run.directory)[0].embeddings.shards) == expected
    assert len({(worker, number) for worker, number, _ in pushes}) == len(pushes) == run.step
    assert workers(run).lost_writes == 0


def test_asynchronous_workers_that_join_and_leave_and_killed_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills happen while workers compute: two steps of each are in progress."""

    def save() -> None:
        with pytest.raises(UsageError, match="are mid-step"):
            run.save()

    events: dict[int, Callable[[], object]] = {
        2: save,
        3: lambda: workers_command(run.directory, 2),
        5: lambda: wait_for_started(run),
        9: lambda: kill_worker(run, 1),
        15: lambda: kill_server(run),
        28: lambda: leave_one(run),
        34: lambda: run.stop(),
    }
    monkeypatch.setattr(cli, "TrainingBar", lambda run: Script(run, events, tmp_path / "logs"))
    out = Console(record=True, width=200)
    with Run(config(40, servers=1, server_log="sync", staleness=100), tmp_path / "run") as run:
        assert cli._train(run, out)
        check_log(run, tmp_path / "logs")
        _, pushes = replayed(run, tmp_path / "logs")
        assert next(step for worker, _, step in pushes if worker == 2) >= 5  # that of the servers
        assert workers(run).pool.replaced == 1
        assert list(workers(run).pool.workers) == [1]
        assert 34 <= run.step < 40
        cli._conclude(run, None, out)
        result = run.evaluate()
        with pytest.raises(InputError, match="workers"):
            run.set_workers(0)
    shown = out.export_text()
    for expected in ("1 server, 1 worker, async", f"stopped after step {run.step}", "report.html"):
        assert expected in shown
    resumed = Run.resume(tmp_path / "run", {"servers": 0})
    assert resumed.evaluate() == result
    resumed.train()
    assert (resumed.step, resumed.samples) == (40, 40 * 32)
    assert not (tmp_path / "run" / "servers").exists()


def write_bad_rows(path: Path) -> RunConfig:
    """A file of 7 batches of 8 good rows, each of which follows a bad one, and bad rows at the end."""
    lines = [f"{i % 2},u{i % 5},i{i % 3}\nx,u,i\n" for i in range(56)]
    path.write_text("click,user,item\n" + "".join(lines) + "too,few\n" * 3)
    schema = {"label": "click", "features": {"user": "user", "item": "item"}}
    data = {"kind": "csv", "path": str(path), "batch_size": 8, "schema": schema, "on_error": "skip"}
    model = {"dim": 4, "options": {"hidden": [8]}}
    return RunConfig.from_dict({"data": data, "model": model, "train": {"threads": 1, "timeout": TIMEOUT}})


@pytest.mark.soak
def test_a_worker_that_stops_while_it_joins_is_given_up_and_bad_rows_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both workers read all rows; one is replaced. The others would wait for a worker of the tables."""
    monkeypatch.setattr(worker_pool, "TrainingWorker", EndingWorker)
    made = write_bad_rows(tmp_path / "clicks.csv").changed(train_micro_batches=4)
    settings = {"servers": 1, "workers": 2, "server_mode": "sync", "server_log": "sync"}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "ends").write_text("2 1 push\n3 -1 stop\n4 -1 stop")
    with Run(made.changed(**{f"train_{k}": v for k, v in settings.items()}), tmp_path / "a") as run:

        def join() -> None:
            wait_for_started(run)
            workers(run).pool._timeout = 1.0  # the processes have started; each stops before it has joined

        run.train(Script(run, {2: lambda: run.set_workers(4), 3: join}))
        pool = workers(run).pool
        assert (pool.replaced, pool.given_up, list(pool.workers), workers(run).wanted) == (1, 2, [1, 2], 2)
        skipped = dict(workers(run).skipped())
    assert "worker 3 has not joined the parameter servers within 1 s" in caplog.text
    assert "The run continues with 2 workers" in caplog.text
    alone = Run(made, tmp_path / "b")
    alone.train()
    assert skipped == dict(alone.batches.skipped()) == {"wrong type": 56, "wrong number of columns": 3}
    assert_same_checkpoints(tmp_path / "a", tmp_path / "b")


def test_an_error_of_a_worker_names_it_and_has_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that, in its first epoch of four shares, it was replaced: its bad rows are counted once."""
    monkeypatch.setattr(worker_pool, "TrainingWorker", EndingWorker)
    made = write_bad_rows(tmp_path / "clicks.csv").changed(train_epochs=2, train_servers=1)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "ends").write_text("1 2 result\n1 10 error")
    counted: list[dict[str, int]] = []
    with Run(made, tmp_path / "a") as run, pytest.raises(WorkerFailedError) as found:
        run.train(Script(run, {8: lambda: counted.append(dict(workers(run).skipped()))}))
    assert workers(run).pool.replaced == 1
    assert counted == [{"wrong type": 56, "wrong number of columns": 3}]
    first, _, trace = str(found.value).partition("\n")
    assert first.startswith("worker 1 failed with ZeroDivisionError: no rows. Its traceback shows where")
    assert "--resume" in first
    assert trace.startswith("Traceback")
    assert "in _train" in trace


def test_a_bound_of_staleness_with_a_limit_of_steps_and_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that gets no step before a save or a stop is not waited for, though the other is slower."""
    monkeypatch.setattr(worker_pool, "TrainingWorker", EndingWorker)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "ends").write_text("2 -1 slow")
    made = config(24, servers=1, workers=2, staleness=0, save_every=4, max_steps=21)
    with Run(made, tmp_path / "r") as run:
        for steps in (3, 2, 1):  # either worker may report the last one; the other may have two queued
            stop, run.stop_requested = run.step + steps, False
            run.train(Script(run, {stop: run.stop}))
            assert stop <= run.step <= stop + 4
            assert run.samples == run.step * 32
            assert checkpoint.read_manifest(tmp_path / "r" / "checkpoint").progress["step"] == run.step
        run.stop_requested = False
        run.train()
        assert (run.step, run.samples) == (21, 21 * 32)


def processes(run: Run) -> list[int]:
    """The ids of the processes of servers and workers."""
    shards: Any = run.model.embeddings.shards
    servers = [numbers["pid"] for numbers in shards.describe_servers()]
    return servers + [worker.pid for worker in workers(run).pool.workers.values()]


def wait_for_end(process: int) -> None:
    """Waits until a process has ended."""
    deadline = time.monotonic() + 120
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(process, 0)
            time.sleep(0.02)
        pytest.fail(f"process {process} has not ended")


def test_a_stopped_run_on_a_file_continues_on_another_number_of_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the midst, saves in the background: the bits of one process that trains without a stop."""
    write_clicks(tmp_path / "train.parquet", 0, 4)
    path = write_config(tmp_path, 32, "micro_batches = 2")
    flags = ("--servers", 1, "--mode", "sync", "--log", "sync", "--save-async", "--save-every", 2)
    found: list[int] = []

    def script(run: Run) -> Script:
        work = {4: lambda: found.extend(processes(run)), 5: lambda: signal.raise_signal(signal.SIGINT)}
        return Script(run, work)

    monkeypatch.setattr(cli, "TrainingBar", script)
    stopped = megalith("train", "--config", path, "--run", tmp_path / "a", *flags)
    assert stopped.exit_code == 130, stopped.output
    assert "stopped after step 5" in stopped.output
    assert not (tmp_path / "a" / "servers").exists()
    assert len(found) == 2
    for process in found:
        wait_for_end(process)
    monkeypatch.undo()
    resumed = megalith("train", "--run", tmp_path / "a", "--resume", "--servers", 2)
    assert resumed.exit_code == 0, resumed.output
    assert checkpoint.read_manifest(tmp_path / "a" / "checkpoint").progress["step"] == 8
    alone = megalith("train", "--config", path, "--run", tmp_path / "b")
    assert alone.exit_code == 0, alone.output
    assert_same_checkpoints(tmp_path / "a", tmp_path / "b")


@pytest.mark.soak
def test_servers_continue_a_run_with_other_data_with_the_bits_of_one_process(tmp_path: Path) -> None:
    write_clicks(tmp_path / "train.parquet", 0, 4)
    write_clicks(tmp_path / "more.parquet", 4, 2)
    path = write_config(tmp_path, 32, "micro_batches = 2")
    assert megalith("train", "--config", path, "--run", tmp_path / "base").exit_code == 0
    for run, flags in (("a", ("--servers", 1, "--mode", "sync", "--log", "sync")), ("b", ())):
        data = ("--path", tmp_path / "more.parquet", "--run", tmp_path / run)
        said = megalith("train", "--from", tmp_path / "base", *data, *flags)
        assert said.exit_code == 0, said.output
    assert checkpoint.read_manifest(tmp_path / "a" / "checkpoint").progress["step"] == 12
    assert_same_checkpoints(tmp_path / "a", tmp_path / "b")


def test_processes_of_ray_have_the_priority_of_the_run() -> None:
    """With Ray's own default, 15, they get no CPU while other tests compute, and runs exceed their limits."""
    ray = ray_module()
    assert ray.get(ray.remote(num_cpus=0)(lambda: os.nice(0)).remote(), timeout=TIMEOUT) == os.nice(0)


def test_a_worker_that_hangs_is_named() -> None:
    """Ray reports a process that has ended, but not one that is stopped."""
    ray = ray_module()
    hanging = ray.remote(num_cpus=0)(lambda: time.sleep(1000)).remote()
    worker = PoolWorker(3, None, pid=77, calls=deque([(("step", ()), hanging)]))
    pool = WorkerPool.__new__(WorkerPool)
    pool.workers, pool._silence, pool._last = {3: worker}, 0.2, 0
    message = r"no answer within 0.2 s to step of worker 3 \(pid 77\): the process hangs.* --resume"
    try:
        with pytest.raises(RankTimeoutError, match=message):
            pool.wait()
        with pytest.raises(RankTimeoutError, match=message):
            pool.answer(worker)
    finally:
        ray.cancel(hanging, force=True)


def test_an_error_of_leaving_is_returned() -> None:
    def fail() -> None:
        raise RankTimeoutError("server 0 does not answer")

    worker = TrainingWorker.__new__(TrainingWorker)
    worker._resting = False
    worker._tables = SimpleNamespace(leave=fail)  # type: ignore[assignment]
    found = worker.leave()
    assert isinstance(found, Failure)
    assert "does not answer" in str(found.error)


class PushedScript(PushWatcher):
    """Calls functions after steps of a run that publishes."""

    def __init__(self, run: Run, stack: ExitStack, port: int, work: dict[int, Callable[[], object]]) -> None:
        super().__init__(run, stack, port)
        self.work = work

    def batch(self, step: int, samples: int, loss: float) -> None:
        super().batch(step, samples, loss)
        self.work.get(step, lambda: None)()


def test_servers_push_their_rows_to_serving_while_workers_train(tmp_path: Path) -> None:
    """A parameter server is killed: it has no publisher then, and a new session sends everything."""
    port = free_port()
    publish = {"publish": f"static:127.0.0.1:{port}", "publish_interval": 1e-3, "publish_name": "clicks"}
    settings = {"servers": 2, "server_log": "sync", "save_every": 12, **publish}
    with ExitStack() as stack:
        run = stack.enter_context(Run(config(36, **settings), tmp_path / "run"))
        watcher = PushedScript(run, stack, port, {20: lambda: kill_server(run, 1)})
        run.train(watcher)
        shards: Any = run.model.embeddings.shards
        assert [numbers["consumers"] for numbers in shards.describe_servers()] == [["checkpoint"]] * 2
        assert watcher.server is not None
        assert watcher.result is not None
        assert (watcher.result.lagging, watcher.result.servers) == ((), 1)
        trained, _ = load_trained(tmp_path / "run")
        assert_served(watcher.server, trained)


def cycle(kills: Sequence[Callable[[], object]], every: int, count: int) -> dict[int, Callable[[], object]]:
    return {every * (n + 1): kills[n % len(kills)] for n in range(count)}


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_fifty_kills_of_servers_and_workers(tmp_path: Path) -> None:
    """Asynchronous workers: every batch is applied once, whatever is killed in the midst of a step."""
    run = Run(config(240, servers=1, workers=2, server_log="sync"), tmp_path / "run")
    with run:
        kills = [lambda: kill_worker(run, 1), lambda: kill_server(run), lambda: kill_worker(run, 2)]
        run.train(Script(run, cycle(kills, 4, 51), tmp_path / "logs"))
        check_log(run, tmp_path / "logs")
        assert (run.step, workers(run).pool.replaced) == (240, 34)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_fifty_kills_between_synchronous_steps_leave_the_bits_of_one_process(tmp_path: Path) -> None:
    """Saves in between: servers start again from a checkpoint and their log, dense weights included."""
    settings = {"micro_batches": 2, "epochs": 1, "save_every": 20}
    with Run(
        config(110, servers=2, workers=2, server_mode="sync", server_log="sync", **settings), tmp_path / "a"
    ) as run:
        kills = [lambda: kill_server(run, 0), lambda: kill_worker(run, 1), lambda: kill_server(run, 1)]
        run.train(Script(run, cycle(kills, 2, 51)))
        assert workers(run).pool.replaced == 17
    Run(config(110, **settings), tmp_path / "b").train()
    assert_same_checkpoints(tmp_path / "a", tmp_path / "b")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_thirty_ends_within_synchronous_steps_leave_the_bits_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers end at every moment of a step, two of them in some steps; servers are killed in between."""
    monkeypatch.setattr(worker_pool, "TrainingWorker", EndingWorker)
    settings = {"micro_batches": 2, "epochs": 1, "save_every": 20}
    moments = ("push", "half", "between", "result")
    plan = [f"{1 + n % 2} {n} {moments[n // 2 % 4]}" for n in range(1, 26)]
    plan += [f"{2 - n % 2} {n} {moments[n % 4]}" for n in range(2, 26, 5)]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "ends").write_text("\n".join(plan))
    with Run(
        config(30, servers=2, workers=2, server_mode="sync", server_log="sync", **settings), tmp_path / "a"
    ) as run:
        kills = [lambda: kill_server(run, 0), lambda: kill_server(run, 1)]
        run.train(Script(run, cycle(kills, 5, 5)))
        assert workers(run).pool.replaced == len(plan) == 30
    Run(config(30, **settings), tmp_path / "b").train()
    assert_same_checkpoints(tmp_path / "a", tmp_path / "b")
