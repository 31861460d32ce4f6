"""Copy regions between random topologies: each layer and head is written once, with the bytes of a brute-force gather.

A cell is one layer and one head.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdserve.transfer.plan.copy_regions import CopyRegion, CoverageError, plan_regions
from pdserve.transfer.plan.copy_runs import check_bounds, expand_runs, expand_token_runs
from pdserve.transfer.protocol.layout import KvLayout, Plane
from tests.examples import examples

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

PAGE_SIZES = (1, 3, 7, 16, 64)


def layout(
    layers: tuple[int, int],
    heads: tuple[int, int],
    *,
    planes: tuple[int, ...] = (8, 8),
    page_size: int = 16,
    num_pages: int = 8,
) -> KvLayout:
    rows = tuple(Plane(f"p{index}", token_bytes) for index, token_bytes in enumerate(planes))
    return KvLayout(rows, *layers, *heads, page_size, num_pages, "uint8")


def cut(total: int, parts: int) -> list[tuple[int, int]]:
    """`total` in `parts` nearly equal ranges. More parts than members share members, as GQA replicas."""
    if parts > total:
        return [(part * total // parts, part * total // parts + 1) for part in range(parts)]
    edges = [part * total // parts for part in range(parts + 1)]
    return list(itertools.pairwise(edges))


@st.composite
def ranges(draw: st.DrawFn, total: int, parts: int) -> list[tuple[int, int]]:
    """Ranges that cover `total`: even, uneven, replicated, or overlapping."""
    style = draw(st.sampled_from(["even", "uneven", "replicated", "overlapping"]))
    if style == "even" or parts == 1 or total == 1:
        return cut(total, parts)
    distinct = draw(st.integers(1, min(parts, total))) if style == "replicated" else min(parts, total)
    inner = draw(st.lists(st.integers(1, total - 1), min_size=distinct - 1, max_size=distinct - 1, unique=True))
    edges = [0, *sorted(inner), total]
    pieces = list(itertools.pairwise(edges))
    if style == "overlapping":
        pieces = [(start, min(end + draw(st.integers(0, 2)), total)) for start, end in pieces]
    return [pieces[part % len(pieces)] for part in range(parts)]


@st.composite
def topologies(
    draw: st.DrawFn, layers: int, heads: int, planes: tuple[int, ...], page_size: int, num_pages: int
) -> list[KvLayout]:
    stages = draw(ranges(layers, draw(st.integers(1, min(4, layers)))))
    shards = draw(ranges(heads, draw(st.integers(1, 8))))
    return [
        layout(stage, shard, planes=planes, page_size=page_size, num_pages=num_pages)
        for stage in stages
        for shard in shards
    ]


class Sides(NamedTuple):
    prefill: list[KvLayout]
    decode: list[KvLayout]


class Tokens(NamedTuple):
    start: int
    end: int
    source_pages: Ints
    destination_pages: Ints


@st.composite
def cases(draw: st.DrawFn) -> tuple[Sides, Tokens, int]:
    layers, heads = draw(st.integers(1, 12)), draw(st.integers(1, 16))
    planes = draw(st.sampled_from([(1,), (2, 2), (3, 1)]))
    seed = draw(st.integers(0, 10_000))
    rng = np.random.default_rng(seed)
    tokens = draw(st.integers(1, 40))
    start = draw(st.integers(0, tokens - 1))
    sides, page_lists = [], []
    page_size = draw(st.sampled_from(PAGE_SIZES))
    for size in (page_size, draw(st.one_of(st.just(page_size), st.sampled_from(PAGE_SIZES)))):
        needed = -(-tokens // size)
        sides.append(draw(topologies(layers, heads, planes, size, needed + 2)))
        shuffled = rng.permutation(needed + 2)[:needed]
        page_lists.append(draw(st.sampled_from([np.arange(1, needed + 1), shuffled])))
    return Sides(*sides), Tokens(start, tokens, *page_lists), seed


def planes_of(pool: Bytes, kv: KvLayout) -> dict[tuple[int, int], Bytes]:
    """Views `[page, head, slot, byte]` of a pool by (global layer, plane), from `[page][layer][plane][head][token]`."""
    views = {}
    pages = pool.reshape(kv.num_pages, -1)
    offset = 0
    for layer in kv.layers:
        for index, plane in enumerate(kv.planes):
            size = kv.num_heads * kv.page_size * plane.token_bytes
            block = pages[:, offset : offset + size]
            views[layer, index] = block.reshape(kv.num_pages, kv.num_heads, kv.page_size, plane.token_bytes)
            offset += size
    assert offset == pages.shape[1]
    return views


def put(pool: Bytes, kv: KvLayout, truth: dict[tuple[int, int], Bytes], positions: Ints, rows: Ints) -> None:
    """Store tokens at `positions` of `truth` (`[head, token, byte]` by layer and plane) in rows of a pool."""
    for key, view in planes_of(pool, kv).items():
        assert np.shares_memory(view, pool)
        view[rows // kv.page_size, :, rows % kv.page_size] = truth[key][
            kv.head_start : kv.head_end, positions
        ].swapaxes(0, 1)


def rows_of(pages: Ints, page_size: int, positions: Ints) -> Ints:
    return pages[positions // page_size] * page_size + positions % page_size


def copy(runs_of: Sequence[tuple[Ints, Ints, Ints]], sources: Sequence[Bytes], destination: Bytes) -> Ints:
    """Copy runs from several pools. Returns how often each byte of the destination was written."""
    writes = np.zeros(destination.size, dtype=np.int64)
    for (source, target, length), pool in zip(runs_of, sources, strict=True):
        steps = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        to = np.repeat(target, length) + steps
        destination[to] = pool[np.repeat(source, length) + steps]
        writes += np.bincount(to, minlength=destination.size)
    return writes


@pytest.mark.slow
@settings(max_examples=examples(400, 120), deadline=None)
@given(case=cases(), by_token=st.booleans())
def test_regions_copy_the_right_bytes_between_any_topologies(case: tuple[Sides, Tokens, int], by_token: bool) -> None:
    (prefill, decode), tokens, seed = case
    rng = np.random.default_rng(seed)
    layers, heads = max(kv.layer_end for kv in prefill), max(kv.head_end for kv in prefill)
    truth = {
        (layer, index): rng.integers(0, 256, (heads, tokens.end, plane.token_bytes), dtype=np.uint8)
        for layer in range(layers)
        for index, plane in enumerate(prefill[0].planes)
    }
    everything = np.arange(tokens.end)
    sources = []
    for kv in prefill:
        pool = rng.integers(0, 256, kv.size_bytes, dtype=np.uint8)
        put(pool, kv, truth, everything, rows_of(tokens.source_pages, kv.page_size, everything))
        sources.append(pool)
    regions = plan_regions(prefill, decode, first=seed % len(prefill))
    sent = np.arange(tokens.start, tokens.end)
    for destination, kv in enumerate(decode):
        poison = rng.integers(0, 256, kv.size_bytes, dtype=np.uint8)
        if by_token:
            rows = rng.permutation(kv.num_pages * kv.page_size)[: tokens.end]
        else:
            rows = rows_of(tokens.destination_pages, kv.page_size, everything)
        expected, actual = poison.copy(), poison.copy()
        put(expected, kv, truth, sent, rows[sent])
        runs_of, pools = [], []
        for region in regions:
            if region.destination != destination:
                continue
            source = prefill[region.source]
            span = (tokens.start, tokens.end, region)
            pages = tokens.source_pages[tokens.start // source.page_size :]
            to_pages = tokens.destination_pages[tokens.start // kv.page_size :]
            runs = (
                expand_token_runs(source, kv, pages, rows[tokens.start :], *span)
                if by_token
                else expand_runs(source, kv, pages, to_pages, *span)
            )
            check_bounds(runs, source.size_bytes, kv.size_bytes)
            runs_of.append((runs.source, runs.destination, runs.length))
            pools.append(sources[region.source])
        writes = copy(runs_of, pools, actual)
        assert writes.max() == 1
        if not by_token and kv.page_size == prefill[0].page_size and tokens.end % kv.page_size:
            # The last page is copied whole: the bytes behind the last token are arbitrary and never read.
            page = tokens.destination_pages[tokens.end // kv.page_size]
            for pool in (expected, actual):
                for view in planes_of(pool, kv).values():
                    view[page, :, tokens.end % kv.page_size :] = 0
        else:
            assert writes.sum() == len(sent) * kv.token_bytes
        assert (actual == expected).all()


@st.composite
def sides(draw: st.DrawFn) -> Sides:
    layers, heads = draw(st.integers(1, 12)), draw(st.integers(1, 16))
    return Sides(*(draw(topologies(layers, heads, (1,), 16, 1)) for _ in range(2)))


@pytest.mark.slow
@settings(max_examples=examples(1000, 300), deadline=None)
@given(case=sides(), first=st.integers(0, 31))
def test_every_cell_has_one_writer_and_rectangles_are_maximal(case: Sides, first: int) -> None:
    regions = plan_regions(*case, first=first % len(case.prefill))
    for destination, kv in enumerate(case.decode):
        here = [region for region in regions if region.destination == destination]
        writers = np.zeros((12, 16), dtype=np.int64)
        for region in here:
            writers[region.layers.start : region.layers.stop, region.heads.start : region.heads.stop] += 1
        assert (writers[kv.layer_start : kv.layer_end, kv.head_start : kv.head_end] == 1).all()
        assert writers.sum() == kv.num_layers * kv.num_heads
        for region in here:
            source = case.prefill[region.source]
            assert source.layer_start <= region.layers.start < region.layers.stop <= source.layer_end
            assert source.head_start <= region.heads.start < region.heads.stop <= source.head_end
        by_source = sorted(here, key=lambda region: region.source)
        for _, group in itertools.groupby(by_source, key=lambda region: region.source):
            for left, right in itertools.permutations(group, 2):
                assert not (left.layers.stop == right.layers.start and left.heads == right.heads)
                assert not (left.heads.stop == right.heads.start and left.layers == right.layers)


@pytest.mark.slow
@settings(max_examples=examples(500, 150), deadline=None)
@given(layers=st.integers(1, 12), replicas=st.integers(1, 8), stages=st.integers(1, 4), copies=st.integers(1, 8))
def test_replicas_write_similar_numbers_of_layers(layers: int, replicas: int, stages: int, copies: int) -> None:
    prefill = [layout((0, layers), (0, 1))] * replicas
    decode = [layout(stage, (0, 1)) for stage in cut(layers, min(stages, layers))] * copies
    regions = plan_regions(prefill, decode)
    assert len(regions) == len(decode), "a decode rank that one prefill rank can serve has one region"
    load = [sum(len(region.layers) for region in regions if region.source == source) for source in range(replicas)]
    assert max(load) - min(load) <= max(kv.num_layers for kv in decode)


def test_first_selects_the_replica() -> None:
    prefill, decode = [layout((0, 4), (0, 1))] * 3, [layout((0, 4), (0, 1))]
    assert [plan_regions(prefill, decode, first=first)[0].source for first in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param([layout(stage, shard) for stage in cut(8, 2) for shard in cut(8, 4)], id="pp2tp4"),
        pytest.param([layout((0, 8), shard) for shard in cut(4, 8)], id="tp8 over 4 heads"),
        pytest.param([layout(stage, (0, 1)) for stage in cut(9, 4) for _ in range(2)], id="latent, pp4tp2"),
        pytest.param([layout((0, 2), (0, 2)), layout((0, 2), (1, 3))], id="overlapping"),
    ],
)
def test_equal_topologies_are_rank_to_rank_and_one_copy_per_run_of_pages(topology: list[KvLayout]) -> None:
    regions = plan_regions(topology, topology)
    assert [(region.source, region.destination) for region in regions] == [
        (rank, rank) for rank in range(len(topology))
    ]
    for region in regions:
        kv = topology[region.source]
        assert len(expand_runs(kv, kv, [2, 3, 4, 6, 7], [1, 2, 3, 4, 5], 0, 80, region)) == 2
        assert len(expand_token_runs(kv, kv, [2, 3], range(16, 48), 0, 32, region)) == 1


def test_regions_from_three_pipeline_stages_to_two() -> None:
    prefill = [layout((0, 4), (0, 2)), layout((4, 8), (0, 2)), layout((8, 12), (0, 2))]
    decode = [layout((0, 6), (0, 2)), layout((6, 12), (0, 2))]
    heads = range(2)
    assert set(plan_regions(prefill, decode)) == {
        CopyRegion(0, 0, range(4), heads),
        CopyRegion(1, 0, range(4, 6), heads),
        CopyRegion(1, 1, range(6, 8), heads),
        CopyRegion(2, 1, range(8, 12), heads),
    }


def test_missing_cell_is_named_in_the_error() -> None:
    prefill = [layout((0, 4), (0, 2)), layout((0, 3), (2, 4))]
    with pytest.raises(CoverageError, match=r"decode rank 1 needs layer 3, head 2 of p0\+p1, which no prefill rank"):
        plan_regions(prefill, [layout((0, 3), (0, 4)), layout((2, 4), (0, 4))])
