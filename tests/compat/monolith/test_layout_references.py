"""Random layouts: the native kernels are bit-identical to their references, for any number of threads."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.compat.monolith import FeatureConfig, FeatureConfigs, OutConfig, OutType, SliceConfig
from megalith.compat.monolith import fused_embedding_to_layout as to_layout
from megalith.compat.monolith import sharding_sparse_fids as shard
from megalith.compat.monolith.layout_ops import (
    _layout,
    _layout_grad,
    _layout_grad_reference,
    _layout_reference,
)
from tests.compat.monolith import test_layout_ops as layouts
from tests.compat.monolith.test_layout_ops import FIRSTN, MEAN, SUM, columns, encoding
from tests.ops.support import assert_same, assert_threads_do_not_show, randn


@st.composite
def any_configs(draw: st.DrawFn) -> FeatureConfigs:
    """A few features of any pooling and width, cut into layouts of every kind."""
    features: dict[str, FeatureConfig] = {}
    for number in range(draw(st.integers(1, 5))):
        pooling = draw(st.sampled_from([SUM, MEAN, FIRSTN]))
        dims = draw(st.lists(st.sampled_from([1, 2, 7, 8, 17]), min_size=1, max_size=3))
        length = 3 if pooling == FIRSTN else 0
        features[f"f{number}"] = FeatureConfig(draw(st.sampled_from("tu")), pooling, dims, length)
    out: dict[str, OutConfig] = {}
    for number in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(list(OutType)))
        wanted = draw(st.sampled_from([SUM, FIRSTN])) if kind != OutType.ADDN else SUM
        chosen = [n for n, f in features.items() if (f.pooling_type == FIRSTN) == (wanted == FIRSTN)]
        names = draw(st.lists(st.sampled_from(chosen), min_size=1, max_size=4)) if chosen else []
        width = min((features[n].dim for n in names), default=0)
        cuts = []
        for name in names:
            own = width if kind in (OutType.STACK, OutType.ADDN) else draw(st.integers(1, features[name].dim))
            start = draw(st.integers(0, features[name].dim - own))
            cuts.append(SliceConfig(name, start, start + own))
        if cuts:
            out[f"l{number}"] = OutConfig(tuple(cuts), kind)
    return FeatureConfigs(features, out)


@settings(max_examples=40)
@given(cfgs=any_configs(), data=st.data(), seed=st.integers(0, 2**16))
def test_layouts_are_their_references(cfgs: FeatureConfigs, data: st.DataObject, seed: int) -> None:
    batch, ps = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 3))
    ids = st.lists(st.integers(-2, 9), max_size=5)
    shared = [n for n in cfgs.feature_names if data.draw(st.booleans())]
    counts = {n: 1 if n in shared else batch for n in cfgs.feature_names}
    rows = {n: data.draw(st.lists(ids, min_size=k, max_size=k)) for n, k in counts.items()}
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    found = shard(columns(rows), ps, cfgs, data.draw(st.booleans()), shared=shared, batch_size=batch)
    sizes = found.emb_size.tolist()
    lists = [randn(seed + k, n, dtype=dtype) for k, n in enumerate(sizes)]
    offsets = (found.fid_offset, found.feature_offset, found.nfl_offset, batch, cfgs.encoded)

    outputs = _layout(lists, *offsets)

    assert_same(outputs, _layout_reference(lists, *offsets))
    grads = [randn(k, *o.shape, dtype=dtype) for k, o in enumerate(outputs)]
    if grads:
        assert_same(_layout_grad(grads, sizes, *offsets), _layout_grad_reference(grads, sizes, *offsets))


def test_threads_do_not_show(restore_threads: None) -> None:
    cfgs = layouts.random_configs(29, 10, 20)
    rows, shared = layouts.random_rows(cfgs, 700, seed=6)
    found = shard(columns(rows), 3, cfgs, shared=shared)
    assert found.fid_offset.numel() > 2 * 8192  # two shares of the gradient, several of the outputs
    lists = [randn(k, n).requires_grad_() for k, n in enumerate(found.emb_size.tolist())]

    def both() -> list[torch.Tensor]:
        outputs = to_layout(lists, *encoding(found), "example", cfgs, 3)
        grads = [randn(k, *o.shape) for k, o in enumerate(outputs)]
        return [*outputs, *torch.autograd.grad(outputs, lists, grads)]

    assert_threads_do_not_show(both)
