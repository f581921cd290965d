"""Pure functions on ids and rows."""

from megalith.ops.pooling import Bags, Part, Pooling, pool, unpool

__all__ = ["Bags", "Part", "Pooling", "pool", "unpool"]
