"""Clients of model servers: connections, predictions with failover, and rows for entries."""
