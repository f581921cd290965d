"""Malformed checkpoints, each with a word of the error it must cause.

A recipe takes a good checkpoint (a base and two deltas, dense weights, an optimizer) and spoils it. What it
changes in a file comes with the right length and checksum, unless these are what is wrong.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from megalith import checkpoint
from tests.checkpoint.support import Model, rewrite, train

Data = dict[str, Any]


class Spoiled:
    """A checkpoint to be damaged. m: the data of its manifest, written at the end unless it is None."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, content in good().items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        self.m: Data | None = json.loads(good()["manifest.json"])

    def finish(self) -> None:
        if self.m is not None:
            self.text(json.dumps(self.m))

    def text(self, text: str | bytes) -> None:
        """Replace the text of the manifest."""
        (self.root / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        self.m = None

    @property
    def top(self) -> Data:
        assert self.m is not None
        return self.m

    def delta(self, number: int) -> Data:
        found: Data = self.top["deltas"][number]
        return found

    def table(self, save: Data | None = None) -> Data:
        found: Data = (save or self.top)["collections"]["embeddings"]["tables"]["user"]
        return found

    @property
    def piece(self) -> Data:
        found: Data = self.table()["pieces"][0]
        return found

    @property
    def removed(self) -> Data:
        """The entry of the first delta's removed ids."""
        found: Data = self.table(self.delta(0))["removed"][0]
        return found

    @property
    def file(self) -> Data:
        found: Data = self.piece["file"]
        return found

    @property
    def path(self) -> Path:
        return self.root / self.file["path"]

    def replace(self, content: Callable[[], object] | bytes) -> None:
        """Replace the first file of rows by something else."""
        self.path.unlink()
        if isinstance(content, bytes):
            rewrite(self.root, self.file, content)
        else:
            content()

    def tensors(self, change: Callable[[dict[str, torch.Tensor]], object], entry: Data | None = None) -> None:
        """Change the tensors of a file of rows."""
        entry = entry or self.file
        found = load((self.root / entry["path"]).read_bytes())
        change(found)
        rewrite(self.root, entry, save(found))


@functools.cache
def good() -> dict[str, bytes]:
    """The files of a good checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = Model()
        train(model, 1)
        optimizer = new_optimizer(model)
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(model, root, optimizer=optimizer, progress={"at": 1})
        for seed in (3, 6):
            train(model, seed)
            checkpoint.save_delta(model, root, optimizer=optimizer)
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def new_optimizer(model: Model) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.dense.parameters(), 0.01)
    for parameter in model.dense.parameters():
        parameter.grad = torch.ones_like(parameter)
    return optimizer


def flip(s: Spoiled, at: int) -> None:
    data = bytearray(s.path.read_bytes())
    data[at] ^= 1
    s.path.write_bytes(data)


def same_names(s: Spoiled) -> None:
    """Table "user" of collection "embeddings", and table "embeddings.user" of the model itself."""
    for each in (s.top, *s.top["deltas"]):
        entry = {**copy.deepcopy(s.table(each)), "pieces": [], "removed": [], "live": 0}
        each["collections"][""] = {"global_step": 0, "tables": {"embeddings.user": entry}}


def no_manifest(s: Spoiled) -> None:
    s.m = None
    (s.root / "manifest.json").unlink()


def huge_manifest(s: Spoiled) -> None:
    s.m = None
    os.truncate(s.root / "manifest.json", 300 << 20)  # a hole: no such bytes are on the disk


Recipe = Callable[[Spoiled], object]


def top(**fields: Any) -> Recipe:
    return lambda s: s.top.update(fields)


def step(number: int) -> Recipe:
    return lambda s: s.top["collections"]["embeddings"].update(global_step=number)


def table(**fields: Any) -> Recipe:
    return lambda s: s.table().update(fields)


def routing(**fields: Any) -> Recipe:
    return lambda s: s.table()["routing"].update(fields)


def segments(**fields: Any) -> Recipe:
    """Change the first segment of a table in the base and in the deltas."""
    return lambda s: [s.table(each)["segments"][0].update(fields) for each in (s.top, *s.top["deltas"])]


def states(**fields: Any) -> Recipe:
    """Change the first state column of a table in the base and in the deltas."""
    return lambda s: [
        s.table(each)["segments"][0]["state"][0].update(fields) for each in (s.top, *s.top["deltas"])
    ]


def piece(**fields: Any) -> Recipe:
    return lambda s: s.piece.update(fields)


def file(**fields: Any) -> Recipe:
    return lambda s: s.file.update(fields)


def rows(change: Callable[[dict[str, torch.Tensor]], object]) -> Recipe:
    """Change the tensors of the first file of rows."""
    return lambda s: s.tensors(change)


def dense(change: Callable[[dict[str, torch.Tensor]], object]) -> Recipe:
    """Change the dense weights of the last delta."""
    return lambda s: s.tensors(change, s.delta(1)["dense"])


def last(**fields: Any) -> Recipe:
    """Change the last delta."""
    return lambda s: s.delta(1).update(fields)


MANIFESTS: dict[str, tuple[Recipe, str]] = {
    "no manifest": (no_manifest, "no complete checkpoint"),
    "empty": (lambda s: s.text(""), "is not valid JSON"),
    "cut off": (lambda s: s.text(json.dumps(s.top)[:-20]), "is not valid JSON"),
    "not UTF-8": (lambda s: s.text(b'{"format": "\xff"}'), "manifest.json cannot be read"),
    "UTF-16": (lambda s: s.text(json.dumps(s.top).encode("utf-16")), "manifest.json cannot be read"),
    "with a byte order mark": (lambda s: s.text("\ufeff" + json.dumps(s.top)), "is not valid JSON"),
    "NaN": (top(progress={"loss": float("nan")}), "NaN is not allowed"),
    "infinity": (top(progress={"loss": float("-inf")}), "-Infinity is not allowed"),
    "a key twice": (lambda s: s.text(json.dumps(s.top)[:-1] + ', "id": "x"}'), "key twice"),
    "nested too deep to read": (lambda s: s.text("[" * 100_000 + "]" * 100_000), "nested"),
    "nested deep": (top(progress={"x": json.loads("[" * 120 + "]" * 120)}), "nested"),
    "a number of 5000 digits": (lambda s: s.text('{"version": ' + "9" * 5000 + "}"), "is not valid JSON"),
    "300 MB": (huge_manifest, "manifest.json cannot be read: the file has more than"),
    "a list": (lambda s: s.text("[]"), "is not the manifest of a Megalith checkpoint"),
    "another format": (top(format="tfrecord"), "is not the manifest of a Megalith checkpoint"),
    "a later version": (top(version=2), "has version 2; this Megalith reads version 1"),
    "no version": (lambda s: s.top.pop("version"), "has version None"),
    "no id": (lambda s: s.top.pop("id"), "field id is missing"),
    "id as a number": (top(id=7), "field id must be a string"),
    "no collections": (lambda s: s.top.pop("collections"), "field collections is missing"),
    "collections as a list": (top(collections=[]), "field collections must be an object"),
    "progress as a list": (top(progress=[1]), "field progress must be an object"),
    "deltas as an object": (top(deltas={}), "field deltas must be a list"),
    "a delta that is a text": (top(deltas=["x"]), r"field deltas\[0\] must be an object"),
    "step below zero": (step(-1), "global_step must be from 0 to"),
    "step of 2^63": (step(2**63), "global_step must be from 0 to"),
    "a name of half a character": (
        lambda s: s.top["collections"].update({"\ud800": {"tables": 1}}),
        "collections has a name with an unpaired surrogate",
    ),
    "a table of half a character": (
        lambda s: s.top["collections"]["embeddings"]["tables"].update({"\udfff": s.table()}),
        "tables has a name with an unpaired surrogate",
    ),
    "state of half a character": (
        states(name="\ud800"),
        r"state\[0\].name must be a string without unpaired surrogates",
    ),
    "no segments": (table(segments=[]), "segments must not be empty"),
    "a segment that is a number": (table(segments=[3]), r"\[0\] must be an object"),
    "dim zero": (segments(dim=0), "dim must be from 1 to"),
    "dim of another model": (segments(dim=4), "dim 4, but the model's has dim 3"),
    "dim of 2^62": (segments(dim=2**62), f"dim {2**62}, but the model's"),
    "another optimizer": (
        lambda s: segments(optimizer={**s.table()["segments"][0]["optimizer"], "name": "adam"})(s),
        "trained with adam, but the model uses adagrad",
    ),
    "state of size zero": (states(size=0), r"state\[0\].size must be from 1 to"),
    "state of another name": (states(name="mean"), "other optimizer state"),
    "seed as a float": (table(seed=0.5), "seed must be an integer"),
    "seed below all": (table(seed=-(2**63) - 1), "seed must be from -9223372036854775808"),
    "two tables of one name": (same_names, "two tables have the same name"),
    "more rows than files hold": (table(live=10**9), "states 1000000000 ids for table"),
    "2^62 rows in a delta": (lambda s: s.table(s.delta(1)).update(live=2**62), "but its files hold"),
    "unknown routing": (routing(dist_type="sideways"), "not 'sideways'"),
    "no shards": (routing(num_shards=0), "num_shards must be from 1 to"),
    "2^40 shards": (routing(num_shards=2**40), "num_shards is not valid"),
    "continuous without blocks": (routing(dist_type="continuous", num_shards=3), "needs block_size"),
    "skip_first as a text": (routing(skip_first="no"), "must be true or"),
    "a shard too many": (
        lambda s: (routing(num_shards=2)(s), piece(shard=2)(s)),
        "must be of shards below 2",
    ),
    # Rows of both shards in a file of the second shard.
    "rows of other shards": (
        lambda s: (routing(num_shards=2)(s), piece(shard=1)(s)),
        "holds rows that do not belong to its shard, 1",
    ),
}

FILES: dict[str, tuple[Recipe, str]] = {
    "missing": (lambda s: s.path.unlink(), "cannot be read: No such file"),
    "cut off": (lambda s: s.path.write_bytes(s.path.read_bytes()[:-1]), "bytes, but its manifest states"),
    "grown": (lambda s: s.path.write_bytes(s.path.read_bytes() + b"x"), "bytes, but its manifest states"),
    "empty": (lambda s: s.path.write_bytes(b""), "has 0 bytes, but its manifest states"),
    "a bit of its header flipped": (lambda s: flip(s, 9), "is damaged"),
    "its last bit flipped": (lambda s: flip(s, -1), "is damaged"),
    "the bytes of another": (lambda s: s.path.write_bytes(bytes(len(s.path.read_bytes()))), "is damaged"),
    "another checksum": (file(checksum="crc32:00000000"), "not crc32:00000000"),
    "checksum of another kind": (file(checksum="md5:x"), "not md5:x"),
    "no checksum": (lambda s: s.file.pop("checksum"), "file.checksum is missing"),
    "bytes below zero": (file(bytes=-1), "file.bytes must be from 0 to"),
    "bytes of 2^62": (file(bytes=2**62), f"its manifest states {2**62}"),
    "bytes as a float": (file(bytes=100.0), "file.bytes must be an integer"),
    "bytes as true": (file(bytes=True), "file.bytes must be an integer"),
    "a way up": (file(path="../../etc/passwd"), "leads out"),
    "a way down and up": (file(path="data-x/../../etc/passwd"), "leads out"),
    "absolute": (file(path="/etc/passwd"), "leads out"),
    "backslashes": (file(path="..\\..\\etc\\passwd"), "leads out"),
    "a NUL": (file(path="data-x/a\0b"), "leads out"),
    "a line break": (file(path="data-x/a\nb"), "leads out"),
    "half a character": (file(path="data-x/\ud800"), "path must be a string without unpaired surrogates"),
    "no path": (file(path=""), "leads out"),
    "the directory itself": (file(path="."), "leads out"),
    "slashes in a row": (lambda s: s.file.update(path=s.file["path"].replace("/", "//")), "leads out"),
    "a path of 5000 letters": (file(path="x" * 5000), "path is longer than 4096 characters"),
    "a directory": (lambda s: s.replace(s.path.mkdir), "is not a regular file"),
    "a pipe": (lambda s: s.replace(lambda: os.mkfifo(s.path)), "is not a regular file"),
    "a link to nowhere": (lambda s: s.replace(lambda: s.path.symlink_to("nowhere")), "No such file"),
    "a link to itself": (lambda s: s.replace(lambda: s.path.symlink_to(s.path)), "symbolic links"),
    "a link to what never ends": (
        lambda s: (s.replace(lambda: s.path.symlink_to("/dev/zero")), file(bytes=0)(s)),
        "is not a regular file",
    ),
    "named twice": (lambda s: s.table()["pieces"].append(s.piece), "a file is named twice"),
    "no rows stated": (lambda s: s.piece.pop("rows"), "rows is missing"),
    "rows below zero": (piece(rows=-1), "rows must be from 0 to"),
    "a row too many": (lambda s: s.piece.update(rows=s.piece["rows"] + 1), "holds ids"),
    "2^62 rows": (piece(rows=2**62), "holds ids"),
    "no ids": (rows(lambda t: t.pop("ids")), "lacks ids"),
    "no state": (rows(lambda t: t.pop("state/0/sum")), "lacks state/0/sum"),
    "ids of another type": (rows(lambda t: t.update(ids=t["ids"].int())), "ids of dtype torch"),
    "rows of another type": (
        rows(lambda t: t.update(rows=t["rows"].double())),
        "rows of dtype torch.float64",
    ),
    "rows of another dim": (
        rows(lambda t: t.update(rows=t["rows"][:, :2].contiguous())),
        r"holds rows \[\d+, 2\]",
    ),
    "one row missing": (rows(lambda t: t.update(rows=t["rows"][1:].clone())), "holds rows"),
    "counts of another length": (
        rows(lambda t: t.update(count=torch.ones(1, dtype=torch.int64))),
        r"holds count \[1\]",
    ),
    "time below zero": (rows(lambda t: t["time"].fill_(-1)), "are not seconds"),
    "time beyond 2106": (rows(lambda t: t["time"].fill_(2**32)), "are not seconds"),
}

OTHER_SEGMENTS = "does not have the base's segments of table 'embeddings.user'"
CHAINS: dict[str, tuple[Recipe, str]] = {
    "a delta missing": (lambda s: s.top["deltas"].pop(0), "gap in the chain"),
    "deltas swapped": (lambda s: s.top["deltas"].reverse(), "gap in the chain"),
    "a delta twice": (lambda s: s.top["deltas"].append(s.delta(1)), "gap in the chain"),
    "of another base": (top(id="0123456789ab"), "gap in the chain"),
    "a circle": (
        lambda s: (s.delta(0).update(id=s.top["id"]), s.delta(1).update(previous=s.top["id"])),
        "two saves have the same id",
    ),
    "no word of what came before": (lambda s: s.delta(0).pop("previous"), r"deltas\[0\].previous is missing"),
    "a delta without a table": (
        lambda s: s.delta(0)["collections"]["embeddings"]["tables"].pop("user"),
        "does not have the tables of the base",
    ),
    "a delta with a table more": (
        lambda s: s.delta(0)["collections"]["embeddings"]["tables"].update(new=s.table()),
        "does not have the tables of the base|named twice",
    ),
    "a delta of another dim": (
        lambda s: s.table(s.delta(1))["segments"][0].update(dim=4),
        OTHER_SEGMENTS,
    ),
    "a delta of another optimizer": (
        lambda s: s.table(s.delta(1))["segments"][0]["state"][0].update(size=7),
        OTHER_SEGMENTS,
    ),
    "removed ids of another type": (
        lambda s: s.tensors(lambda t: t.update(ids=t["ids"].float()), s.removed["file"]),
        "does not hold",
    ),
    "fewer removed ids": (lambda s: s.removed.update(rows=99), "does not hold 99 ids"),
    "removed ids missing": (lambda s: (s.root / s.removed["file"]["path"]).unlink(), "cannot be read"),
    "a delta's rows cut off": (
        lambda s: os.truncate(s.root / s.table(s.delta(1))["pieces"][0]["file"]["path"], 40),
        "has 40 bytes",
    ),
}

DENSE: dict[str, tuple[Recipe, str]] = {
    "a weight of another shape": (
        dense(lambda t: t.update({"dense.bias": torch.ones(2)})),
        r"'dense.bias' was saved with shape \[2\], the model's is \[1\]",
    ),
    "a weight missing": (dense(lambda t: t.pop("dense.bias")), r"lacks \['dense.bias'\]"),
    "a weight too many": (dense(lambda t: t.update({"x": torch.ones(2)})), r"the model lacks \['x'\]"),
    "no dense weights": (last(dense=None), "lacks"),
    "no optimizer": (last(optimizer=None), "does not hold optimizer state; load without"),
    "no tensors of the optimizer": (last(optimizer_tensors=None), "is missing"),
    "optimizer state of two kinds": (
        lambda s: s.delta(1)["optimizer"].update(tuple=[]),
        "must have one field, not 2",
    ),
    "optimizer state of no kind": (last(optimizer={"pickle": "x"}), "not a known kind"),
    "optimizer state that is none": (last(optimizer={"float": "0x1p0"}), "does not match"),
    "a float that is none": (last(optimizer={"float": "nonsense"}), "is not a float"),
    "a float too large": (last(optimizer={"float": "0x1p99999"}), "is not a float"),
    "a key that is a list": (last(optimizer={"dict": [[[1], 2]]}), "cannot be a key"),
    "a pair of three": (last(optimizer={"dict": [[1, 2, 3]]}), "not a known kind"),
    "an optimizer of other weights": (
        last(optimizer={"dict": [["state", {"dict": []}], ["param_groups", []]]}),
        "does not match this optimizer",
    ),
}
