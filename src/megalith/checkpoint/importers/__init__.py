"""Importers: fill the tables of a collection from files of other systems, and report what was imported."""

from megalith.checkpoint.importers.row_import import ImportReport
from megalith.checkpoint.importers.torch_state import import_torch

__all__ = ["ImportReport", "import_torch"]
