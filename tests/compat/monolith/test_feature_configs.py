"""FeatureConfigs: Monolith's bytes, the shapes layouts have, and configs that do not fit."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.compat import monolith
from megalith.compat.monolith import FeatureConfig, FeatureConfigs, OutConfig, OutType, SliceConfig
from megalith.compat.monolith.feature_configs import parse_message
from megalith.errors import InputError, UnknownNameError

SUM, MEAN, FIRSTN = monolith.PoolingType
CONCAT, STACK, ADDN, NONE = OutType

FEATURES = {
    "uid": FeatureConfig(table="users", slice_dims=(1, 8)),
    "gid": FeatureConfig(table="items", pooling_type=MEAN, slice_dims=(1, 4, 300)),
    "hist": FeatureConfig(table="items", pooling_type=FIRSTN, slice_dims=(16,), max_sequence_length=20),
    "clicks": FeatureConfig("items", FIRSTN, (16,), 20),
    "short": FeatureConfig("items", FIRSTN, (16,), 5),
}


def layout(kind: OutType, *slices: tuple[str, int, int], shape: Any = ()) -> FeatureConfigs:
    """The features above, and one layout named "out"."""
    out = OutConfig(tuple(SliceConfig(*each) for each in slices), kind, shape)
    return FeatureConfigs(FEATURES, {"out": out})


# ---- bytes


def test_the_parts_by_hand() -> None:
    assert SliceConfig("uid", 1, 9).to_proto().hex(" ") == "0a 03 75 69 64 10 01 18 09"
    filled = SliceConfig("g", feature_idx=1, slice_idx=2, pooling_type=FIRSTN, max_sequence_length=7)
    assert filled.to_proto().hex(" ") == "0a 01 67 20 01 28 02 50 03 58 07"
    feature = FeatureConfig(table="t", pooling_type=MEAN, slice_dims=(1, 300), max_sequence_length=4)
    assert feature.to_proto().hex(" ") == "0a 01 74 10 01 1a 03 01 ac 02 20 04"
    out = OutConfig(slice_configs=(SliceConfig("g", 0, 1),), out_type=ADDN, shape=((4, 1), ()))
    assert out.to_proto().hex(" ") == "0a 05 0a 01 67 18 01 10 02 1a 04 0a 02 04 01 1a 00"
    for part in (filled, feature, out):
        assert type(part).from_proto(part.to_proto()) == part


# Made by protobuf 7.36.2 with deterministic=True, from the config below.
MODEL = bytes.fromhex(
    "0a160a03676964120f0a056974656d7310011a040104ac020a160a0468697374120e0a056974656d7310031a011020140a120a03"
    "756964120b0a0575736572731a02010812330a0462696173122b0a070a0375696418010a0f0a036769641801200128025001"
    "580710021a0d0a0bffffffffffffffffff0101122f0a046465657012270a090a03756964100118090a0a0a03676964100518b1"
    "021a0e0a0cffffffffffffffffff01b402121a0a0373657112130a080a0468697374181010031a050a03401410"
)


def test_protobufs_own_bytes() -> None:
    gid = SliceConfig("gid", 0, 1, feature_idx=1, slice_idx=2, pooling_type=MEAN, max_sequence_length=7)
    deep = OutConfig((SliceConfig("uid", 1, 9), SliceConfig("gid", 5, 305)), shape=((-1, 308),))
    configs = FeatureConfigs(
        feature_configs={name: FEATURES[name] for name in ("uid", "gid", "hist")},
        out_configs={
            "deep": deep,
            "bias": OutConfig((SliceConfig("uid", 0, 1), gid), ADDN, ((-1, 1),)),
            "seq": OutConfig((SliceConfig("hist", 0, 16),), NONE, ((64, 20, 16),)),
        },
    )
    assert configs.to_proto() == MODEL
    assert FeatureConfigs.from_proto(MODEL) == configs
    assert FeatureConfigs.from_proto(memoryview(MODEL)) == configs
    configs.validate()


def test_empty_names_and_messages_are_written_as_protobuf_does() -> None:
    configs = FeatureConfigs({"": FeatureConfig()}, {"é": OutConfig(shape=((),))})
    assert configs.to_proto().hex() == "0a040a00120012080a02c3a912021a00"
    assert FeatureConfigs().to_proto() == b""


def test_the_order_of_entries_does_not_matter() -> None:
    there, back = dict(FEATURES), dict(reversed(FEATURES.items()))
    assert FeatureConfigs(there).to_proto() == FeatureConfigs(back).to_proto()


INT32 = st.integers(-(2**31), 2**31 - 1)
NAMES = st.text(max_size=5)
NUMBERS = dict.fromkeys(("start", "end", "feature_idx", "slice_idx", "max_sequence_length"), INT32)
SLICES = st.builds(SliceConfig, NAMES, pooling_type=st.sampled_from(monolith.PoolingType), **NUMBERS)
SHAPES = st.lists(st.lists(INT32, max_size=3).map(tuple), max_size=3)
OUTS = st.builds(OutConfig, st.lists(SLICES, max_size=3), st.sampled_from(OutType), SHAPES)
POOLINGS = st.sampled_from(monolith.PoolingType)
FEATURE = st.builds(FeatureConfig, NAMES, POOLINGS, st.lists(INT32, max_size=3), max_sequence_length=INT32)
DICTS = [st.dictionaries(NAMES, each, max_size=3) for each in (FEATURE, OUTS)]
CONFIGS = st.builds(FeatureConfigs, *DICTS)


@given(configs=CONFIGS)
def test_what_is_written_is_read(configs: FeatureConfigs) -> None:
    message = configs.to_proto()
    assert FeatureConfigs.from_proto(message) == configs
    assert FeatureConfigs.from_proto(message).to_proto() == message
    assert pickle.loads(pickle.dumps(configs)) == configs


# ---- bytes that are no configs


@pytest.mark.parametrize(
    ("kind", "message", "said"),
    [
        (SliceConfig, "50 02", r"SliceConfig: pooling_type must be one of SUM \(0\), MEAN.*, got 2"),
        (FeatureConfig, "10 04", r"FeatureConfig: pooling_type must be one of .* FIRSTN \(3\), got 4"),
        (OutConfig, "10 ff ff ff ff ff ff ff ff ff 01", "OutConfig: out_type must be one of .*, got -1"),
        (FeatureConfigs, "0a 02 0a 05", "FeatureConfigs: 4 bytes are not a valid protobuf message"),
        (FeatureConfigs, "0a 03 0a 01 ff", "not a valid protobuf message"),  # not UTF-8
    ],
)
def test_bytes_that_are_no_config(kind: Any, message: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        kind.from_proto(bytes.fromhex(message))


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ("12 00", SliceConfig()),  # an unknown field
        ("10 80 80 80 80 08", SliceConfig(start=-(2**31))),
        ("0a 01 61 18 01 0a 01 62 18 03", SliceConfig("b", end=3)),  # the last of two wins
        ("08 01", FeatureConfigs()),
        ("0a 00 12 00", FeatureConfigs({"": FeatureConfig()}, {"": OutConfig()})),
    ],
)
def test_what_protobuf_accepts_is_read_as_protobuf_reads_it(message: str, read: Any) -> None:
    assert type(read).from_proto(bytes.fromhex(message)) == read


@given(
    random=st.binary(max_size=60),
    changes=st.lists(st.tuples(st.integers(0, len(MODEL) - 1), st.integers(0, 255)), max_size=4),
    end=st.integers(0, len(MODEL)),
)
def test_any_bytes_are_configs_or_refused(random: bytes, changes: list[tuple[int, int]], end: int) -> None:
    changed = bytearray(MODEL)
    for place, byte in changes:
        changed[place] = byte
    kinds: tuple[Any, ...] = (SliceConfig, OutConfig, FeatureConfig, FeatureConfigs)
    for message, kind in product((random, bytes(changed), bytes(changed[:end])), kinds):
        with suppress(InputError):  # and nothing else
            read = kind.from_proto(message)
            assert kind.from_proto(read.to_proto()) == read
            if kind is FeatureConfigs:
                read.validate()


# ---- values that a message cannot have


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SliceConfig(3), "SliceConfig: feature_name must be a str, got 3"),
        (lambda: SliceConfig("a", 0.5), "SliceConfig: start must be a 32-bit int, got 0.5"),
        (lambda: SliceConfig("a", 0, 2**31), "SliceConfig: end must be a 32-bit int, got 2147483648"),
        (lambda: OutConfig([("a", 0, 1)]), r"OutConfig: slice_configs\[0\] must be a SliceConfig"),
        (lambda: OutConfig(shape=(-1, 3)), r"OutConfig: shape\[0\] must be a list of values, got int"),
        (lambda: OutConfig(shape=((-1, "3"),)), r"OutConfig: shape\[0\]\[1\] must be a 32-bit int"),
        (lambda: OutConfig(out_type="CONCAT"), "OutConfig: out_type must be one of .*, got 'CONCAT'"),
        (lambda: FeatureConfig("t", slice_dims="8"), "FeatureConfig: slice_dims must be a list of values"),
        (lambda: FeatureConfig("t", slice_dims=[1, None]), r"slice_dims\[1\] must be a 32-bit int"),
        (lambda: FeatureConfigs([]), r"feature_configs must be a dict such as {name: FeatureConfig}"),
        (lambda: FeatureConfigs({1: FeatureConfig()}), "feature_configs must be a dict such as"),
        (
            lambda: FeatureConfigs({"a": OutConfig()}),
            r"feature_configs\['a'\] must be a FeatureConfig, got OutConfig",
        ),
        (lambda: SliceConfig("\ud800").to_proto(), "cannot be encoded in UTF-8"),
    ],
)
def test_values_that_cannot_be(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()


def test_lists_and_plain_numbers_are_taken() -> None:
    config = FeatureConfig("t", 3, [1, 2], 4)  # type: ignore[arg-type]
    assert config.pooling_type is FIRSTN
    assert config.slice_dims == (1, 2)
    out = OutConfig([SliceConfig()], 1, [[-1, 2]])  # type: ignore[arg-type]
    assert out == OutConfig((SliceConfig(),), STACK, ((-1, 2),))
    assert hash(config) == hash(FeatureConfig("t", FIRSTN, (1, 2), 4))


def test_parts_may_be_protobuf_messages() -> None:
    """Monolith's code fills messages and passes them on."""
    message = parse_message("monolith.io.proto.FeatureConfigs", MODEL)
    whole = FeatureConfigs.from_proto(MODEL)
    assert FeatureConfigs(message.feature_configs, message.out_configs) == whole
    out: Any = message.out_configs["deep"]
    assert OutConfig(out.slice_configs, out.out_type, out.shape) == whole.out_configs["deep"]
    with pytest.raises(InputError, match=r"feature_configs\['a'\] must be a FeatureConfig"):
        FeatureConfigs({"a": out})


