"""Repository: a directory of exported models that is polled for new versions.

The directories of versions have numbers as names. They are in the given directory or one or two levels below:
DIR/{version}, DIR/{part}/{version}, DIR/{model}/{version}, DIR/{model}/{part}/{version}. The name of a model
comes from its signature, not from its path.

A new version is opened and warmed up while the old one still answers, first in a child process (canary.py),
and then replaces it; the old one is closed when its last request ends. If a version cannot be opened, the
error is reported and the old version continues to answer. A version whose files change after it was loaded is
reported.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from megalith.errors import InputError
from megalith.serving.client.row_fetcher import RowFetcher
from megalith.serving.export.canary import run_canary
from megalith.serving.export.servable import Servable
from megalith.serving.export.signature import ENTRY
from megalith.serving.server.request_errors import Code, RequestError
from megalith.serving.server.served_model import ServedModel, Version, names_of
from megalith.serving.server.server_config import ServerConfig
from megalith.serving.server.server_metrics import Metrics
from megalith.serving.server.versions import DEPTH, read_labels, version_roots, versions_of
from megalith.serving.sync.subscriber import Subscriber
from megalith.serving.wire_names import ModelState

logger = logging.getLogger(__name__)

OpenVersion = Callable[[Path], tuple[Servable, RowFetcher | None]]
MakeSubscriber = Callable[[Servable], Subscriber]
MAX_FILES = 10_000
"""Maximum number of files of a version that are compared to detect a change."""
KEPT_VERSIONS, KEPT_VERSIONS_OF_PARTS = 1, 2
"""Default number of versions served; a ps part also serves the previous one, which an entry may need."""
CLOSE_SECONDS = 5.0
"""Seconds in which the computation of versions must end when the server stops, however long requests took."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 10.0, 600.0
"""Seconds until a version that failed to open is tried again; doubled after each try, up to the maximum."""

Files = tuple[tuple[str, int, int], ...]
"""Path, size and modification time of each file."""


@dataclass
class _FailedVersion:
    """A version that failed to open: its files at that time, and when to retry if they are the same."""

    files: Files
    wait: float
    retry_at: float


