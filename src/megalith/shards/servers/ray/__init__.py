"""What Ray is used for: starting, placing and connecting processes, and its metrics."""
