"""Request checks: what a request passes to a servable, and what its program returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.errors import ExportError, InputError, UnknownNameError
from megalith.nn.feature_plan import FeaturePlan
from megalith.ops.checks import kind
from megalith.serving.export.output_specs import OUTPUT_DTYPES
from megalith.serving.export.signature import Signature


def check_plain(batch: Any, size: Any, row_bytes: int) -> None:
    """Check requests with one id for each feature and row."""
    if not isinstance(batch, list | tuple) or not all(isinstance(ids, bytes) for ids in batch):
        raise InputError(f"batch must be a list of bytes, got {kind(batch)}")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InputError(f"size must be a positive integer, got {kind(size)}")
    if sum(map(len, batch)) != row_bytes * size:
        raise InputError(f"batch must have {row_bytes} bytes of ids for each of {size} rows")


def check_features(plan: FeaturePlan, features: Any) -> None:
    """Check the names of the features of a request."""
    if not isinstance(features, Mapping):
        raise InputError(f"features must be a dict of columns by name, got {kind(features)}")
    missing = plan.features.keys() - features.keys()
    if missing:
        raise UnknownNameError(f"feature {min(missing)!r} is missing from the request")


def check_dense(signature: Signature, dense: Tensor | None, size: int) -> Tensor | None:
    """Check the dense values of a request."""
    width = signature.num_dense
    if width == 0:
        if dense is not None:
            raise InputError("this model takes no dense values")
        return None
    fits = isinstance(dense, Tensor) and tuple(dense.shape) == (size, width)
    if dense is None or not fits or not dense.is_floating_point() or not dense.is_cpu:
        got = f"{dense.dtype} {list(dense.shape)}" if isinstance(dense, Tensor) else kind(dense)
        raise InputError(f"{signature.dense_name} must be float32 {[size, width]}, got {got}")
    return dense.to(torch.float32)


def check_outputs(directory: Path, signature: Signature, outputs: Sequence[Any], size: int) -> None:
    """Check what the program of a version returns."""
    for spec, tensor in zip_longest(signature.outputs, outputs):
        if (
            spec is None
            or not isinstance(tensor, Tensor)
            or tensor.dtype != OUTPUT_DTYPES[spec.dtype]
            or tuple(tensor.shape) != (size, *spec.shape)
        ):
            raise ExportError(
                f"{directory}: the program does not return the outputs that the signature describes"
            )
