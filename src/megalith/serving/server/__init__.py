"""The model server: protocols, dispatch, batching, and the versions of exported models."""
