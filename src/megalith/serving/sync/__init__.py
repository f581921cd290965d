"""Parameter sync: a publisher beside training pushes what changed, a subscriber beside serving applies it."""
