"""save, save_delta and async_save: write a model to a directory or an object store.

A `SaveJob` is one save. Its state is frozen when the job is created and written by `run`, in any thread.
Snapshots freeze the rows and rank 0's copies freeze the dense weights, so training can continue during the
writing. Sharded dense weights are gathered when the job is created (`whole_copies`). The data goes to a
new folder `data-ID` and is flushed to the disk, then the manifest is replaced in one step. A reader therefore
always sees the last complete checkpoint, wherever the writer stops, also by a power failure. Folders that the
manifest does not name are deleted afterwards.

With several ranks, each rank writes its own rows. After the job is created the ranks exchange nothing except
these files in the data folder:

| file | written by | content | read by |
| --- | --- | --- | --- |
| ranks/RANK.json | each rank but 0 | {"parts": its files} or {"error": text} | rank 0, before it commits |
| failed.json | rank 0, if it fails | {"error": text} | the other ranks, while they wait |
| ../manifest.json | rank 0 | names this save's id: it is committed | the other ranks, while they wait |
"""

from __future__ import annotations

import json
import logging
import time as clock
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from os import PathLike
from typing import Any

import torch
from torch import nn

from megalith.checkpoint.json_state import pack
from megalith.checkpoint.manifest import (
    DATA,
    MAX_MANIFEST,
    NAME,
    CollectionEntry,
    Delta,
    Manifest,
    TableEntry,
    commit,
    describe,
    describe_policies,
    full_name,
    megalith_version,
    read_manifest,
)
from megalith.checkpoint.model_state import (
    CONSUMER,
    check_equal_options,
    check_idle,
    check_last_save,
    check_weights,
    collections_of,
    dense_state,
    ranks_of,
    routing_of,
    set_last_save,
    tables_of,
    whole_copies,
)
from megalith.checkpoint.parts import (
    PartReport,
    PartSave,
    SavedTable,
    close_on_server,
    freeze_on_server,
    place_of,
    write_on_server,
)
from megalith.checkpoint.saved_rows import write_tensors
from megalith.errors import CheckpointError, InputError, UsageError
from megalith.ops import checks
from megalith.shards import Shards
from megalith.storage.json_codec import (
    MAX_DEPTH,
    JsonFields,
    from_json,
    is_nested_deeper,
    parse_json,
    to_json,
)
from megalith.storage.store import Store, open_store
from megalith.table.rounding import DTYPES

logger = logging.getLogger(__name__)

MAX_PROGRESS_DEPTH = MAX_DEPTH - 3
"""Levels of `progress` and of packed optimizer state: the manifest of a delta adds three levels."""
_POLL_SECONDS = 0.02
_Reports = list[dict[str, PartReport]]
"""By part of the save, what it has written of each table."""


@dataclass(frozen=True)
class _RankReport:
    """The file of a rank that has written its rows."""

    parts: _Reports


@dataclass(frozen=True)
class SaveOptions:
    """The options of `save`, `save_delta` and `async_save`, which describe them."""

    optimizer: torch.optim.Optimizer | None
    progress: dict[str, Any] | None
    precision: str
    on_rows: Callable[[int], None] | None
    timeout: float
    track: bool  # Whether tables track the rows that change after this save
    delta: bool  # Whether only rows changed since the last save are written
    on_complete: Callable[[], object] | None = None

    def open(self, path: str | PathLike[str] | Store) -> Store:
        """Open the store at a path; raise InputError if an option has the wrong type or value."""
        if self.optimizer is not None and not hasattr(self.optimizer, "state_dict"):
            raise InputError(f"optimizer must be a torch optimizer, got {type(self.optimizer).__name__}")
        if self.progress is not None and not isinstance(self.progress, dict):
            raise InputError(f"progress must be a dict of JSON data, got {type(self.progress).__name__}")
        checks.one_of(self.precision, tuple(DTYPES), "precision")
        checks.flag(self.track, "deltas")
        checks.flag(self.delta, "delta")
        checks.callback(self.on_rows, "on_rows")
        checks.callback(self.on_complete, "on_complete")
        checks.seconds(self.timeout, "timeout")
        return open_store(path)


