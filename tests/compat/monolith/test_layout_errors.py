"""Wrong inputs of the layout ops: an InputError that names the argument, for any encoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import Ragged
from megalith.compat import monolith
from megalith.compat.monolith import FeatureConfig, FeatureConfigs, OutConfig, OutType, SliceConfig
from megalith.errors import InputError

pytestmark = pytest.mark.usefixtures("implementation")

FEATURES = {
    "a": FeatureConfig("one", monolith.PoolingType.SUM, (1, 2)),
    "b": FeatureConfig("two", monolith.PoolingType.FIRSTN, (2,), 2),
}
CUTS = {"x": (SliceConfig("a", 0, 3),), "y": (SliceConfig("b", 0, 2),)}
CFGS = FeatureConfigs(
    FEATURES, {"x": OutConfig(CUTS["x"]), "y": OutConfig(CUTS["y"], OutType.NONE, ((-1, 2, 2),))}
)
COLUMNS = {"a": Ragged.from_lists([[1, 2], [3]]), "b": Ragged.from_lists([[4], []])}
FOUND = monolith.sharding_sparse_fids(COLUMNS, 2, CFGS)
ROWS = [torch.ones(n) for n in FOUND.emb_size.tolist()]
GRADS = [torch.ones(2, 3), torch.ones(2, 2, 2)]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


ENCODING: dict[str, Any] = {
    **{name: getattr(FOUND, name) for name in ("fid_offset", "feature_offset", "nfl_offset")},
    **{"fid_list_row_split": None, "batch_size": 2, "variant_type": "example"},
    **{"feature_cfgs": CFGS, "ps_num": 2},
}


def layout(rows: Any = ROWS, grads: Any = GRADS, **changed: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Both ops on the good encoding with something changed."""
    given = ENCODING | changed
    gradient = monolith.fused_embedding_to_layout_grad
    return (
        monolith.fused_embedding_to_layout(rows, **given),
        gradient(embeddings_list=rows, layout_tensors_grad=grads, **given),
    )


def test_the_encoding_is_good_to_begin_with() -> None:
    (x, y), grads = layout()
    assert x.tolist() == [[2, 2, 2], [1, 1, 1]]
    assert y.tolist() == [[[1, 1], [0, 0]], [[0, 0], [0, 0]]]
    assert [g.tolist() for g in grads] == [[1] * 3, [1] * 6, [1] * 2, []]


def feature(name: str, **changed: Any) -> FeatureConfigs:
    return FeatureConfigs({**FEATURES, name: FeatureConfig(**changed)}, CFGS.out_configs)


WEIGHTED, ONE_ROW = Ragged(ints(1, 2), ints(0, 1, 2), torch.ones(2)), Ragged.from_lists([[1]])
SHARDING: dict[str, tuple[dict[str, Any], str]] = {
    "no features": ({"feature_cfgs": FeatureConfigs()}, "feature_cfgs has no features"),
    "no Ragged": ({"tensor": COLUMNS | {"a": ints(1)}}, r"tensor\['a'\] must be a Ragged"),
    "weights": ({"tensor": COLUMNS | {"a": WEIGHTED}}, r"tensor\['a'\] has weights"),
    "other rows": ({"tensor": COLUMNS | {"b": ONE_ROW}}, r"tensor\['b'\] must have 2 rows"),
    "other batch": ({"batch_size": 3}, r"tensor\['a'\] must have 3 rows"),
    "shared rows": ({"shared": ["b"]}, r"tensor\['b'\] must have 1 row because it is shared"),
    "all missing": ({"tensor": {}}, "batch_size is required"),
    "servers": ({"ps_num": -1}, "ps_num must be"),
    "batch size": ({"tensor": {}, "batch_size": -1}, "batch_size must be"),
    "unfit config": ({"feature_cfgs": feature("a", table="one", slice_dims=(1,))}, "layout 'x'"),
    "no table": ({"feature_cfgs": feature("a", slice_dims=(3,))}, "table is empty"),
}
FIDS, FEATURE, NFL = FOUND.fid_offset, "feature_offset must ascend", "nfl_offset gives feature number 0"
DECLARED = OutConfig((SliceConfig("a", 0, 1),), shape=((5, 1),))
LAYOUT: dict[str, tuple[dict[str, Any], str]] = {
    "list missing": ({"rows": ROWS[:3]}, "embeddings_list has 3 tensors"),
    "two types": ({"rows": [*ROWS[:3], ROWS[3].double()]}, r"embeddings_list\[3\] is torch.float64"),
    "short list": ({"rows": [ROWS[0][:2], *ROWS[1:]]}, r"fid_offset\[1\] is outside the embeddings"),
    "other servers": ({"ps_num": 1}, "expected 2: tables times servers"),
    "list 9": ({"fid_offset": FIDS | 9 << 32}, r"fid_offset\[0\] is outside"),
    "far element": ({"fid_offset": FIDS + 5}, r"fid_offset\[0\] is outside"),
    "negative": ({"fid_offset": -FIDS - 1}, r"fid_offset\[0\] is outside"),
    "short fid_offset": ({"fid_offset": FIDS[:3]}, f"{FEATURE} from 0 to 3"),
    "long fid_offset": ({"fid_offset": torch.cat([FIDS] * 2)}, FEATURE),
    "falling": ({"feature_offset": ints(0, 3, 2, 4, 4)}, FEATURE),
    "late": ({"feature_offset": ints(1, 2, 3, 4, 4)}, FEATURE),
    "short feature_offset": ({"feature_offset": ints(0, 2, 4)}, "nfl_offset must go from 0 to the 3"),
    "short nfl_offset": ({"nfl_offset": ints(0, 5)}, r"nfl_offset must have the shape \[3\]"),
    "uneven nfl_offset": ({"nfl_offset": ints(0, 1, 5)}, f"{NFL} 1 rows"),
    "wrongly shared": ({"nfl_offset": ints(2**31, 2, 5)}, f"{NFL} 2 rows"),
    "batch size": ({"batch_size": 3}, f"{NFL} 2 rows, expected 3"),
    "batch sizes": ({"batch_size": ints(2, 2)}, "batch_size must be"),
    "variant": ({"variant_type": "tfrecord"}, "variant_type must be one of"),
    "version": ({"version": 2}, "version must be 3, 4 or 5, got 2"),
    "configs": ({"feature_cfgs": CFGS.to_proto()}, "feature_cfgs must be FeatureConfigs"),
    "no features": ({"rows": [], "feature_cfgs": FeatureConfigs()}, "feature_cfgs has no features"),
    "declared batch": (
        {"feature_cfgs": FeatureConfigs(FEATURES, {"x": DECLARED})},
        r"batch_size is 2, but a layout declares the shape \[5, 1\]",
    ),
    "gradient missing": ({"grads": GRADS[:1]}, "layout_tensors_grad has 1 tensors, the layouts have 2"),
    "gradient shape": ({"grads": [GRADS[0][:1], GRADS[1]]}, r"tensors_grad\[0\] must have the shape"),
}


@pytest.mark.parametrize(("changed", "message"), SHARDING.values(), ids=SHARDING)
def test_sharding(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        monolith.sharding_sparse_fids(**{"tensor": COLUMNS, "ps_num": 2, "feature_cfgs": CFGS} | changed)


@pytest.mark.parametrize(("changed", "message"), LAYOUT.values(), ids=LAYOUT)
def test_layout(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        layout(**changed)
