"""Sync counters: what a subscriber has done, for the metrics of a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SyncCounters:
    """Counts the actions of a subscriber."""

    messages: int = 0
    """Messages applied, including empty ones."""
    rows: int = 0
    removed: int = 0
    duplicates: int = 0
    """Messages acknowledged again without being applied."""
    refused: int = 0
    """Messages out of order or malformed."""
    begun: int = 0
    """How often a publisher began or started over."""
    reloads: int = 0
    replacements: int = 0
    dropped: int = 0
    """How often pushed rows were dropped because no message followed a new version."""
    sessions: int = 0
    """Sessions that were followed."""
    replaced_sessions: int = 0
    """Sessions that were followed when another one began."""
    old_sessions: int = 0
    """Messages refused because a newer session had begun."""
