"""The readers of data files by the name that a config gives them.

A new reader is one new file and one line here. Readers are imported when they are used: most need pyarrow,
and the core does not import `megalith.compat`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from megalith.data.reader import Reader

FILE_READERS: Mapping[str, str] = {
    "parquet": "megalith.data.table_reader:ParquetReader",
    "csv": "megalith.data.csv:CsvReader",
    "ipc": "megalith.data.table_reader:TableReader",
    "criteo": "megalith.data.recipes:CriteoReader",
    "avazu": "megalith.data.recipes:AvazuReader",
    "taobao": "megalith.data.recipes:TaobaoReader",
    "kuairand": "megalith.data.recipes:KuaiRandReader",
    "monolith": "megalith.compat.monolith:MonolithReader",
}
"""Kind of data -> "module:class" of its reader."""


def reader_class(kind: str) -> type[Reader]:
    module, _, name = FILE_READERS[kind].partition(":")
    found: type[Reader] = getattr(import_module(module), name)
    return found
