"""Megalith: recommender models whose embedding tables grow with the data."""

from megalith.ops.pooling import Pooling
from megalith.ragged import Ragged
from megalith.routing import Router
from megalith.shards import LocalShards
from megalith.table import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    Constant,
    Momentum,
    Normal,
    Ones,
    Piecewise,
    PolynomialDecay,
    RowWiseAdagrad,
    Segment,
    Table,
    TableConfig,
    TruncatedNormal,
    Uniform,
    Warmup,
    Zeros,
)

__version__ = "0.1.0"

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "Constant",
    "LocalShards",
    "Momentum",
    "Normal",
    "Ones",
    "Piecewise",
    "PolynomialDecay",
    "Pooling",
    "Ragged",
    "Router",
    "RowWiseAdagrad",
    "Segment",
    "Table",
    "TableConfig",
    "TruncatedNormal",
    "Uniform",
    "Warmup",
    "Zeros",
]