class SaveJob:
    """A save of a model. A collective call: all ranks create the job together."""

    def __init__(self, model: nn.Module, path: str | PathLike[str] | Store, options: SaveOptions) -> None:
        self.waited = 0.0
        self._options = options
        self._collections = collections_of(model)
        self._ranks = ranks_of(model)
        self.store: Store = self._ranks.agree(lambda: options.open(path), error=CheckpointError)
        check_equal_options(
            self._ranks,
            "a save",
            {
                "path": self.store.where,
                "precision": options.precision,
                "deltas": options.track,
                "delta": options.delta,
            },
        )
        self._steps = {path: c.global_step for path, c in self._collections.items()}
        self._tables: list[tuple[SavedTable, Shards]] = []
        # The shards whose rows are in other processes, with their tables
        self._remote: dict[Shards, list[SavedTable]] = {}
        self._part: PartSave | None = None
        self._reports: _Reports = []
        weights, state = self._ranks.agree(lambda: self._check(model), error=CheckpointError)
        check_weights(weights | {f"optimizer state {name}": t for name, t in state.items()}, self._ranks)
        # Copies, because training continues. Sharded tensors are gathered here: `run` exchanges nothing.
        self._dense, self._tensors = self._ranks.agree(
            lambda: (whole_copies(weights, self._ranks), whole_copies(state, self._ranks)),
            error=CheckpointError,
        )
        self.id = str(self._ranks.broadcast(uuid.uuid4().hex[:12]))
        self._folder = f"{DATA}{self.id}"
        try:
            self._ranks.agree(self._freeze, error=CheckpointError)
        except BaseException:
            self._end(give_back=True)
            if self._remote and self._ranks.size == 1:
                with suppress(Exception):
                    self.store.remove(self._folder)  # servers have begun to write
            raise

    # ---- freezing

    def _check(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Check the model; return its dense weights and the tensors of the optimizer's state."""
        options = self._options
        check_idle(self._collections)
        names = [full_name(path, name) for path, name, _ in tables_of(self._collections)]
        if len(set(names)) != len(names):
            raise UsageError(f"two tables of this model have the same name: {', '.join(sorted(names))}")
        try:
            # This also makes a copy: the caller may change the content later.
            self._progress: Any = parse_json(json.dumps(options.progress or {}, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(
                f"progress must be JSON data of at most {MAX_PROGRESS_DEPTH} levels: {error}"
            ) from None
        self._structure: Any = None
        state: dict[str, torch.Tensor] = {}
        if options.optimizer is not None:
            self._structure, state = pack(options.optimizer.state_dict())
        for name, data in (("progress", self._progress), ("the optimizer's packed state", self._structure)):
            if is_nested_deeper(data, MAX_PROGRESS_DEPTH):
                raise InputError(f"{name} must be JSON data of at most {MAX_PROGRESS_DEPTH} levels")
        if options.delta and self._ranks.rank == 0:
            check_last_save(self._collections.values(), self.store, read_manifest(self.store))
        return dense_state(model), state

    def _freeze(self) -> None:
        options = self._options
        for collection in self._collections.values():
            collection.shards.flush()
            if options.track:
                collection.shards.track(CONSUMER)
            collection.checkpoint_state.save_in_progress = self
        here = []
        for path, name, shards in tables_of(self._collections):
            numbers = f"{list(self._collections).index(path)}-{list(shards.configs).index(name)}"
            saved = SavedTable(path, name, f"{self._folder}/tables/{numbers}")
            self._tables.append((saved, shards))
            if shards.holds_rows:
                here.append((saved, shards.local[name]))
            else:
                self._remote.setdefault(shards, []).append(saved)
        self._part = PartSave(here, self._ranks.rank, track=options.track, delta=options.delta)
        for shards, tables in self._remote.items():
            place = place_of(shards, self.store, [(saved.collection, saved.name) for saved in tables])
            shards.each_part(
                freeze_on_server,
                self.id,
                tables,
                options.track,
                options.delta,
                place,
                self.store,
                options.precision,
            )

    # ---- writing

    def run(self) -> Manifest:
        """Write everything and commit it."""
        # If it fails, the previous checkpoint remains, and the rows count as changed again.
        try:
            self._reports = self._write_tables()
            manifest = self._commit() if self._ranks.rank == 0 else self._report_and_wait()
        except BaseException as error:
            self._end(give_back=True)
            self._report_failure(error)
            raise
        self._end(give_back=False)
        if self._options.track:
            set_last_save(self._collections.values(), (self.store.address, self.id))
        logger.info("saved %s to %s", self.id, self.store.where)
        return manifest

    def _end(self, *, give_back: bool) -> None:
        """End the snapshots. The error of a server is logged: the save is complete or has its own error."""
        try:
            if self._part is not None:
                self._part.close(give_back=give_back)
                self.waited = self._part.waited
            for shards in self._remote:
                try:
                    self.waited += sum(shards.each_part(close_on_server, self.id, give_back))
                except Exception as error:  # for instance, it has ended, and with it what it kept of the save
                    logger.warning("save %s: %s", self.id, error)
        finally:
            for collection in self._collections.values():
                if collection.checkpoint_state.save_in_progress is self:  # not if it never began
                    collection.checkpoint_state.save_in_progress = None

    def _write_tables(self) -> _Reports:
        """Write the rows of this process and its servers; return the reports of their parts."""
        assert self._part is not None
        options = self._options
        try:
            reports = [self._part.write(self.store, options.precision, options.on_rows)]
            for shards in self._remote:
                reports += shards.each_part(write_on_server, self.id, options.timeout, background=True)
                if options.on_rows is not None:
                    options.on_rows(sum(part.rows for report in reports for part in report.values()))
        except FileNotFoundError:
            raise self._overtaken() from None
        return reports

    def _commit(self) -> Manifest:
        """On rank 0: wait for the reports of the other ranks, write the manifest, delete old files."""
        reports = list(self._reports)
        for rank in range(1, self._ranks.size):
            reports += self._read_report(rank)
        files = {
            name: write_tensors(self.store, f"{self._folder}/{name}.safetensors", tensors)
            for name, tensors in (("dense", self._dense), ("optimizer", self._tensors))
            if tensors
        }
        common: dict[str, Any] = {
            "id": self.id,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "collections": self._entries(reports),
            "dense": files.get("dense"),
            "optimizer": self._structure,
            "optimizer_tensors": files.get("optimizer"),
            "progress": self._progress,
        }
        if self._options.delta:
            base = read_manifest(self.store)  # it may have been compacted in the meantime
            check_last_save(self._collections.values(), self.store, base)
            manifest = replace(base, deltas=[*base.deltas, Delta(**common, previous=base.tip)])
        else:
            manifest = Manifest(**common, megalith=megalith_version())
        try:
            for report in reports:  # one file per rank shows whether another save has deleted the folder
                for piece in [piece for part in report.values() for piece in part.pieces][:1]:
                    self.store.size(piece.file.path)
        except FileNotFoundError:
            raise self._overtaken() from None
        commit(self.store, manifest)
        if self._ranks.size > 1:
            with suppress(OSError):  # the reports are no longer needed
                self.store.remove(f"{self._folder}/ranks")
        return manifest

    def _overtaken(self) -> CheckpointError:
        return CheckpointError(
            f"{self.store.where}: another save ended in the meantime and deleted this one's files; "
            "only one process at a time can save to a path"
        )

    def _entries(self, reports: _Reports) -> dict[str, CollectionEntry]:
        entries = {path: CollectionEntry(step, {}) for path, step in self._steps.items()}
        for saved, shards in self._tables:
            config, name = shards.configs[saved.name], saved.full_name
            kept = self._collections[saved.collection].checkpoint_state.routing
            parts = [report[name] for report in reports if name in report]
            entries[saved.collection].tables[saved.name] = TableEntry(
                segments=describe(config),
                seed=parts[0].seed,
                routing=routing_of(shards, saved.name, kept),
                pieces=[piece for part in parts for piece in part.pieces],
                live=sum(part.live for part in parts),
                removed=[piece for part in parts for piece in part.removed],
                pending=[piece for part in parts for piece in part.pending],
                policies=describe_policies(config),
            )
        return entries

    # ---- several ranks

    def _report_name(self, rank: int) -> str:
        return f"{self._folder}/ranks/{rank:05}.json"

    def _read_report(self, rank: int) -> _Reports:
        name = self._report_name(rank)
        report = self._await(lambda: _read_json(self.store, name), f"rank {rank} to write its rows")
        if "error" in report:
            raise CheckpointError(f"rank {rank}: {report['error']}")
        where = f"{self.store.where}/{name}"
        fields = JsonFields(report, lambda problem: CheckpointError(f"{where}: {problem}"))
        return from_json(_RankReport, fields).parts

    def _report_and_wait(self) -> Manifest:
        """On other ranks: write the report, then wait until rank 0 has written the manifest."""
        self._write_json(self._report_name(self._ranks.rank), to_json(_RankReport(self._reports)))

        def poll() -> Manifest | None:
            failed = _read_json(self.store, f"{self._folder}/failed.json")
            if failed is not None:
                raise CheckpointError(f"rank 0: {failed['error']}")
            return read_manifest(self.store) if self._is_committed() else None

        found: Manifest = self._await(poll, "rank 0 to write the manifest")
        return found

    def _await(self, poll: Callable[[], Any], event: str) -> Any:
        deadline = clock.monotonic() + self._options.timeout
        while (found := poll()) is None:
            if clock.monotonic() > deadline:
                raise CheckpointError(
                    f"{self.store.where}: rank {self._ranks.rank} waited {self._options.timeout} s for "
                    f"{event}"
                )
            clock.sleep(_POLL_SECONDS)
        return found

    def _report_failure(self, error: BaseException) -> None:
        """Report the error to the other ranks; with one rank, delete the data folder."""
        try:
            if self._ranks.size == 1:
                if not self._is_committed():
                    self.store.remove(self._folder)
            else:
                report = self._report_name(self._ranks.rank)
                name = report if self._ranks.rank else f"{self._folder}/failed.json"
                self._write_json(name, {"error": f"{type(error).__name__}: {error}"})
        except Exception:
            return  # the first error is raised; the other ranks time out

    def _is_committed(self) -> bool:
        """Return whether the manifest names this save; an error may have occurred after it was replaced."""
        try:
            return self.id.encode() in self.store.read_whole(NAME, MAX_MANIFEST)
        except FileNotFoundError:
            return False

    def _write_json(self, name: str, data: dict[str, Any]) -> None:
        self.store.write(name, [json.dumps(data).encode()])


def _read_json(store: Store, name: str) -> Any:
    """Return the content of a JSON file that another rank of this save wrote; None if it does not exist."""
    try:
        return parse_json(store.read_whole(name, MAX_MANIFEST), CheckpointError)
    except FileNotFoundError:
        return None


TIMEOUT = 1800.0
LONGEST_SAVE = 24 * 3600.0


def save(
    model: nn.Module,
    path: str | PathLike[str] | Store,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    progress: dict[str, Any] | None = None,
    precision: str = "float32",
    deltas: bool = True,
    on_rows: Callable[[int], None] | None = None,
    timeout: float = TIMEOUT,
) -> Manifest:
    """Save a model: the rows of all its collections, its dense weights, and the given extras.

    Memory beyond the tables: three pieces of 32 MiB, and up to 64 MiB of rows that change in the meantime.

    Args:
        model: The model. With several ranks all of them call `save`; each writes its own rows. Sharded dense
            weights (DTensors) are gathered and written whole by rank 0.
        path: A directory, a URL such as "s3://bucket/prefix", or a store. An existing checkpoint is replaced
            when the new one is complete.
        optimizer: The optimizer of the dense weights; its state is saved too.
        progress: JSON data of the caller (step, data position, `rng_state()`); with several ranks, rank 0's.
        precision: The precision of the stored weights. "float16" and "bfloat16" lose digits.
        deltas: Whether tables track changes from now on, for `save_delta` to this path. False leaves an
            earlier chain as it is.
        on_rows: Called with the number of rows written so far.
        timeout: Seconds to wait for other ranks, or for a server to write further rows.

    Returns:
        The manifest of the checkpoint.

    Raises:
        InputError: An option has the wrong type or value or differs between ranks, or progress is not JSON
            data of at most 97 levels.
        UsageError: Another save of the model is in progress, or the placement of a sharded weight cannot be
            saved.
        CheckpointError: Another rank failed or did not finish in time. The previous checkpoint remains.
        OSError: The files cannot be written. The previous checkpoint remains.
    """
    options = SaveOptions(optimizer, progress, precision, on_rows, timeout, track=deltas, delta=False)
    return SaveJob(model, path, options).run()


def save_delta(
    model: nn.Module,
    path: str | PathLike[str] | Store,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    progress: dict[str, Any] | None = None,
    precision: str = "float32",
    on_rows: Callable[[int], None] | None = None,
    timeout: float = TIMEOUT,
) -> Manifest:
    """Add the rows changed and the ids removed since the last save or load to that checkpoint.

    Dense weights, and the optimizer's state if given, are saved completely.

    Args:
        model: The model.
        path: The directory, URL or store of the checkpoint.
        optimizer: The optimizer of the dense weights; its state is saved too.
        progress: JSON data of the caller, see `save`.
        precision: The precision of the stored weights, see `save`.
        on_rows: Called with the number of rows written so far.
        timeout: Seconds to wait for other ranks, or for a server to write further rows.

    Returns:
        The manifest of the checkpoint with the new delta.

    Raises:
        UsageError: The model was last saved to or loaded from another path.
        CheckpointError: The checkpoint was changed since then. See `save` for the other errors.
    """
    options = SaveOptions(optimizer, progress, precision, on_rows, timeout, track=True, delta=True)
    return SaveJob(model, path, options).run()


def async_save(
    model: nn.Module,
    path: str | PathLike[str] | Store,
    *,
    delta: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    progress: dict[str, Any] | None = None,
    precision: str = "float32",
    deltas: bool = True,
    on_rows: Callable[[int], None] | None = None,
    timeout: float = TIMEOUT,
    on_complete: Callable[[], object] | None = None,
) -> SaveHandle:
    """Save a model in another thread while training continues.

    The model is saved as it is at the time of the call. A model can have one save in progress at a time.

    Args:
        model: The model.
        path: A directory, a URL or a store.
        delta: Do what `save_delta` does instead of `save`.
        optimizer: The optimizer of the dense weights; its state is saved too.
        progress: JSON data of the caller, see `save`.
        precision: The precision of the stored weights, see `save`.
        deltas: Whether tables track changes from now on, see `save`.
        on_rows: Called with the number of rows written so far.
        timeout: Seconds to wait for other ranks, or for a server to write further rows.
        on_complete: Called when the checkpoint is complete. Like `on_rows`, it runs in the other thread.

    Returns:
        A handle to wait on, as soon as the state of the model is frozen.

    Raises:
        UsageError: Another save of the model is in progress.
    """
    began = clock.perf_counter()
    options = SaveOptions(
        optimizer,
        progress,
        precision,
        on_rows,
        timeout,
        track=delta is True or deltas,
        delta=delta,
        on_complete=on_complete,
    )
    return SaveHandle(SaveJob(model, path, options), clock.perf_counter() - began, on_complete)


class SaveHandle:
    """A save in progress, the result of `async_save`. It starts the thread that writes.

    Args:
        job: The save; its state is frozen.
        frozen: Seconds for which the call of `async_save` held up training.
        on_complete: Called in the other thread when the checkpoint is complete, or None.

    Attributes:
        id: The id of the save in the manifest.
    """

    def __init__(self, job: SaveJob, frozen: float, on_complete: Callable[[], object] | None) -> None:
        self.id = job.id
        self.frozen = frozen
        self._on_complete = on_complete
        self._job = job
        pool = ThreadPoolExecutor(1, "megalith save")
        self._manifest = pool.submit(self._run)
        pool.shutdown(wait=False)

    def _run(self) -> Manifest:
        manifest = self._job.run()
        if self._on_complete is not None:
            self._on_complete()
        return manifest

    @property
    def waited(self) -> float:
        """Seconds for which training waited because rows changed faster than they were written.

        Final when the save has ended.
        """
        return self._job.waited

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        return self._manifest.done()

    def wait(self, timeout: float | None = None) -> Manifest:
        """Wait for the end of the save.

        Args:
            timeout: Seconds to wait; None: a day. The save itself ends, with an error, when another rank or a
                server makes no progress for the `timeout` of `async_save`.

        Returns:
            The manifest of the complete checkpoint.

        Raises:
            TimeoutError: The save has not ended in time; it continues. The message names it.
            Exception: The error of the save, if it failed.
        """
        if timeout is not None and not checks.number(timeout, "wait: timeout") >= 0:
            raise InputError(f"wait: timeout must be a number of seconds of 0 or more, got {timeout}")
        seconds = LONGEST_SAVE if timeout is None else float(timeout)
        wait([self._manifest], seconds)
        if not self._manifest.done():
            raise TimeoutError(
                f"save {self.id} to {self._job.store.where} has not ended within {seconds:g} s; it continues"
            )
        return self._manifest.result(0)