class Repository:
    """The models of a directory. Thread-safe."""

    def __init__(
        self,
        directory: Path,
        open_version: OpenVersion,
        metrics: Metrics,
        config: ServerConfig,
        *,
        make_subscriber: MakeSubscriber | None = None,
        on_refresh: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = directory
        self._open_version = open_version
        self._make_subscriber = make_subscriber
        self._metrics = metrics
        self._config = config
        self._on_refresh = on_refresh
        self._roots: dict[Path, ServedModel] = {}
        self._failed: dict[Path, _FailedVersion] = {}
        self._loaded: dict[Path, Files] = {}
        """The files of each served version when it was loaded, or when a change was reported."""
        self._label_errors: dict[Path, str] = {}
        """What is wrong with the labels of a model, once it is logged."""
        self._names: dict[str, ServedModel] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="megalith-repository", daemon=True)
        self._refreshing = threading.Lock()

    @property
    def models(self) -> list[ServedModel]:
        """Every model found, including unavailable ones, sorted by name."""
        return sorted(self._roots.copy().values(), key=lambda model: model.name)

    def start(self) -> None:
        """Open the models and start polling. Raise InputError if no model can be served."""
        self.refresh()
        if not any(model.available for model in self.models):
            errors = [
                f"{model.name} version {number}: {status.error}"
                for model in self.models
                for number, status in model.statuses.items()
                if status.error
            ]
            self.stop(0.0)
            raise InputError(
                f"{self.directory} holds no exported model that can be served"
                + (f": {'; '.join(errors)}" if errors else "")
                + "; give a directory that `megalith export` wrote, or a directory of such directories"
            )
        self._thread.start()

    def stop(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout)  # it may be opening a large version, which is then not served
            if self._thread.is_alive():
                logger.error("the check of %s for versions has not ended after %g s", self.directory, timeout)
        retired = [model.remove(number) for model in self.models for number in model.versions]
        end = max(end, time.monotonic() + CLOSE_SECONDS)
        for version in retired:
            version.join(max(0.0, end - time.monotonic()))
        for model in self.models:
            if model.subscriber is not None:
                model.subscriber.close()

    def find(self, name: str) -> ServedModel:
        found = self._names.get(name) or self._names.get(f"{name}:{ENTRY}")
        if found is None:  # a model that was never opened has the name of its directory
            found = next((model for model in self.models if model.name == name), None)
        if found is None:
            known = ", ".join(model.name for model in self.models[:20])
            raise RequestError(
                Code.NOT_FOUND, f"model {name[:100]!r} is unknown; known models: {known or 'none'}"
            )
        return found

    def refresh(self) -> None:
        """Check the directory once, and load and retire versions."""
        with self._refreshing:
            for root in version_roots(self.directory, DEPTH):
                self._refresh_root(root)
            for known in (self._failed, self._loaded):  # of versions that were deleted
                for directory in [each for each in known if not each.exists()]:
                    del known[directory]
            self._on_refresh()

    def _watch(self) -> None:
        while not self._stopping.wait(self._config.poll_seconds):
            try:
                self.refresh()
            except Exception:
                logger.exception("cannot check %s for new versions", self.directory)

    def _refresh_root(self, root: Path) -> None:
        model = self._roots.get(root)
        if model is None:
            model = self._roots[root] = ServedModel(_fallback_name(root, self.directory), str(root))
        self._read_labels(model, root)
        wanted: list[int] = []
        newest = 0
        for number in sorted(versions_of(root), reverse=True):
            if self._stopping.is_set():
                break
            if newest == self._num_kept(model) and number not in model.labels.values():
                continue
            if number in model.versions:
                self._report_change(model, root / str(number), number)
                wanted.append(number)
            elif self._load(model, root, number):
                wanted.append(number)
            else:
                continue
            newest = min(newest + 1, self._num_kept(model))
        if not wanted:
            return
        # After a rollback, pushes must not go to the version that is retired.
        self._follow(model, model.versions[wanted[0]].servable)
        if model.subscriber is not None:
            model.subscriber.set_older([model.versions[number].servable for number in wanted[1:]])
        for number in model.versions:
            if number not in wanted:
                model.remove(number)  # does not wait: its last request closes it

    def _read_labels(self, model: ServedModel, root: Path) -> None:
        """Read the labels of a model; labels that cannot be read change nothing."""
        try:
            model.labels = read_labels(root)
            self._label_errors.pop(root, None)
        except InputError as error:
            if self._label_errors.get(root) != str(error):
                self._label_errors[root] = str(error)
                logger.error("%s keeps its labels: %s", model.name, error)

    def _num_kept(self, model: ServedModel) -> int:
        if self._config.keep_versions is not None:
            return self._config.keep_versions
        newest = model.newest
        return KEPT_VERSIONS if newest is None or newest.signature.shard is None else KEPT_VERSIONS_OF_PARTS

    def _load(self, model: ServedModel, root: Path, number: int) -> bool:
        """Open a version and make it available; return False if that fails."""
        directory = root / str(number)
        files, failed = _files(directory), self._failed.get(directory)
        if failed is not None and failed.files == files and time.monotonic() < failed.retry_at:
            return False
        newest = model.newest
        model.set_status(number, ModelState.LOADING)
        servable = fetcher = version = None
        try:
            if self._needs_trial:
                run_canary(directory, self._stopping, compiled=self._config.compiled)
            servable, fetcher = self._open_version(directory)
            self._check(model, servable, number, root)
            servable.warm_up()
            version = Version(
                servable,
                self._config,
                on_batch=lambda rows: self._metrics.batch(model.name, rows),
                fetcher=fetcher,
            )
            if self._stopping.is_set():
                version.retire()
                return False
            if newest is None or number > newest.number:
                self._follow(model, servable)
        except Exception as error:
            # Whatever the error is, the previous version continues to answer.
            text = str(error) or type(error).__name__
            logger.error("cannot serve %s version %d: %s", model.name, number, text)
            model.set_status(number, ModelState.END, text[:1000])
            self._record_failure(model, directory, files)
            if version is not None:
                version.retire()
                return False
            for opened in (servable, fetcher):
                if opened is not None:
                    opened.close()
            return False
        self._failed.pop(directory, None)
        self._loaded[directory] = files
        model.add(version)
        for alias in names_of(servable.signature):
            self._names.setdefault(alias, model)
        if self._config.freeze_gc:
            _freeze_garbage_collection()
        logger.info("serving %s version %d from %s", model.name, number, directory)
        return True

    @property
    def _needs_trial(self) -> bool:
        running = any(model.available for model in self.models)
        return self._config.trial == "always" or (self._config.trial == "running" and running)

    def _report_change(self, model: ServedModel, directory: Path, number: int) -> None:
        """Report a version that was replaced, or written to, under the same number."""
        files = _files(directory)
        if files in ((), self._loaded.get(directory)):  # or it is being deleted
            return
        self._loaded[directory] = files
        text = "its files have changed since it was loaded; export to a new version number instead"
        logger.error("%s version %d: %s", model.name, number, text)
        self._metrics.version_changed(model.name)
        model.set_status(number, ModelState.AVAILABLE, text)

    def _record_failure(self, model: ServedModel, directory: Path, files: Files) -> None:
        before = self._failed.get(directory)
        if before is None or before.files != files:
            self._metrics.load_failed(model.name)
            wait = RETRY_SECONDS
        else:
            wait = min(2 * before.wait, MAX_RETRY_SECONDS)
        self._failed[directory] = _FailedVersion(files, wait, time.monotonic() + wait)

    def _check(self, model: ServedModel, servable: Servable, number: int, root: Path) -> None:
        signature = servable.signature
        if signature.version != number:
            raise InputError(f"its signature has version {signature.version}; do not rename versions")
        owner = self._names.get(signature.name)
        if owner is not None and owner is not model:
            raise InputError(f"model {signature.name!r} is already served from {owner.root}")
        if not model.available:
            model.name = signature.name
        elif model.name != signature.name:
            raise InputError(f"it is model {signature.name!r}, but {root} holds versions of {model.name!r}")

    def _follow(self, model: ServedModel, servable: Servable) -> None:
        """Make a servable the target of the model's subscriber."""
        if self._make_subscriber is None:
            return
        if model.subscriber is None:
            model.subscriber = self._make_subscriber(servable)
        elif model.subscriber.servable is not servable:
            model.subscriber.move_to(servable)


def _freeze_garbage_collection() -> None:
    """Exclude all objects from garbage collection, after one that also frees versions that were closed."""
    # A program of torch.export has so many objects that a full collection takes more than 100 ms.
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _files(directory: Path) -> Files:
    """Return a description of a version's files that changes when any of them does."""
    found = []
    try:
        for path in islice(directory.rglob("*"), MAX_FILES):
            status = path.stat()
            found.append((str(path), status.st_size, status.st_mtime_ns))
    except OSError:
        pass  # it may have been deleted since
    return tuple(sorted(found))


def _fallback_name(root: Path, directory: Path) -> str:
    """Return the name of a model whose signature is not known yet."""
    parts = root.relative_to(directory).parts
    return ":".join(parts) or directory.name
