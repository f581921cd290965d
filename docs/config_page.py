"""The reference page of all options of a run, made from the config dataclasses.

`python -m docs.config_page` writes docs/reference/config.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from megalith.cli.config_options import field_docstrings
from megalith.cli.main import import_command
from megalith.cli.train import PANELS
from megalith.data import DenseColumn, FeatureColumn, Schema, SyntheticReader, load_movielens
from megalith.data.reader_registry import FILE_READERS, reader_class
from megalith.models import MODELS, TableSettings
from megalith.table.config import SERVING_PRECISIONS
from megalith.table.optimizers import OPTIMIZERS
from megalith.table.policies import ADMISSIONS, EVICTIONS
from megalith.training import DataConfig, ModelConfig, TrainConfig
from megalith.training.table_settings import INITIALIZERS

PAGE = Path(__file__).parent / "reference" / "config.md"

HEAD = """\
# All options of a run

This page is generated from the config dataclasses: `python -m docs.config_page` writes it. The
[guide](../guides/commands.md#megalith-train) explains how the options work together. A key of a section of
the TOML file is a field of the class of that section; a flag of `megalith train` overrides it. A key without
a flag is set in the file.
"""
READER = ("paths", "schema", "labelled", "binary_labels", "batch_size", "on_error", "self")
"""Arguments of readers that have their own keys."""


def text(value: Any) -> str:
    if value is None or value is MISSING:
        return "none" if value is None else "required"
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{shown}`" if shown not in ("", "{}", "[]", "()") else "empty"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def keys(config: type, names: Collection[str] | None = None) -> str:
    """The fields of a dataclass with flags, defaults and docstrings."""
    flags = {param.help: param for param in import_command("train").params}
    docs, rows = field_docstrings(config), []
    for field in fields(config):
        if not field.init or (names is not None and field.name not in names):
            continue
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        param = flags.get(docs[field.name])
        shown = "" if param is None else " ".join(f"`{x}`" for x in (*param.opts, *param.secondary_opts))
        rows.append([f"`{field.name}`", shown, text(default), docs[field.name]])
    return without_empty(("key", "flag", "default", "meaning"), rows)


def without_empty(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    used = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return table([head[i] for i in used], [[row[i] for i in used] for row in rows])


def arguments(kinds: Mapping[str, Callable[..., Any]], passed: Collection[str], heads: Sequence[str]) -> str:
    """Names of classes, and their arguments with defaults."""
    rows = []
    for name, kind in kinds.items():
        parts = [
            each.name if each.default is inspect.Parameter.empty else f"{each.name} = {each.default}"
            for each in inspect.signature(kind).parameters.values()
            if each.name not in passed and each.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        rows.append([f"`{name}`", ", ".join(f"`{part}`" for part in parts) or "none"])
    return table(heads, rows)


def page() -> str:
    readers: dict[str, Callable[..., Any]] = {"movielens": load_movielens, "synthetic": SyntheticReader}
    readers |= {kind: reader_class(kind) for kind in FILE_READERS}
    grouped = {name for names in PANELS.values() for name in names}
    first = [field.name for field in fields(TrainConfig) if field.name not in grouped]
    parts = [
        HEAD,
        "## [data]\n",
        keys(DataConfig),
        "## [data.schema]\n",
        "The columns of parquet and csv files. A column name stands for a column with default settings.\n",
        keys(Schema),
        'A feature, such as `tags = { column = "tags", separator = "|", max_length = 50 }`:\n',
        keys(FeatureColumn),
        'A dense column, such as `dense = [{ column = "price", normalise = "log1p" }]`:\n',
        keys(DenseColumn),
        "## [data.options]\n",
        "Further arguments of the reader of a kind of data:\n",
        arguments(readers, (*READER, "cache_dir"), ("kind", "options")),
        "## [model]\n",
        keys(ModelConfig),
        "## [model.options]\n",
        arguments(MODELS, ("embeddings", "num_dense"), ("model", "options")),
        "## [train]\n",
        keys(TrainConfig, first),
        *(
            f"### {title}\n\n{keys(TrainConfig, names)}"
            for title, names in PANELS.items()
            if any(field.name in names for field in fields(TrainConfig))
        ),
        "## [tables.NAME]\n",
        "The settings of one table. A key that is missing has the value of [train]. Optimizers,\n"
        'initializers, policies and serving precisions are text such as `"adam=0.01, adam.eps=1e-6"` (a\n'
        "number is the first argument) or sections such as `{ adam = { lr = 0.01, eps = 1e-6 } }`.\n",
        keys(TableSettings),
        "## Optimizers\n",
        arguments(OPTIMIZERS, (), ("optimizer", "arguments")),
        "## Initializers\n",
        arguments(INITIALIZERS, (), ("initializer", "arguments")),
        "## Admission and eviction\n",
        arguments({**ADMISSIONS, **EVICTIONS}, (), ("policy", "arguments")),
        "## Serving precisions\n",
        arguments(SERVING_PRECISIONS, (), ("precision", "arguments")),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
