"""Parameter servers on Ray: `ServerShards`. Needs the extra `servers`; Ray is imported at first use."""
