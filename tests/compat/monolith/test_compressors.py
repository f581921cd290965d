"""Monolith's compressors as serving precisions: names, argument names and defaults are Monolith's."""

from __future__ import annotations

import pytest

from megalith import SGD, FixedPoint, OneBit, Segment
from megalith.compat.monolith import FixedR8Compressor, Fp16Compressor, Fp32Compressor, OneBitCompressor
from megalith.errors import InputError


def test_compressors_are_serving_precisions() -> None:
    given = [
        Fp32Compressor(),
        Fp16Compressor(),
        FixedR8Compressor(),
        FixedR8Compressor(fixed_range=2.0),
        OneBitCompressor(),
        OneBitCompressor(step_size=10, amplitude=1.0),
    ]

    servings = [Segment(4, optimizer=SGD(1.0), serving=each).serving for each in given]

    assert servings == [
        "float32",
        "float16",
        FixedPoint(1.0),
        FixedPoint(2.0),
        OneBit(0.05, init_scale=1.0, max_scale=10000.0, step_size=200),
        OneBit(1.0, step_size=10),
    ]
    with pytest.raises(InputError, match="range"):
        FixedR8Compressor(-1.0)
