"""Example models: small, complete, and used by the commands, examples and benchmarks.

Each consists of an EmbeddingCollection and a dense part: `model(features, dense=None, time=None)` returns
logits [B].
"""

from collections.abc import Callable
from typing import Any

from megalith.errors import UnknownNameError
from megalith.models.dcnv2 import DCNv2
from megalith.models.deepfm import DeepFM
from megalith.models.din import DIN
from megalith.models.dlrm import DLRM
from megalith.models.embedding_config import EmbeddingConfig, TableSettings
from megalith.models.model import Model, forward_batch

MODELS: dict[str, Callable[..., Model]] = {"deepfm": DeepFM, "dlrm": DLRM, "dcnv2": DCNv2, "din": DIN}
"""The models by their names on the command line."""

__all__ = [
    "DIN",
    "DLRM",
    "MODELS",
    "DCNv2",
    "DeepFM",
    "EmbeddingConfig",
    "Model",
    "TableSettings",
    "build_model",
    "forward_batch",
]


def build_model(name: str, embeddings: EmbeddingConfig, **options: Any) -> Model:
    """Return a new model.

    Args:
        name: One of MODELS.
        embeddings: The features and tables.
        options: The options of the class of the model.

    Returns:
        The model, with new weights.

    Raises:
        UnknownNameError: For an unknown name; it lists the known ones.
    """
    if not isinstance(name, str) or name not in MODELS:
        raise UnknownNameError(f"unknown model {name!r} (known: {', '.join(map(repr, MODELS))})")
    return MODELS[name](embeddings, **options)
