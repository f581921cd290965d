"""Exported models: written by `export`, described by a `Signature`, answered from by a `Servable`."""
