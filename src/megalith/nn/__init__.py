"""The modules of a model: features, combiners, layouts, EmbeddingCollection, micro-batches, pipeline."""

from megalith.nn.collection import EmbeddingCollection
from megalith.nn.combiners import Combiner, FirstN, Mean, Sqrtn, Sum
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
    "Slice",
    "Sqrtn",
    "Sum",
]
