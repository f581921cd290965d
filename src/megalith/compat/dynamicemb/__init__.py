"""DynamicEmb: import of its dumps (`import_dynamicemb`)."""

from megalith.compat.dynamicemb.dump_importer import import_dynamicemb

__all__ = ["import_dynamicemb"]
