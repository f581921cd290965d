"""Parameter sync: a publisher pushes what training changes, a subscriber applies it to a served model."""
