"""Importers: tables out of what other systems saved. Each fills a collection and reports what it took."""

from megalith.checkpoint.importers.dynamicemb import import_dynamicemb
from megalith.checkpoint.importers.monolith import import_monolith
from megalith.checkpoint.importers.rows import ImportReport
from megalith.checkpoint.importers.torch_state import import_torch

__all__ = ["ImportReport", "import_dynamicemb", "import_monolith", "import_torch"]
