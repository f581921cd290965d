"""The repository: a directory of exported models, watched for new versions.

A directory of versions has names that are whole numbers. It may be the directory given, or lie one or two
folders below it: DIR/{version}, DIR/{part}/{version}, DIR/{model}/{version}, DIR/{model}/{part}/{version}.
What a model is called stands in its signature, not in its path.

A version is opened and warmed up beside the old one, then takes its place; the old one ends when its last
request has. A version that cannot be opened is reported, and the old one goes on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from megalith.errors import InputError
from megalith.serving.client.row_fetcher import RowFetcher
from megalith.serving.export.servable import Servable
from megalith.serving.export.signature import ENTRY
from megalith.serving.model_state import ModelState
from megalith.serving.server.batching import Batching
from megalith.serving.server.request_errors import Code, RequestError
from megalith.serving.server.served_model import ServedModel, Version, names_of
from megalith.serving.server.server_metrics import Metrics
from megalith.serving.sync.subscriber import Subscriber

log = logging.getLogger("megalith.serving")

Opens = Callable[[Path], tuple[Servable, RowFetcher | None]]
Follows = Callable[[Servable], Subscriber]
MAX_FOLDERS = 1000
"""Folders looked into at each level, lest a wrong directory be searched for ever."""
MAX_FILES = 10_000
"""Files of a version that tell whether it has changed."""
DEPTH = 2
KEPT, KEPT_OF_PARTS = 1, 2
"""Versions that answer, unless told. Of a ps part also the one before, which an entry may still ask for."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 10.0, 600.0
"""When a version that could not be opened is tried again: soon, then ever later."""

Files = tuple[tuple[str, int, int], ...]
"""Path, size and time of change of each."""


@dataclass
class _Broken:
    """A version that could not be opened: as it was then, and when to try it again though it is the same."""

    files: Files
    wait: float
    again: float


