"""What runs in the process of a server: the tables, their workers, and the order of calls."""
