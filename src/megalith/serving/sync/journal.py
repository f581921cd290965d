"""The journal: which ids changed since which checkpoint, in one session of training.

Labels are ids of saves. The ids since a label are at least those that changed since that save was taken, so a
server whose rows are that save's needs no others. Bounded: the oldest labels are given up for room, and a
server that stands there has to be told everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from megalith.errors import InputError
from megalith.serving.sync.id_sets import IdSets

MAX_LABELS = 1000

Swollen: TypeAlias = tuple[IdSets, str, tuple[Tensor, ...]]


@dataclass
class _Chapter:
    """What changed after a label, up to the next."""

    label: str
    ids: IdSets = field(default_factory=lambda: IdSets(lazy=True))


class Journal:
    """Ids by label. max_ids: the most it holds. Not for several threads at once."""

    def __init__(self, max_ids: int = 20_000_000) -> None:
        if max_ids < 1:
            raise InputError(f"a journal holds at least one id, got max_ids={max_ids}")
        self._max_ids = max_ids
        self._chapters: list[_Chapter] = []

    def __len__(self) -> int:
        """Ids held, those of several labels several times."""
        return sum(len(chapter.ids) for chapter in self._chapters)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels there are, the oldest first."""
        return tuple(chapter.label for chapter in self._chapters)

    def label(self, name: str) -> None:
        """From here on ids count as changed after `name`; one that is there already moves here."""
        for number, chapter in enumerate(self._chapters):
            if chapter.label == name:
                # Its ids still count for older labels.
                del self._chapters[number]
                if number:
                    self._chapters[number - 1].ids.add(chapter.ids.tensors())
                break
        self._chapters.append(_Chapter(name))
        del self._chapters[:-MAX_LABELS]

    def add(self, ids: Mapping[str, Tensor]) -> None:
        """Adds changed ids by table, int64 [n], an id once; without a label there is nothing to add to."""
        if not self._chapters:
            return
        self._chapters[-1].ids.add(ids)
        if len(self) > self._max_ids:
            for chapter in self._chapters:
                chapter.ids.settle()
        while self._chapters and len(self) > self._max_ids:
            del self._chapters[0]

    @property
    def fullness(self) -> float:
        """Which part of its room is taken."""
        return len(self) / self._max_ids

    def swollen(self) -> list[Swollen]:
        """What it is time to put together: sets, a table of theirs, and its tensors.

        That takes long, so who has other things to do leaves it to another thread: dedup of the tensors needs
        no lock, `IdSets.replace` with the result does.
        """
        return [
            (chapter.ids, table, parts)
            for chapter in self._chapters
            for table, parts in chapter.ids.swollen().items()
        ]

    def since(self, label: str) -> dict[str, Tensor] | None:
        """The ids that changed after a label, by table; None if it is not there."""
        if label not in self.labels:
            return None
        found = IdSets()
        for chapter in self._chapters[self.labels.index(label) :]:
            found.add(chapter.ids.tensors())
        return found.tensors()

    def goes_on(self, earlier: str, later: str) -> bool:
        """Whether both are labels, and `later` is no older than `earlier`."""
        labels = self.labels
        return earlier in labels and later in labels and labels.index(earlier) <= labels.index(later)
