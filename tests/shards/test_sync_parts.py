"""The parts of SyncShards that need no other rank: wires, sums by a tree, preparing ids, joint poolings."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith import SGD, LocalShards, Router, TableConfig
from megalith.errors import InputError, UnknownNameError
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.routing import MODES
from megalith.shards.gradients import Gradients, add, halves, total
from megalith.shards.preparer import RoutingPreparer, make_routers
from megalith.shards.routed_lookup import JointPooling, sum_gradients
from megalith.shards.row_encoding import ROW_WIRES, check_wire, make_wire
from tests.fixed_examples import fixed_examples
from tests.table.support import EXTREME_IDS, assert_close, assert_same_bits, ints

# ---- wires

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[int]]:
    """Rows for peers x tables: flat values, counts and dims."""
    peers, dims = draw(st.integers(1, 3)), draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    counts = torch.tensor([[draw(st.integers(0, 3)) for _ in dims] for _ in range(peers)])
    size = int((counts * torch.tensor(dims)).sum())
    return torch.tensor(draw(st.lists(FINITE, min_size=size, max_size=size))), counts, dims


def error_bound(name: str, flat: Tensor, counts: Tensor, dims: Sequence[int]) -> Tensor:
    """How far a number may be off: half a unit in the last place, or half of a row's 1/127th."""
    if name == "float32":
        return torch.zeros_like(flat)
    if name == "int8":
        sizes = [dim for peer in counts.tolist() for n, dim in zip(peer, dims, strict=True) for _ in range(n)]
        tiny = torch.finfo(torch.float32).tiny
        largest = [max(row.abs().max().item(), tiny) for row in flat.split(sizes)] if sizes else []
        scale = torch.repeat_interleave(torch.tensor(largest), torch.tensor(sizes, dtype=torch.int64)) / 127
        return scale * 0.5001 + 1e-44
    info = torch.finfo(getattr(torch, name))
    return torch.maximum(flat.abs() * info.eps / 2, torch.tensor(info.smallest_normal * info.eps))


@pytest.mark.parametrize("name", ROW_WIRES)
@fixed_examples(20, 60)
@given(given_blocks=blocks())
def test_what_travels_comes_out_within_the_precision(name: str, given_blocks: Any) -> None:
    flat, counts, dims = given_blocks
    wire = make_wire(name)
    data = wire.encode(flat, counts, dims)
    assert data.dtype == torch.uint8
    assert data.numel() == sum(wire.sizes(counts, dims))
    back = wire.decode(data, counts, dims)
    limit = torch.finfo(getattr(torch, name)).max if "float" in name else torch.finfo(torch.float32).max
    wanted = flat.clamp(-limit, limit)
    assert bool(((back - wanted).abs() <= error_bound(name, wanted, counts, dims)).all())
    assert back.isfinite().all()


@pytest.mark.parametrize("name", ROW_WIRES)
@fixed_examples(20, 60)
@given(given_blocks=blocks())
def test_each_peer_can_read_its_part_alone(name: str, given_blocks: Any) -> None:
    flat, counts, dims = given_blocks
    wire = make_wire(name)
    together = wire.encode(flat, counts, dims)
    floats = (counts * torch.tensor(dims)).sum(1).tolist()
    decoded = wire.decode(together, counts, dims).split(floats)
    sizes = wire.sizes(counts, dims)
    for peer, (own, data) in enumerate(zip(flat.split(floats), together.split(sizes), strict=True)):
        alone = counts[peer : peer + 1]
        assert torch.equal(data, wire.encode(own, alone, dims))
        assert_same_bits(wire.decode(data.clone(), alone, dims), decoded[peer])


def test_what_is_too_large_for_a_wire_becomes_its_largest_number() -> None:
    flat, counts = torch.tensor([1e30, -1e30, 65504.0, 70000.0]), torch.tensor([[2]])
    wire = make_wire("float16")
    back = wire.decode(wire.encode(flat, counts, [2]), counts, [2])
    assert back.tolist() == [65504.0, -65504.0, 65504.0, 65504.0]
    wire = make_wire("bfloat16")
    flat = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max])
    back = wire.decode(wire.encode(flat, counts, [1]), counts, [1])
    assert back.tolist() == [torch.finfo(torch.bfloat16).max, -torch.finfo(torch.bfloat16).max]


@pytest.mark.parametrize("largest", [1e-44, 1e-39, 1.1e-38, 1.2e-38, 1e-30])
def test_int8_keeps_tiny_rows_within_its_precision(largest: float) -> None:
    """Given rows near or below the smallest normal float32, the error is at most half a unit of the scale."""
    rows = torch.tensor([[largest, -largest / 2, 0.0], [0.0, 0.0, 0.0]])
    wire, counts, dims = make_wire("int8"), torch.tensor([[2]]), [3]
    back = wire.decode(wire.encode(rows.view(-1), counts, dims), counts, dims).view(2, 3)
    unit = max(largest, torch.finfo(torch.float32).tiny) / 127
    assert ((back - rows).double().abs() <= unit * 0.51).all()
    assert torch.equal(back[1], torch.zeros(3))


