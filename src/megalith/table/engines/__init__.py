"""Engines: storage and kernels of one table. A new engine is one file and one registration line."""