# ---- names


def test_names_are_in_order() -> None:
    configs = FeatureConfigs(FEATURES, {"z": OutConfig(), "a": OutConfig()})
    assert configs.feature_names == ("clicks", "gid", "hist", "short", "uid")
    assert configs.table_names == ("items", "users")
    assert configs.layout_names == ("a", "z")
    assert FEATURES["gid"].dim == 305
    with pytest.raises(UnknownNameError, match="no layout 'deep'; layouts: a, z"):
        configs.output_shapes("deep")


# ---- shapes


@pytest.mark.parametrize(
    ("configs", "shapes"),
    [
        (layout(CONCAT, ("uid", 0, 9), ("gid", 1, 5), ("uid", 0, 1)), ((-1, 14),)),
        (layout(CONCAT, ("hist", 0, 16), ("clicks", 4, 8)), ((-1, 20, 20),)),
        (layout(STACK, ("uid", 1, 5), ("gid", 1, 5), ("gid", 5, 9)), ((-1, 3, 4),)),
        (layout(STACK, ("hist", 0, 8), ("clicks", 8, 16)), ((-1, 2, 20, 8),)),
        (layout(ADDN, ("uid", 0, 1), ("gid", 0, 1)), ((-1, 1),)),
        (layout(NONE, ("uid", 0, 1), ("hist", 0, 9), ("short", 0, 2)), ((-1, 1), (-1, 20, 9), (-1, 5, 2))),
    ],
)
def test_shapes_are_what_slices_give(configs: FeatureConfigs, shapes: tuple[tuple[int, ...], ...]) -> None:
    assert configs.output_shapes("out") == shapes
    out = configs.out_configs["out"]
    for batch in (-1, 1, 64):
        declared = tuple((batch, *shape[1:]) for shape in shapes)
        same = FeatureConfigs(FEATURES, {"out": OutConfig(out.slice_configs, out.out_type, declared)})
        same.validate()
        assert same.output_shapes("out") == declared


