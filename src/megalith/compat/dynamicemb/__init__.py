"""DynamicEmb: its dumps, read (`import_dynamicemb`) and written (`export_dynamicemb`)."""

from megalith.compat.dynamicemb.dump_exporter import export_dynamicemb
from megalith.compat.dynamicemb.dump_importer import import_dynamicemb

__all__ = ["export_dynamicemb", "import_dynamicemb"]
