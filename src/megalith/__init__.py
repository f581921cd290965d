"""Megalith: recommender models whose embedding tables grow with the data."""

from megalith import checkpoint
from megalith.errors import MegalithError
from megalith.nn import (
    EmbeddingCollection,
    Feature,
    FirstN,
    Layout,
    Mean,
    Pipeline,
    Slice,
    Sqrtn,
    Sum,
)
from megalith.ops.ids import fid, hash_strings
from megalith.ragged import Ragged
from megalith.routing import Router
from megalith.shards import LocalShards, Lookup, Shards, SyncShards
from megalith.table import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    Constant,
    Initializer,
    Momentum,
    Normal,
    Ones,
    Optimizer,
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
    "EmbeddingCollection",
    "Feature",
    "FirstN",
    "Initializer",
    "Layout",
    "LocalShards",
    "Lookup",
    "Mean",
    "MegalithError",
    "Momentum",
    "Normal",
    "Ones",
    "Optimizer",
    "Piecewise",
    "Pipeline",
    "PolynomialDecay",
    "Ragged",
    "Router",
    "RowWiseAdagrad",
    "Segment",
    "Shards",
    "Slice",
    "Sqrtn",
    "Sum",
    "SyncShards",
    "Table",
    "TableConfig",
    "TruncatedNormal",
    "Uniform",
    "Warmup",
    "Zeros",
    "checkpoint",
    "fid",
    "hash_strings",
]