def test_a_wire_is_named_for_both_ways_or_for_each() -> None:
    assert check_wire("float32") == ("float32", "float32")
    assert check_wire("bfloat16") == ("bfloat16", "bfloat16")
    assert check_wire("int8") == ("int8", "float32")  # gradients have no int8
    assert check_wire({"grads": "float16"}) == ("float32", "float16")
    for bad in ("float8", {"rows": "float64"}, {"grads": "int8"}, {"row": "int8"}, None, 16):
        with pytest.raises(InputError, match="wire must be"):
            check_wire(bad)  # type: ignore[arg-type]


# ---- sums


@st.composite
def some_parts(draw: st.DrawFn, sizes: Any) -> list[Gradients]:
    """Summed gradients of few ids, so that parts share them; some parts have none."""
    made = []
    for _ in range(draw(sizes)):
        ids = draw(st.lists(st.sampled_from(EXTREME_IDS), max_size=5, unique=True))
        seed = draw(st.integers(0, 99))
        made.append(
            Gradients(ints(*ids), torch.randn(len(ids), 2, generator=torch.Generator().manual_seed(seed)))
        )
    return made


def tree(values: Sequence[Tensor | None]) -> Tensor | None:
    """The definition: a level at a time, neighbours are added; what is absent adds nothing."""
    level = list(values)
    while len(level) > 1:
        pairs = [(level[i], level[i + 1] if i + 1 < len(level) else None) for i in range(0, len(level), 2)]
        level = [a if b is None else b if a is None else a + b for a, b in pairs]
    return level[0]


def by_id(part: Gradients) -> dict[int, Tensor]:
    return dict(zip(part.ids.tolist(), part.values, strict=True))


@fixed_examples(50)
@given(parts=some_parts(st.integers(1, 8)))
def test_sums_go_by_the_tree_and_absent_ids_add_nothing(parts: list[Gradients]) -> None:
    summed = by_id(total(parts))
    assert set(summed) == {i for part in parts for i in part.ids.tolist()}
    for i, got in summed.items():
        expected = tree([by_id(part).get(i) for part in parts])
        assert expected is not None
        assert_same_bits(got, expected)


