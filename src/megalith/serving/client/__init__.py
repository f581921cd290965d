"""Clients of model servers: channels, predictions with a deadline, rows for entries, a server for tests."""