class Repository:
    """The models of a directory. Threads may share it.

    opens: a version's directory -> what serves it, and where an entry's rows come from. follows: what serves
    a model first -> its subscriber; None for models that nobody writes to. on_look: called after each look
    at the directory.
    """

    def __init__(
        self,
        directory: Path,
        opens: Opens,
        metrics: Metrics,
        *,
        batching: Batching,
        max_bytes: int,
        follows: Follows | None = None,
        keep_versions: int | None = None,
        poll_seconds: float = 1.0,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = directory
        self._opens = opens
        self._follows = follows
        self._metrics = metrics
        self._batching = batching
        self._max_bytes = max_bytes
        self._keep = keep_versions
        self._poll_seconds = poll_seconds
        self._on_look = on_look
        self._roots: dict[Path, ServedModel] = {}
        self._broken: dict[Path, _Broken] = {}
        self._names: dict[str, ServedModel] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="megalith-repository", daemon=True)
        self._refreshing = threading.Lock()

    @property
    def models(self) -> list[ServedModel]:
        """Every model found, those that do not answer included, by name."""
        return sorted(self._roots.copy().values(), key=lambda model: model.name)

    def start(self) -> None:
        """Opens what is there and begins to watch. Raises InputError if nothing can be served."""
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
                + "; give a directory that `megalith export` wrote, or one of several"
            )
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Ends the watch, and closes every version that has no requests any more within `timeout` seconds."""
        end = time.monotonic() + timeout
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout)  # it may be opening a large version, which then is not served
        for model in self.models:
            for number in model.versions:
                model.remove(number, max(0.0, end - time.monotonic()))
            if model.subscriber is not None:
                model.subscriber.close()

    def find(self, name: str) -> ServedModel:
        """The model a request names. Raises RequestError."""
        found = self._names.get(name) or self._names.get(f"{name}:{ENTRY}")
        if found is None:  # it may be one that has never been opened, and is called by its directory
            found = next((model for model in self.models if model.name == name), None)
        if found is None:
            known = ", ".join(model.name for model in self.models[:20])
            raise RequestError(Code.NOT_FOUND, f"model {name[:100]!r} is unknown; there is {known or 'none'}")
        return found

    def refresh(self) -> None:
        """Looks at the directory once, and follows what has changed."""
        with self._refreshing:
            for root in version_roots(self.directory, DEPTH):
                self._refresh_root(root)
            self._on_look()

    def _watch(self) -> None:
        while not self._stopping.wait(self._poll_seconds):
            try:
                self.refresh()
            except Exception:
                log.exception("%s could not be looked at", self.directory)

    def _refresh_root(self, root: Path) -> None:
        model = self._roots.get(root)
        if model is None:
            model = self._roots[root] = ServedModel(_fallback_name(root, self.directory), str(root))
        wanted: list[int] = []
        for number in sorted(versions_of(root), reverse=True):
            if len(wanted) == self._kept(model) or self._stopping.is_set():
                break
            if number in model.versions or self._load(model, root, number):
                wanted.append(number)
        if not wanted:
            return
        # Going back to an older version: what is pushed from now on must not go to the one that ends.
        self._follow(model, model.versions[wanted[0]].servable)
        for number in model.versions:
            if number not in wanted:
                model.remove(number)  # its last request closes it, and holds up no other model

    def _kept(self, model: ServedModel) -> int:
        if self._keep is not None:
            return self._keep
        newest = model.newest
        return KEPT if newest is None or newest.signature.shard is None else KEPT_OF_PARTS

    def _load(self, model: ServedModel, root: Path, number: int) -> bool:
        """Opens a version and lets it answer; False if it cannot be."""
        directory = root / str(number)
        files, broken = _files(directory), self._broken.get(directory)
        if broken is not None and broken.files == files and time.monotonic() < broken.again:
            return False
        newest = model.newest
        model.set_status(number, ModelState.LOADING)
        servable = fetcher = version = None
        try:
            servable, fetcher = self._opens(directory)
            self._check(model, servable, number, root)
            servable.warm_up()
            version = self._version(model.name, servable, fetcher)
            if self._stopping.is_set():
                version.retire()
                return False
            if newest is None or number > newest.number:
                self._follow(model, servable)
        except Exception as error:
            # Whatever is wrong with it, the version before goes on.
            text = str(error) or type(error).__name__
            log.error("%s version %d cannot be served: %s", model.name, number, text)
            model.set_status(number, ModelState.END, text[:1000])
            self._note_broken(model, directory, files)
            if version is not None:
                version.retire()
            else:
                _close(servable, fetcher)
            return False
        self._broken.pop(directory, None)
        model.add(version)
        for alias in names_of(servable.signature):
            self._names.setdefault(alias, model)
        log.info("%s version %d is served from %s", model.name, number, directory)
        return True

    def _version(self, name: str, servable: Servable, fetcher: RowFetcher | None) -> Version:
        return Version(
            servable,
            self._batching,
            max_bytes=self._max_bytes,
            on_batch=lambda rows: self._metrics.batch(name, rows),
            fetcher=fetcher,
        )

    def _note_broken(self, model: ServedModel, directory: Path, files: Files) -> None:
        before = self._broken.get(directory)
        if before is None or before.files != files:
            self._metrics.load_failed(model.name)
            wait = RETRY_SECONDS
        else:
            wait = min(2 * before.wait, MAX_RETRY_SECONDS)
        self._broken[directory] = _Broken(files, wait, time.monotonic() + wait)

    def _check(self, model: ServedModel, servable: Servable, number: int, root: Path) -> None:
        signature = servable.signature
        if signature.version != number:
            raise InputError(f"its signature says version {signature.version}; do not rename versions")
        owner = self._names.get(signature.name)
        if owner is not None and owner is not model:
            raise InputError(f"model {signature.name!r} is served from {owner.root} already")
        if not model.available:
            model.name = signature.name
        elif model.name != signature.name:
            raise InputError(f"it is a model {signature.name!r}, but {root} holds versions of {model.name!r}")

    def _follow(self, model: ServedModel, servable: Servable) -> None:
        """Tells the subscriber where to write from now on."""
        if self._follows is None:
            return
        if model.subscriber is None:
            model.subscriber = self._follows(servable)
        elif model.subscriber.servable is not servable:
            model.subscriber.move_to(servable)


def _close(servable: Servable | None, fetcher: RowFetcher | None) -> None:
    for each in (servable, fetcher):
        if each is not None:
            each.close()


def version_roots(directory: Path, depth: int) -> Iterator[Path]:
    """Directories that have versions, down to `depth` folders below; none below another."""
    if versions_of(directory):
        yield directory
    elif depth:
        for child in _folders(directory)[:MAX_FOLDERS]:
            yield from version_roots(directory / child, depth - 1)


def versions_of(directory: Path) -> list[int]:
    """The versions in a directory, in no order; what is no int64 is none."""
    names = [name for name in _folders(directory) if name.isascii() and name.isdecimal()]
    return [int(name) for name in names if str(int(name)) == name and int(name) < 2**63]


def _folders(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:
        return []  # it may vanish between two looks
    return sorted(names)


def _files(directory: Path) -> Files:
    """Changes when anything in a version does."""
    found = []
    try:
        for path in islice(directory.rglob("*"), MAX_FILES):
            status = path.stat()
            found.append((str(path), status.st_size, status.st_mtime_ns))
    except OSError:
        pass  # it may vanish between two looks
    return tuple(sorted(found))


def _fallback_name(root: Path, directory: Path) -> str:
    """What a model is called before its signature is known."""
    parts = root.relative_to(directory).parts
    return ":".join(parts) or directory.name