A_SLICE, WITH = ("uid", 0, 9), "but its slices give"
MISFITS: list[tuple[FeatureConfigs, str]] = [
    (layout(CONCAT, A_SLICE, ("who", 0, 1)), r"'out', slice 1 \(feature 'who'\): feature_name is"),
    (layout(CONCAT, ("uid", 0, 10)), r"slice 0 \(feature 'uid'\): start 0 and end 10 must .* <= 9"),
    (layout(CONCAT, ("uid", -1, 1)), "start -1 and end 1"),
    (layout(CONCAT, ("uid", 3, 3)), "start 3 and end 3"),
    (layout(CONCAT), "layout 'out': slice_configs is empty"),
    (layout(CONCAT, A_SLICE, ("hist", 0, 1)), "its feature is FIRSTN of 20, but that of slice 0 is pooled"),
    (layout(CONCAT, ("hist", 0, 1), A_SLICE), "is pooled, but that of slice 0 is FIRSTN of"),
    (layout(STACK, ("hist", 0, 1), ("short", 0, 1)), "FIRSTN of 5, but that of slice 0 is FIRST"),
    (layout(STACK, ("uid", 0, 1), ("gid", 0, 2)), "its width is 2, but that of slice 0 is 1"),
    (layout(ADDN, ("hist", 0, 1)), "ADDN cannot add a FIRSTN feature"),
    (layout(CONCAT, A_SLICE, shape=[[-1, 8]]), rf"'out': shape\[0\] is \[-1, 8\], {WITH} \[batch, 9\]"),
    (layout(CONCAT, ("hist", 0, 9), shape=[[-1, 9]]), rf"{WITH} \[batch, 20, 9\]"),
    (layout(CONCAT, A_SLICE, shape=[[9]]), rf"{WITH} \[batch, 9\]"),
    (layout(CONCAT, A_SLICE, shape=[[0, 9]]), "its batch must be -1 or positive"),
    (layout(CONCAT, A_SLICE, shape=[[-2, 9]]), "its batch must be -1 or positive"),
    (layout(CONCAT, A_SLICE, shape=[[-1, 9], [-1, 9]]), "shape declares 2 tensors, .* 1"),
    (layout(NONE, A_SLICE, A_SLICE, shape=[[-1, 9]]), "declares 1 tensors, .* 2"),
    (layout(NONE, A_SLICE, A_SLICE, shape=[[-1, 9], [-1, 2]]), rf"\[1\] is \[-1, 2\], {WITH} \[batch, 9\]"),
]


@pytest.mark.parametrize(("configs", "said"), MISFITS)
def test_layouts_that_do_not_fit(configs: FeatureConfigs, said: str) -> None:
    with pytest.raises(InputError, match=said):
        configs.validate()
    with pytest.raises(InputError, match=said):
        configs.output_shapes("out")


@pytest.mark.parametrize(
    ("feature", "said"),
    [
        (FeatureConfig("", slice_dims=(1,)), "feature 'f': table is empty"),
        (FeatureConfig("t", slice_dims=(4, 0)), r"slice_dims must be positive sizes, got \[4, 0\]"),
        (FeatureConfig("t", FIRSTN, (4,)), "max_sequence_length must be at least 1 for FIRSTN, got 0"),
        (FeatureConfig("t", SUM, (4,), -1), "max_sequence_length must be 0 or more, got -1"),
    ],
)
def test_features_that_cannot_be(feature: FeatureConfig, said: str) -> None:
    with pytest.raises(InputError, match=said):
        FeatureConfigs({"f": feature}).validate()
