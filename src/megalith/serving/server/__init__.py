"""The model server: protocols in front, batching between, versions of exported models behind."""
