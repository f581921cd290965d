"""Wrong inputs of the layout ops: an InputError that names the argument, for any encoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import Ragged
from megalith.compat import monolith
from megalith.compat.monolith import (
    FeatureConfig,
    FeatureConfigs,
    OutConfig,
    OutType,
    PoolingType,
    SliceConfig,
)
from megalith.errors import InputError

pytestmark = pytest.mark.usefixtures("implementation")

FEATURES = {
    "a": FeatureConfig("one", PoolingType.SUM, (1, 2)),
    "b": FeatureConfig("two", PoolingType.FIRSTN, (2,), 2),
}
CFGS = FeatureConfigs(
    FEATURES,
    {
        "x": OutConfig((SliceConfig("a", 0, 3),)),
        "y": OutConfig((SliceConfig("b", 0, 2),), OutType.NONE, ((-1, 2, 2),)),
    },
)
COLUMNS = {"a": Ragged.from_lists([[1, 2], [3]]), "b": Ragged.from_lists([[4], []])}
FOUND = monolith.sharding_sparse_fids(COLUMNS, 2, CFGS)
ROWS = [torch.ones(n) for n in FOUND.emb_size.tolist()]
GRADS = [torch.ones(2, 3), torch.ones(2, 2, 2)]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def shard(columns: Any = COLUMNS, ps_num: Any = 2, cfgs: Any = CFGS, **options: Any) -> Any:
    return monolith.sharding_sparse_fids(columns, ps_num, cfgs, **options)


def layout(rows: Any = ROWS, **changed: Any) -> list[Tensor]:
    """Both ops on the good encoding with something changed."""
    given = {
        "fid_list_row_split": None,
        "fid_offset": FOUND.fid_offset,
        "feature_offset": FOUND.feature_offset,
        "nfl_offset": FOUND.nfl_offset,
        "batch_size": 2,
        "variant_type": "example",
        "feature_cfgs": CFGS,
        "ps_num": 2,
        **changed,
    }
    outputs = monolith.fused_embedding_to_layout(rows, **given)
    monolith.fused_embedding_to_layout_grad(embeddings_list=rows, layout_tensors_grad=GRADS, **given)
    return outputs


def gradient(grads: Any) -> list[Tensor]:
    return monolith.fused_embedding_to_layout_grad(
        FOUND.nfl_offset, FOUND.feature_offset, FOUND.fid_offset, 2, ROWS, None, grads, "example", CFGS, 2
    )


def test_the_encoding_is_good_to_begin_with() -> None:
    x, y = layout()
    assert x.tolist() == [[2, 2, 2], [1, 1, 1]]
    assert y.tolist() == [[[1, 1], [0, 0]], [[0, 0], [0, 0]]]
    assert [g.tolist() for g in gradient(GRADS)] == [[1] * 3, [1] * 6, [1] * 2, []]


def feature(name: str, **changed: Any) -> FeatureConfigs:
    return FeatureConfigs({**FEATURES, name: FeatureConfig(**changed)}, CFGS.out_configs)


SHARDING: dict[str, tuple[Callable[[], Any], str]] = {
    "no columns": (lambda: shard(columns=[1]), "tensor must be a dict"),
    "no configs": (lambda: shard(cfgs=b""), "feature_cfgs"),
    "no features": (lambda: shard(cfgs=FeatureConfigs()), "feature_cfgs has no features"),
    "no Ragged": (lambda: shard({**COLUMNS, "a": ints(1)}), r"tensor\['a'\] must be a Ragged"),
    "floats": (
        lambda: shard({**COLUMNS, "a": Ragged(torch.ones(2), ints(0, 1, 2))}),
        r"tensor\['a'\].values",
    ),
    "other rows": (
        lambda: shard({**COLUMNS, "b": Ragged.from_lists([[1]])}),
        r"tensor\['b'\] must have 2 rows",
    ),
    "other batch": (lambda: shard(batch_size=3), r"tensor\['a'\] must have 3 rows"),
    "shared rows": (lambda: shard(shared=["b"]), r"tensor\['b'\] must have 1 row because it is shared"),
    "all missing": (lambda: shard({}), "batch_size is required"),
    "servers": (lambda: shard(ps_num=-1), "ps_num must be"),
    "half a server": (lambda: shard(ps_num=1.5), "ps_num must be"),
    "batch size": (lambda: shard({}, batch_size=-1), "batch_size must be"),
    "unfit config": (lambda: shard(cfgs=feature("a", table="one", slice_dims=(1,))), "layout 'x'"),
    "no table": (lambda: shard(cfgs=feature("a", slice_dims=(3,))), "table is empty"),
}
LAYOUT: dict[str, tuple[Callable[[], Any], str]] = {
    "list missing": (lambda: layout(ROWS[:3]), "embeddings_list has 3 tensors"),
    "no list": (lambda: layout(ROWS[0]), "embeddings_list must be a list"),
    "ints": (lambda: layout([r.long() for r in ROWS]), r"embeddings_list\[0\] must be a float"),
    "no tensors": (lambda: layout([1.0] * 4), r"embeddings_list\[0\] must be a float"),
    "two types": (lambda: layout([*ROWS[:3], ROWS[3].double()]), r"embeddings_list\[3\] is torch.float64"),
    "short list": (lambda: layout([ROWS[0][:2], *ROWS[1:]]), r"fid_offset\[1\] is outside the embeddings"),
    "other servers": (lambda: layout(ps_num=1), "expected 2: tables times servers"),
    "negative servers": (lambda: layout(ps_num=-1), "ps_num must be"),
    "list 9": (lambda: layout(fid_offset=FOUND.fid_offset | 9 << 32), r"fid_offset\[0\] is outside"),
    "far element": (lambda: layout(fid_offset=FOUND.fid_offset + 5), r"fid_offset\[0\] is outside"),
    "negative": (lambda: layout(fid_offset=-FOUND.fid_offset - 1), r"fid_offset\[0\] is outside"),
    "floats": (lambda: layout(fid_offset=torch.ones(4)), "fid_offset must be"),
    "short fid_offset": (
        lambda: layout(fid_offset=FOUND.fid_offset[:3]),
        "feature_offset must ascend from 0 to 3",
    ),
    "long fid_offset": (
        lambda: layout(fid_offset=torch.cat([FOUND.fid_offset] * 2)),
        "feature_offset must ascend",
    ),
    "falling": (lambda: layout(feature_offset=ints(0, 3, 2, 4, 4)), "feature_offset must ascend"),
    "late": (lambda: layout(feature_offset=ints(1, 2, 3, 4, 4)), "feature_offset must ascend"),
    "short feature_offset": (
        lambda: layout(feature_offset=ints(0, 2, 4)),
        "nfl_offset must go from 0 to the 3",
    ),
    "short nfl_offset": (lambda: layout(nfl_offset=ints(0, 5)), r"nfl_offset must have the shape \[3\]"),
    "uneven nfl_offset": (
        lambda: layout(nfl_offset=ints(0, 1, 5)),
        "nfl_offset gives feature number 0 1 rows",
    ),
    "wrongly shared": (
        lambda: layout(nfl_offset=ints(2**31, 2, 5)),
        "nfl_offset gives feature number 0 2 rows",
    ),
    "batch size": (lambda: layout(batch_size=3), "nfl_offset gives feature number 0 2 rows, expected 3"),
    "no batch size": (lambda: layout(batch_size=None), "batch_size must be"),
    "batch sizes": (lambda: layout(batch_size=ints(2, 2)), "batch_size must be"),
    "variant": (lambda: layout(variant_type="tfrecord"), "variant_type must be one of"),
    "version": (lambda: layout(version=2), "version must be 3, 4 or 5, got 2"),
    "configs": (lambda: layout(feature_cfgs=CFGS.to_proto()), "feature_cfgs must be FeatureConfigs"),
    "no features": (lambda: layout([], feature_cfgs=FeatureConfigs()), "feature_cfgs has no features"),
    "declared batch": (
        lambda: layout(
            feature_cfgs=FeatureConfigs(
                FEATURES, {"x": OutConfig((SliceConfig("a", 0, 1),), shape=((5, 1),))}
            )
        ),
        r"batch_size is 2, but a layout declares the shape \[5, 1\]",
    ),
    "gradient missing": (
        lambda: gradient(GRADS[:1]),
        "layout_tensors_grad has 1 tensors, the layouts have 2",
    ),
    "gradient shape": (
        lambda: gradient([GRADS[0][:1], GRADS[1]]),
        r"layout_tensors_grad\[0\] must have the shape",
    ),
    "gradient ints": (
        lambda: gradient([GRADS[0].long(), GRADS[1]]),
        r"layout_tensors_grad\[0\] must be a float",
    ),
    "gradient alone": (lambda: gradient(GRADS[0]), "layout_tensors_grad must be a list"),
}


@pytest.mark.parametrize("case", SHARDING.values(), ids=SHARDING.keys())
def test_sharding(case: tuple[Callable[[], Any], str]) -> None:
    with pytest.raises(InputError, match=case[1]):
        case[0]()


@pytest.mark.parametrize("case", LAYOUT.values(), ids=LAYOUT.keys())
def test_layout(case: tuple[Callable[[], Any], str]) -> None:
    with pytest.raises(InputError, match=case[1]):
        case[0]()
