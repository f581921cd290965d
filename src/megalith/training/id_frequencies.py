"""IdFrequencies: how often the ids of each feature occur in the samples of a run.

The occurrences in the first `MAX_ROWS` rows of each batch are counted: at a batch size of 65,536, counting
all of them took longer than the step on a GPU. A feature keeps at most `MAX_IDS` distinct ids: above that,
only ids whose hash ends in `level` zero bits are counted, a sample of 1 in 2^level ids. Which ids are in the
sample depends on the id alone, so the occurrences of a sampled id are exact from the first batch on.

The counts belong to a checkpoint: they are saved with it in RUN/frequencies/step-N.safetensors and continue
when the run is resumed. RUN/frequencies.json is the summary that the report shows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.bits import mix64
from megalith.data import Batch
from megalith.errors import CheckpointError
from megalith.ops import dedup
from megalith.storage.local_files import write_atomically
from megalith.storage.tensor_files import decode, encode

FREQUENCIES = "frequencies"
MAX_IDS = 65_536
MAX_ROWS = 1024
_PENDING = 1 << 18
_SALT = 0x5851F42D4C957F2D  # mix64(0) is 0: without it, id 0 would always be in the sample


class IdFrequencies:
    def __init__(self) -> None:
        self.samples = 0
        self._counts: dict[str, _IdCounts] = {}

    def update(self, batch: Batch) -> None:
        rows = min(len(batch), MAX_ROWS)
        self.samples += rows
        for name, column in batch.features.items():
            end = rows if column.single else int(column.row_splits[rows])
            self._counts.setdefault(name, _IdCounts()).add(column.values[:end])

    def summary(self, samples: int) -> dict[str, Any]:
        """Return the content of frequencies.json."""
        features = {name: counts.histogram() for name, counts in self._counts.items()}
        return {"samples": self.samples, "samples_of_run": samples, "features": features}

    def write(self, path: Path, samples: int) -> None:
        path.write_text(json.dumps(self.summary(samples)))

    # ---- with a checkpoint

    def save(self, folder: Path, step: int) -> None:
        """Save the counts. They become the only ones with `keep_only`."""
        tensors = {"samples": torch.tensor(self.samples, device="cpu")}
        for name, counts in self._counts.items():
            counts.compact()
            tensors |= {f"ids/{name}": counts.ids, f"counts/{name}": counts.counts}
            tensors[f"level/{name}"] = torch.tensor([counts.level, counts.occurrences], device="cpu")
        write_atomically(_file(folder, step), encode(tensors))

    @classmethod
    def load(cls, folder: Path, step: int) -> IdFrequencies:
        """Return the counts of a checkpoint, or empty ones if it has none."""
        loaded, path = cls(), _file(folder, step)
        if not path.exists():
            return loaded
        data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        tensors = decode(data, str(path), CheckpointError)
        try:
            loaded.samples = int(tensors.pop("samples"))
            for name in [key.removeprefix("ids/") for key in tensors if key.startswith("ids/")]:
                level, occurrences = tensors[f"level/{name}"].tolist()
                loaded._counts[name] = _IdCounts(
                    tensors[f"ids/{name}"], tensors[f"counts/{name}"], level, occurrences
                )
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} does not hold the frequencies of ids: {error}; delete it"
            ) from None
        return loaded


def keep_only(folder: Path, step: int) -> None:
    """Delete the counts of other checkpoints than the newest."""
    for path in folder.glob("step-*.safetensors"):
        if path != _file(folder, step):
            path.unlink(missing_ok=True)


def _no_ids() -> Tensor:
    return torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(eq=False)
class _IdCounts:
    """The ids of one feature. `ids` and `counts` are int64 [n] and lack the ids that are pending."""

    ids: Tensor = field(default_factory=_no_ids)
    counts: Tensor = field(default_factory=_no_ids)
    level: int = 0
    occurrences: int = 0
    _pending: list[Tensor] = field(default_factory=list)
    _num_pending: int = 0

    def add(self, ids: Tensor) -> None:
        self.occurrences += ids.numel()
        self._pending.append(ids.clone())
        self._num_pending += ids.numel()
        if self._num_pending >= _PENDING:
            self.compact()

    def compact(self) -> None:
        if not self._pending:
            return
        new = torch.cat(self._pending)
        if self.level:
            new = new[_in_sample(new, self.level)]
        distinct = dedup(torch.cat([self.ids, new]))
        self._pending, self._num_pending = [], 0
        times = torch.bincount(distinct.inverse, minlength=distinct.ids.numel())
        times[: self.ids.numel()] += self.counts - 1  # the known ids are distinct and come first
        self.ids, self.counts = distinct.ids, times
        while self.ids.numel() > MAX_IDS:
            self.level += 1
            kept = _in_sample(self.ids, self.level)
            self.ids, self.counts = self.ids[kept], self.counts[kept]

    def histogram(self) -> dict[str, Any]:
        """The share of ids that are counted, all occurrences, and [occurrences, number of ids] pairs."""
        self.compact()
        times, ids = torch.unique(self.counts, return_counts=True)
        pairs = [list(pair) for pair in zip(times.tolist(), ids.tolist(), strict=True)]
        return {"share": 0.5**self.level, "occurrences": self.occurrences, "counts": pairs}


def _in_sample(ids: Tensor, level: int) -> Tensor:
    return (mix64(ids ^ _SALT) & ((1 << level) - 1)) == 0


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:012}.safetensors"
