"""Importers: tables out of what other systems saved. Each fills a collection and reports what it took."""

from megalith.checkpoint.importers.row_import import ImportReport
from megalith.checkpoint.importers.torch_state import import_torch

__all__ = ["ImportReport", "import_torch"]
