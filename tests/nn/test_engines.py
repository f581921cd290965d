"""Random collections on the cpu engine and on the reference engine: the same outputs, the same training.

What is read is equal to the bit; rows that were trained for a few steps are equal within 1e-6.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith import (
    EmbeddingCollection,
    Feature,
    FirstN,
    Layout,
    Mean,
    Normal,
    Ragged,
    Segment,
    Slice,
    Sqrtn,
    Sum,
    TableConfig,
)
from tests.fixed_examples import fixed_examples
from tests.table.support import OPTIMIZERS, assert_close, assert_same_bits, dyadic, whole

IDS = [0, -1, 1, 2, 3, 2**62, -(2**63)]
COMBINERS = [Sum(), Mean(), Sqrtn(), FirstN(1), FirstN(3)]
optimizers = st.sampled_from(sorted(OPTIMIZERS)).map(OPTIMIZERS.__getitem__)
seeds = st.integers(0, 2**32 - 1)


@dataclass
class World:
    """A collection's arguments, batches for it, and a seed for the gradients."""

    tables: list[TableConfig]
    features: list[Feature]
    options: dict[str, Any]
    batches: list[dict[str, Ragged]]
    seed: int
    rows: dict[str, tuple[Tensor, Tensor]] = field(repr=False)


@st.composite
def tables(draw: st.DrawFn, name: str) -> TableConfig:
    segments = [
        Segment(draw(st.integers(1, 9)), optimizer=draw(optimizers), initializer=Normal(0.0, 1.0))
        for _ in range(draw(st.integers(1, 2)))
    ]
    return TableConfig(name, segments=segments, missing=draw(st.sampled_from(["initial", "zeros"])))


@st.composite
def layouts(draw: st.DrawFn, features: list[Feature], dims: dict[str, int]) -> list[Layout]:
    """Some layouts of every kind, and one of kind "none" with every feature."""
    made = [Layout("all", [Slice(f.name, 0, dims[f.table]) for f in features], kind="none")]
    for number in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["concat", "stack", "add", "none"]))
        first = draw(st.sampled_from(features))
        alike = [f for f in features if _prefix(f) == _prefix(first)]
        if kind == "add" and _prefix(first):
            continue
        narrowest = min(dims[f.table] for f in alike)
        width = draw(st.integers(1, narrowest))
        slices = []
        for _ in range(draw(st.integers(1, 3))):
            feature = draw(st.sampled_from(features if kind == "none" else alike))
            own = draw(st.integers(1, dims[feature.table])) if kind in ("concat", "none") else width
            start = draw(st.integers(0, dims[feature.table] - own))
            slices.append(Slice(feature.name, start, start + own))
        made.append(Layout(f"{number}", slices, kind=kind))
    return made


def _prefix(feature: Feature) -> tuple[int, ...]:
    assert feature.combiner is not None
    return feature.combiner.output_shape(1)[:-1]


@st.composite
def columns(draw: st.DrawFn, size: int) -> Ragged:
    rows = draw(st.lists(st.lists(st.sampled_from(IDS), max_size=4), min_size=size, max_size=size))
    ragged = Ragged.from_lists(rows)
    weights = dyadic(draw(seeds), ragged.values.numel()) if draw(st.booleans()) else None
    return Ragged(ragged.values, ragged.row_splits, weights)


@st.composite
def worlds(draw: st.DrawFn, with_layouts: bool | None = None) -> World:
    configs = [draw(tables(name)) for name in ("t", "u")[: draw(st.integers(1, 2))]]
    with_layouts = draw(st.booleans()) if with_layouts is None else with_layouts
    features = []
    for number in range(draw(st.integers(1, 4))):
        combiner = draw(st.sampled_from(COMBINERS if with_layouts else [*COMBINERS, None]))
        shared = combiner is not None and draw(st.booleans())
        features.append(Feature(f"f{number}", draw(st.sampled_from(configs)).name, combiner, shared))
    dims = {config.name: config.dim for config in configs}
    options = {
        "layouts": draw(layouts(features, dims)) if with_layouts else None,
        "update": draw(st.sampled_from(["backward", "step"])),
        "clip_value": draw(st.sampled_from([None, 0.5])),
        "clip_norm": draw(st.sampled_from([None, 1.5])),
        "seed": draw(st.integers(0, 3)),
    }
    smallest = 1 if any(f.shared for f in features) else 0
    batches = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(smallest, 4))
        batches.append({f.name: draw(columns(1 if f.shared else size)) for f in features})
    known = torch.tensor(draw(st.lists(st.sampled_from(IDS), unique=True)), dtype=torch.int64)
    rows = {name: (known, dyadic(draw(seeds), len(known), dim)) for name, dim in dims.items()}
    return World(configs, features, options, batches, draw(seeds), rows)


def tensors(out: dict[str, Any]) -> list[Tensor]:
    """All tensors of a result, in order."""
    flat = [v for value in out.values() for v in (value if isinstance(value, list) else [value])]
    return [v.values if isinstance(v, Ragged) else v for v in flat]


def make(world: World, engine: str) -> EmbeddingCollection:
    made = EmbeddingCollection(world.tables, world.features, engine=engine, **world.options)
    made.shards.assign(world.rows)
    return made


@fixed_examples(30, 60)
@given(worlds())
def test_engines_agree(world: World) -> None:
    cpu, reference = make(world, "cpu"), make(world, "reference")

    for batch in world.batches:
        with torch.no_grad():
            ours, references = cpu(batch), reference(batch)
        assert list(ours) == list(references)
        for mine, other in zip(tensors(ours), tensors(references), strict=True):
            assert_same_bits(mine, other)

    for made in (cpu, reference):
        for number, batch in enumerate(world.batches):
            outputs = tensors(made(batch))
            factors = [dyadic(world.seed + number + k, *x.shape) for k, x in enumerate(outputs)]
            torch.stack([(x * f).sum() for x, f in zip(outputs, factors, strict=True)]).sum().backward()
        if made.update == "step":
            made.step()
    assert cpu.global_step == reference.global_step
    for name in cpu.shards.configs:
        mine, other = whole(cpu.shards.local[name]), whole(reference.shards.local[name])
        assert mine.ids.tolist() == other.ids.tolist()
        assert_close(mine.rows, other.rows, rtol=1e-6, atol=1e-6)


@fixed_examples(20, 40)
@given(worlds(with_layouts=True))
def test_layouts_are_made_of_features(world: World) -> None:
    """What a layout shows of a feature is what the feature alone gives."""
    given_layouts = world.options["layouts"]
    world.options["layouts"] = None
    alone = make(world, "cpu").eval()(world.batches[0])
    world.options["layouts"] = given_layouts
    together = make(world, "cpu").eval()(world.batches[0])
    for layout in given_layouts:
        pieces = [alone[cut.feature][..., cut.start : cut.end] for cut in layout.slices]
        if layout.kind == "none":
            for piece, tensor in zip(pieces, together[layout.name], strict=True):
                assert_same_bits(tensor, piece.contiguous())
            continue
        expected = {
            "concat": lambda p: torch.cat(p, -1),
            "stack": lambda p: torch.stack(p, 1),
            "add": lambda p: torch.stack(p).sum(0),
        }[layout.kind](pieces)
        if layout.kind == "add":  # added table by table
            assert_close(together[layout.name], expected, rtol=1e-5, atol=1e-5)
        else:
            assert_same_bits(together[layout.name], expected)
