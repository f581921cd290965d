"""Megalith: recommender models whose embedding tables grow with the data."""

from megalith.nn import (
    Combiner,
    EmbeddingCollection,
    Feature,
    FirstN,
    Layout,
    Mean,
    MicroBatches,
    ReduceMean,
    ReduceSum,
    Slice,
    Sqrtn,
    Sum,
)
from megalith.ops.ids import fid, hash_strings
from megalith.ops.pooling import Pooling
from megalith.ragged import Ragged
from megalith.routing import Router
from megalith.shards import LocalShards, SyncShards
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
    "Combiner",
    "Constant",
    "EmbeddingCollection",
    "Feature",
    "FirstN",
    "Layout",
    "LocalShards",
    "Mean",
    "MicroBatches",
    "Momentum",
    "Normal",
    "Ones",
    "Piecewise",
    "PolynomialDecay",
    "Pooling",
    "Ragged",
    "ReduceMean",
    "ReduceSum",
    "Router",
    "RowWiseAdagrad",
    "Segment",
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
    "fid",
    "hash_strings",
]