@fixed_examples(50)
@given(parts=some_parts(st.sampled_from([2, 4, 8])))
def test_the_bits_of_a_sum_do_not_know_where_ranks_begin(parts: list[Gradients]) -> None:
    whole = by_id(total(parts))
    for ranks in (2, 4):
        share = max(1, len(parts) // ranks)
        summed = by_id(total([total(parts[i : i + share]) for i in range(0, len(parts), share)]))
        assert summed.keys() == whole.keys()
        for i, got in summed.items():
            assert_same_bits(got, whole[i])


@fixed_examples(50)
@given(parts=some_parts(st.integers(1, 5)))
def test_halves_are_left_for_whoever_makes_the_last_sum(parts: list[Gradients]) -> None:
    before = [Gradients(part.ids.clone(), part.values.clone()) for part in parts]
    both = halves(parts)
    assert len(both) == min(2, len(parts))
    for a, b in zip(parts, before, strict=True):
        assert_same_bits(a.values, b.values)  # what was given is left alone
    joined = both[0] if len(both) == 1 else add(*both)
    assert_same_bits(joined.values, total(parts).values)


# ---- preparing

DIMS = {"a": 2, "b": 3, "c": 1}
CONFIGS = {name: TableConfig(name, dim=dim, optimizer=SGD(1.0)) for name, dim in DIMS.items()}
IDS = st.lists(st.sampled_from(EXTREME_IDS) | st.integers(-3, 3), max_size=12)


def routers(ranks: int, *modes: str) -> dict[str, Router]:
    made = [Router(mode, ranks, block_size=2 if mode == "continuous" else None) for mode in modes]
    return dict(zip(CONFIGS, made, strict=True))


@fixed_examples(50)
@given(
    ids=st.fixed_dictionaries({}, optional=dict.fromkeys(CONFIGS, IDS)),
    ranks=st.integers(1, 4),
    modes=st.tuples(*[st.sampled_from(MODES)] * 3) | st.sampled_from([(mode,) * 3 for mode in MODES]),
    distinct=st.booleans(),
)
def test_every_id_travels_once_to_its_owner(
    ids: Mapping[str, list[int]], ranks: int, modes: tuple[str, ...], distinct: bool
) -> None:
    by_table = routers(ranks, *modes)
    prepared = RoutingPreparer(CONFIGS, by_table)(
        {name: ints(*x) for name, x in ids.items()}, distinct=distinct
    )
    found = prepared.deduped
    assert {name: x.tolist() for name, x in prepared.ids.items()} == ids
    assert found.counts.shape == (ranks, len(CONFIGS))
    sent = found.ids.split(found.counts.reshape(-1).tolist())
    for rank in range(ranks):
        for t, name in enumerate(CONFIGS):
            own = sent[rank * len(CONFIGS) + t].tolist()
            wanted = [i for i in ids.get(name, []) if int(by_table[name].owner(ints(i))) == rank]
            assert own == (list(dict.fromkeys(wanted)) if distinct else wanted)
    widths = torch.tensor(list(DIMS.values())).repeat(ranks).repeat_interleave(found.counts.reshape(-1))
    begins = widths.cumsum(0) - widths
    assert found.offsets is not None
    for name in ids:
        where = prepared.occurrences(name)
        assert found.ids[found.inverse[where]].tolist() == ids[name]
        assert found.offsets[where].tolist() == begins[found.inverse[where]].tolist()


@pytest.mark.parametrize(
    ("lists", "ranks", "ids", "counts", "offsets"),
    [
        ([[0, 1, 2, 2, 3, 5]], 3, [0, 3, 1, 2, 5], [2, 1, 2], [0, 4, 6, 6, 2, 8]),
        ([[0, 1, 2, 2, 3, 5], []], 3, [0, 3, 1, 2, 5], [2, 0, 1, 0, 2, 0], [0, 4, 6, 6, 2, 8]),
        (
            [[0, 1, 2, 2, 3, 5], [6, 7, 8, 8, 9, 11]],
            3,
            [0, 3, 6, 9, 1, 7, 2, 5, 8, 11],
            [2, 2, 1, 1, 2, 2],
            [0, 8, 12, 12, 2, 14, 4, 10, 16, 16, 6, 18],
        ),
        ([[], []], 2, [], [0, 0, 0, 0], []),
        ([[0, 1, 4, 5], [2, 3, 6, 7]], 2, [0, 4, 2, 6, 1, 5, 3, 7], [2] * 4, [0, 8, 2, 10, 4, 12, 6, 14]),
    ],
)
def test_ids_lie_as_in_monoliths_fused_reorder(
    lists: list[list[int]], ranks: int, ids: list[int], counts: list[int], offsets: list[int]
) -> None:
    configs = {str(t): TableConfig(str(t), dim=2, optimizer=SGD(1.0)) for t in range(len(lists))}
    preparer = RoutingPreparer(configs, {name: Router("roundrobin", ranks) for name in configs})
    found = preparer({str(t): ints(*column) for t, column in enumerate(lists)}).deduped
    assert found.ids.tolist() == ids
    assert found.counts.flatten().tolist() == counts
    assert found.offsets is not None
    assert found.offsets.tolist() == offsets


def test_a_preparer_can_be_sent_to_another_process_and_gives_the_same() -> None:
    preparer = RoutingPreparer(CONFIGS, routers(3, *MODES))
    ids = {"b": ints(5, 1, 5), "a": ints(*EXTREME_IDS)}
    here, there = preparer(ids), pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(preparer))(ids)))
    for a, b in zip(here.deduped, there.deduped, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
    assert (here.begin, here.total) == (there.begin, there.total)


def test_int32_ids_are_sign_extended() -> None:
    preparer = RoutingPreparer(CONFIGS, routers(3, *MODES))
    short, long = (preparer({"a": torch.tensor([-1, 7, -1], dtype=t)}) for t in (torch.int32, torch.int64))
    assert torch.equal(short.deduped.ids, long.deduped.ids)
    assert torch.equal(short.deduped.counts, long.deduped.counts)


def test_ids_that_are_none_are_told_with_their_table() -> None:
    preparer = RoutingPreparer(CONFIGS, routers(2, *MODES))
    with pytest.raises(UnknownNameError, match="unknown table 'z' \\(known: 'a', 'b', 'c'\\)"):
        preparer({"z": ints(1)})
    assert list(preparer({"z": ints(1), "a": ints(1)}, missing_ok=True).ids) == ["a"]
    for bad, said in ((torch.ones(2), "float32"), (ints(1)[None], r"\[n\]"), ([1], "tensor")):
        with pytest.raises(InputError, match=f"table 'b': .*{said}"):
            preparer({"b": bad})  # type: ignore[dict-item]


def test_a_router_for_every_table() -> None:
    block = Router("continuous", 4, block_size=10)
    own = {**CONFIGS, "b": TableConfig("b", dim=3, optimizer=SGD(1.0), dist_type="hash_roundrobin")}
    made = make_routers(own, "roundrobin", 4)
    assert [made[name].mode for name in own] == ["roundrobin", "hash_roundrobin", "roundrobin"]
    made = make_routers(own, {"a": block}, 4)
    assert (made["a"], made["b"].mode, made["c"].mode) == (block, "hash_roundrobin", "roundrobin")
    for given_router, said in (
        (Router("roundrobin", 2), "for 2 ranks, but there are 4"),
        ("continuous", "block_size"),
        ("modulo", "unknown routing mode 'modulo'"),
        (block, "table 'b' has dist_type='hash_roundrobin', its router is 'continuous'"),
        ({"z": "roundrobin"}, "unknown table 'z'"),
    ):
        with pytest.raises((InputError, UnknownNameError), match=said):
            make_routers(own, given_router, 4)


# ---- joint poolings


@st.composite
def pooled(draw: st.DrawFn) -> tuple[dict[str, Tensor], Pooling]:
    """Features of tables "a", "b", "c", an output each: bags of ids, some weighted, divided or cut short."""
    ids, bags = {}, {}
    outputs: list[tuple[int, int]] = []
    for name, dim in DIMS.items():
        n = draw(st.integers(0, 8))
        ids[name] = ints(*draw(st.lists(st.integers(0, 5), min_size=n, max_size=n)))
        weights = torch.rand(n) + 0.5 if draw(st.booleans()) else None
        own = []
        at = 0
        for _ in range(draw(st.integers(0, 2))):
            at = draw(st.integers(at, n))  # a gap: occurrences that no bag holds
            lengths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
            offsets = (at + torch.tensor([0, *lengths]).cumsum(0)).clamp(max=n)
            at = int(offsets[-1])
            divisor = torch.rand(len(lengths)) + 0.5 if draw(st.booleans()) else None
            weighted = weights if draw(st.booleans()) else None
            start = draw(st.integers(0, dim - 1))
            own.append(Bags(offsets, (OutputSlice(len(outputs), 0, start, dim),), weighted, divisor))
            outputs.append((len(lengths), dim - start))
        bags[name] = tuple(own)
    return ids, Pooling(tuple(outputs), bags)


def local(ids: Mapping[str, Tensor]) -> LocalShards:
    shards = LocalShards(list(CONFIGS.values()))
    shards.reinitialize(ids)
    return shards


@fixed_examples(50)
@given(given_pooled=pooled(), ranks=st.integers(1, 3))
def test_a_joined_pooling_reads_what_each_table_would(given_pooled: Any, ranks: int) -> None:
    ids, pooling = given_pooled
    shards = local(ids)
    prepared = RoutingPreparer(CONFIGS, routers(ranks, *MODES))(ids)
    names = list(CONFIGS) * ranks
    sent = prepared.deduped.ids.split(prepared.deduped.counts.reshape(-1).tolist())
    rows = [shards.local[name].lookup(own).flatten() for name, own in zip(names, sent, strict=True)]
    got = JointPooling(pooling, prepared, DIMS).pool(torch.cat(rows))
    for a, b in zip(got, shards.lookup(ids).pool(pooling), strict=True):
        assert_same_bits(a, b)


@fixed_examples(50)
@given(given_pooled=pooled(), seed=st.integers(0, 99))
def test_gradients_are_summed_per_distinct_id_that_reached_an_output(given_pooled: Any, seed: int) -> None:
    ids, pooling = given_pooled
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.rand(shape, generator=generator) for shape in pooling.outputs]
    shards = local({})
    before = {name: table.lookup(torch.arange(6)) for name, table in shards.local.items()}
    shards.apply_gradients(shards.lookup(ids), grads, step=0, pooling=pooling)
    parts = sum_gradients(CONFIGS, ids, pooling, grads)
    assert set(parts) == {name for name in CONFIGS if pooling.of(name)}
    for name, table in shards.local.items():
        part = parts.get(name, Gradients(ints(), torch.empty(0, DIMS[name])))
        assert {i for i in range(6) if i in table} == set(part.ids.tolist())
        assert_close(table.lookup(part.ids), before[name][part.ids] - part.values)


def test_a_pooling_of_what_was_not_looked_up_raises() -> None:
    prepared = RoutingPreparer(CONFIGS, routers(1, *MODES))({"a": ints(1)})
    with pytest.raises(InputError, match="table 'b': pooled, but it was not looked up"):
        JointPooling(Pooling.sum("b", ints(0, 1), 3), prepared, DIMS)
    with pytest.raises(InputError, match="table 'a': offsets"):
        JointPooling(Pooling.sum("a", ints(0, 2), 2), prepared, DIMS)
