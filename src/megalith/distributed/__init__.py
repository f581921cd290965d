"""Ranks: launcher environment, process groups, exchange of bytes, agreement between ranks."""
