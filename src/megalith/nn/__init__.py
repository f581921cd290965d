"""What a model is built of: features, combiners, layouts, the collection."""

from megalith.nn.collection import EmbeddingCollection
from megalith.nn.combiners import Combiner, FirstN, Mean, ReduceMean, ReduceSum, Sqrtn, Sum
from megalith.nn.features import Feature, Layout, Slice
from megalith.nn.micro_batches import MicroBatches
from megalith.nn.pipeline import Pipeline

__all__ = [
    "Combiner",
    "EmbeddingCollection",
    "Feature",
    "FirstN",
    "Layout",
    "Mean",
    "MicroBatches",
    "Pipeline",
    "ReduceMean",
    "ReduceSum",
    "Slice",
    "Sqrtn",
    "Sum",
]
