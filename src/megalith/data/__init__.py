"""Readers: training data from files and synthetic data, as batches of tensors.

Reading Parquet and CSV files requires pyarrow, the extra `data`.
"""

from megalith.data.batch import Batch, Position, Samples
from megalith.data.columns import batch_from
from megalith.data.csv import CsvReader
from megalith.data.equal_batches import EqualBatchLoader, pad_to_equal_batches
from megalith.data.movielens import DataUnavailableError, MovieLens, load_movielens, read_movielens
from megalith.data.reader import MemoryReader, Reader
from megalith.data.recipes import AvazuReader, CriteoReader, KuaiRandReader, TaobaoReader
from megalith.data.schema import DenseColumn, FeatureColumn, Schema
from megalith.data.synthetic import SyntheticBatch, SyntheticFeature, SyntheticReader
from megalith.data.table_reader import ParquetReader, TableReader
from megalith.errors import MissingDependencyError

__all__ = [
    "AvazuReader",
    "Batch",
    "CriteoReader",
    "CsvReader",
    "DataUnavailableError",
    "DenseColumn",
    "EqualBatchLoader",
    "FeatureColumn",
    "KuaiRandReader",
    "MemoryReader",
    "MissingDependencyError",
    "MovieLens",
    "ParquetReader",
    "Position",
    "Reader",
    "Samples",
    "Schema",
    "SyntheticBatch",
    "SyntheticFeature",
    "SyntheticReader",
    "TableReader",
    "TaobaoReader",
    "batch_from",
    "load_movielens",
    "pad_to_equal_batches",
    "read_movielens",
]
