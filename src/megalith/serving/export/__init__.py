"""Exported models: `export_model` writes them, `Signature` describes them, `Servable` computes scores."""
