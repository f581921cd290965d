"""TorchRec: its collections on Megalith's tables, its jagged tensors, and its state_dicts.

The page "Coming from TorchRec" lists TorchRec's names and where they are here. TorchRec need not be
installed; its own objects are accepted.
"""

from megalith.compat.torchrec.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)
from megalith.compat.torchrec.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from megalith.compat.torchrec.state_dicts import export_torchrec, import_torchrec

__all__ = [
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "PoolingType",
    "export_torchrec",
    "import_torchrec",
]
