"""Copy runs against a brute-force copy, token by token, over random layouts."""

import time
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdserve.transfer.plan.copy_regions import CopyRegion
from pdserve.transfer.plan.copy_runs import CopyRuns, PlanError, check_bounds, expand_runs, expand_token_runs
from pdserve.transfer.protocol.layout import KvLayout, Plane

Pool = NDArray[np.uint8]


class Case(NamedTuple):
    source: KvLayout
    destination: KvLayout
    source_pages: list[int]
    destination_pages: list[int]
    start: int
    end: int


def layout(
    *,
    planes: tuple[int, ...] = (8, 8),
    layers: tuple[int, int] = (0, 4),
    heads: tuple[int, int] = (0, 2),
    page_size: int = 16,
    num_pages: int = 32,
) -> KvLayout:
    return KvLayout(
        planes=tuple(Plane(f"p{index}", token_bytes) for index, token_bytes in enumerate(planes)),
        layer_start=layers[0],
        layer_end=layers[1],
        head_start=heads[0],
        head_end=heads[1],
        page_size=page_size,
        num_pages=num_pages,
        dtype="float16",
    )


def random_pool(kv: KvLayout, seed: int) -> Pool:
    return np.random.default_rng(seed).integers(0, 256, kv.size_bytes, dtype=np.uint8)


def token_range(kv: KvLayout, page: int, slot: int, layer: int, plane: int, head: int) -> slice:
    """The offset of one token's row, from the definition `[page][layer][plane][head][token][bytes]`."""
    offset = page * kv.page_bytes
    for before in range(kv.layer_start, layer + 1):
        for index, row in enumerate(kv.planes):
            if before == layer and index == plane:
                offset += ((head - kv.head_start) * kv.page_size + slot) * row.token_bytes
                return slice(offset, offset + row.token_bytes)
            offset += kv.num_heads * kv.page_size * row.token_bytes
    raise AssertionError


def of_range(case: Case) -> Case:
    """The same case with page lists that start at the page of the first token, which is what expand_runs takes."""
    return case._replace(
        source_pages=case.source_pages[case.start // case.source.page_size :],
        destination_pages=case.destination_pages[case.start // case.destination.page_size :],
    )


def copy_tokens(
    case: Case,
    source_pool: Pool,
    destination_pool: Pool,
    rows: list[int] | None = None,
    region: CopyRegion | None = None,
) -> None:
    source, destination = case.source, case.destination
    layers = set(source.layers) & set(destination.layers)
    heads = set(source.heads) & set(destination.heads)
    if region is not None:
        layers, heads = layers & set(region.layers), heads & set(region.heads)
    for token in range(case.start, case.end):
        from_page, from_slot = case.source_pages[token // source.page_size], token % source.page_size
        if rows is None:
            to_page, to_slot = case.destination_pages[token // destination.page_size], token % destination.page_size
        else:
            to_page, to_slot = divmod(rows[token], destination.page_size)
        for layer in layers:
            for head in heads:
                for plane in range(len(source.planes)):
                    destination_pool[token_range(destination, to_page, to_slot, layer, plane, head)] = source_pool[
                        token_range(source, from_page, from_slot, layer, plane, head)
                    ]


def apply(runs: CopyRuns, source_pool: Pool, destination_pool: Pool) -> None:
    check_bounds(runs, len(source_pool), len(destination_pool))
    for source, destination, length in zip(runs.source, runs.destination, runs.length, strict=True):
        destination_pool[destination : destination + length] = source_pool[source : source + length]


def assert_maximal(runs: CopyRuns) -> None:
    order = np.argsort(runs.source)
    source, destination, length = runs.source[order], runs.destination[order], runs.length[order]
    assert (length > 0).all()
    joined = (source[1:] == source[:-1] + length[:-1]) & (destination[1:] == destination[:-1] + length[:-1])
    assert not joined.any()


def tail_rows(case: Case) -> set[tuple[int, int]]:
    """(page, slot) of the destination after the last token: they may change, because a last page is copied whole."""
    destination = case.destination
    if case.end % destination.page_size == 0:
        return set()
    page = case.destination_pages[case.end // destination.page_size]
    return {(page, slot) for slot in range(case.end % destination.page_size, destination.page_size)}


def differing_rows(kv: KvLayout, left: Pool, right: Pool) -> set[tuple[int, int]]:
    rows = set()
    for page in range(kv.num_pages):
        inside = slice(page * kv.page_bytes, (page + 1) * kv.page_bytes)
        if (left[inside] == right[inside]).all():
            continue
        for slot in range(kv.page_size):
            for layer in range(kv.layer_start, kv.layer_end):
                for plane in range(len(kv.planes)):
                    for head in range(kv.head_start, kv.head_end):
                        where = token_range(kv, page, slot, layer, plane, head)
                        if not (left[where] == right[where]).all():
                            rows.add((page, slot))
    return rows


@st.composite
def intervals(draw: st.DrawFn, largest: int) -> tuple[int, int]:
    start = draw(st.integers(0, largest - 1))
    return start, draw(st.integers(start + 1, largest))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    planes = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    page_sizes = st.sampled_from([1, 2, 3, 4, 7, 16, 64])
    source_page_size = draw(page_sizes)
    destination_page_size = draw(st.one_of(st.just(source_page_size), page_sizes))
    tokens = draw(st.integers(1, 80))
    start = draw(st.integers(0, tokens))
    sides = []
    page_lists = []
    whole = draw(st.booleans())
    for page_size in (source_page_size, destination_page_size):
        needed = -(-tokens // page_size)
        num_pages = needed + 3
        sides.append(
            layout(
                planes=planes,
                layers=(0, 2) if whole else draw(intervals(3)),
                heads=(0, 2) if whole else draw(intervals(3)),
                page_size=page_size,
                num_pages=num_pages,
            )
        )
        shift = draw(st.integers(0, 3))
        adjacent = list(range(shift, shift + needed))
        shuffled = draw(st.permutations(range(num_pages)))[:needed]
        page_lists.append(draw(st.sampled_from([adjacent, shuffled])))
    return Case(sides[0], sides[1], page_lists[0], page_lists[1], start, tokens)


@settings(max_examples=150, deadline=None)
@given(case=cases(), seed=st.integers(0, 1000))
def test_page_runs_match_a_token_by_token_copy(case: Case, seed: int) -> None:
    source_pool = random_pool(case.source, seed)
    expected = random_pool(case.destination, seed + 1)
    actual = expected.copy()
    copy_tokens(case, source_pool, expected)
    runs = expand_runs(*of_range(case))
    apply(runs, source_pool, actual)
    assert_maximal(runs)
    allowed = tail_rows(case) if case.source.page_size == case.destination.page_size else set()
    assert differing_rows(case.destination, actual, expected) <= allowed


@settings(max_examples=100, deadline=None)
@given(case=cases(), seed=st.integers(0, 1000), data=st.data())
def test_token_runs_match_a_token_by_token_copy(case: Case, seed: int, data: st.DataObject) -> None:
    slots = case.destination.num_pages * case.destination.page_size
    assume(slots >= case.end)
    in_pages = [
        case.destination_pages[t // case.destination.page_size] * case.destination.page_size
        + t % case.destination.page_size
        for t in range(case.end)
    ]
    scattered = np.random.default_rng(seed).permutation(slots)[: case.end].tolist()
    rows = data.draw(st.sampled_from([in_pages, scattered]))
    source_pool = random_pool(case.source, seed)
    expected = random_pool(case.destination, seed + 1)
    actual = expected.copy()
    copy_tokens(case, source_pool, expected, rows)
    pages = of_range(case).source_pages
    runs = expand_token_runs(case.source, case.destination, pages, rows[case.start :], case.start, case.end)
    apply(runs, source_pool, actual)
    assert_maximal(runs)
    assert (actual == expected).all()


def test_adjacent_equal_pages_are_one_copy() -> None:
    kv = layout()
    runs = expand_runs(kv, kv, range(4, 12), range(20, 28), 0, 8 * 16)
    assert runs.source.tolist() == [4 * kv.page_bytes]
    assert runs.destination.tolist() == [20 * kv.page_bytes]
    assert runs.length.tolist() == [8 * kv.page_bytes]


def test_scattered_equal_pages_are_one_copy_each_and_the_last_is_whole() -> None:
    kv = layout()
    runs = expand_runs(kv, kv, [3, 9, 5], [7, 1, 30], 0, 2 * 16 + 1)
    assert runs.source.tolist() == [3 * kv.page_bytes, 5 * kv.page_bytes, 9 * kv.page_bytes]
    assert runs.destination.tolist() == [7 * kv.page_bytes, 30 * kv.page_bytes, 1 * kv.page_bytes]
    assert (runs.length == kv.page_bytes).all()


def test_page_lists_of_a_later_chunk_start_at_its_first_page() -> None:
    kv = layout()
    runs = expand_runs(kv, kv, [9, 5], [1, 30], 16, 40)
    assert runs.source.tolist() == [5 * kv.page_bytes, 9 * kv.page_bytes]
    assert runs.destination.tolist() == [30 * kv.page_bytes, 1 * kv.page_bytes]
    assert runs.length.tolist() == [kv.page_bytes] * 2


def test_a_layer_slice_is_one_copy_per_page() -> None:
    source, destination = layout(layers=(0, 4)), layout(layers=(2, 6))
    runs = expand_runs(source, destination, [0, 1], [4, 9], 0, 32)
    assert runs.source.tolist() == [2 * source.layer_bytes, source.page_bytes + 2 * source.layer_bytes]
    assert runs.destination.tolist() == [4 * destination.page_bytes, 9 * destination.page_bytes]
    assert runs.length.tolist() == [2 * source.layer_bytes] * 2


def test_a_head_slice_is_one_copy_per_layer_and_plane() -> None:
    source, destination = layout(heads=(0, 8)), layout(heads=(4, 8))
    runs = expand_runs(source, destination, [0, 1, 2], [4, 5, 6], 0, 48)
    assert len(runs) == 3 * 4 * 2
    assert set(runs.length.tolist()) == {4 * 16 * 8}


@settings(max_examples=100, deadline=None)
@given(case=cases(), seed=st.integers(0, 1000), layers=intervals(3), heads=intervals(3))
def test_region_restricts_layers_and_heads(
    case: Case, seed: int, layers: tuple[int, int], heads: tuple[int, int]
) -> None:
    region = CopyRegion(0, 0, range(*layers), range(*heads))
    source_pool = random_pool(case.source, seed)
    expected = random_pool(case.destination, seed + 1)
    actual = expected.copy()
    copy_tokens(case, source_pool, expected, region=region)
    runs = expand_runs(*of_range(case), region)
    apply(runs, source_pool, actual)
    assert_maximal(runs)
    allowed = tail_rows(case) if case.source.page_size == case.destination.page_size else set()
    assert differing_rows(case.destination, actual, expected) <= allowed


def test_some_heads_of_equal_layouts_are_one_copy_per_layer_and_plane() -> None:
    kv = layout(heads=(0, 4))
    runs = expand_runs(kv, kv, [0, 1], [4, 5], 0, 32, CopyRegion(0, 0, range(1, 3), range(2, 4)))
    assert len(runs) == 2 * 2 * 2
    assert set(runs.length.tolist()) == {2 * 16 * 8}
    assert runs.source[0] == kv.layer_bytes + 2 * 16 * 8
    assert runs.destination[0] == 4 * kv.page_bytes + kv.layer_bytes + 2 * 16 * 8


def test_rows_that_are_whole_pages_are_copied_as_pages() -> None:
    kv = layout()
    rows = list(range(5 * 16, 8 * 16))
    runs = expand_token_runs(kv, kv, [2, 3, 4], rows, 0, 48)
    assert runs.length.tolist() == [3 * kv.page_bytes]


def test_disjoint_layers_and_empty_ranges_copy_nothing() -> None:
    assert len(expand_runs(layout(layers=(0, 2)), layout(layers=(2, 4)), [0], [0], 0, 16)) == 0
    assert len(expand_runs(layout(heads=(0, 2)), layout(heads=(2, 4)), [0], [0], 0, 5)) == 0
    assert len(expand_runs(layout(), layout(), [], [], 7, 7)) == 0
    assert len(expand_token_runs(layout(), layout(), [0], [], 0, 0)) == 0


def test_a_long_chunk_plans_in_under_two_milliseconds() -> None:
    kv = layout(planes=(256, 256), layers=(0, 32), heads=(0, 8), num_pages=1024)
    pages = np.random.default_rng(0).permutation(1024)[:512].tolist()
    best_s = min(_timed(lambda: expand_runs(kv, kv, pages, pages[::-1], 0, 8192)) for _ in range(20))
    assert best_s < 0.002


def test_split_keeps_every_byte_and_its_order() -> None:
    runs = CopyRuns(np.array([100, 0, 40]), np.array([7, 500, 90]), np.array([25, 10, 31]))
    pieces = runs.split(10)
    assert pieces.length.max() == 10
    assert pieces.source.tolist() == [100, 110, 120, 0, 40, 50, 60, 70]
    assert pieces.destination.tolist() == [7, 17, 27, 500, 90, 100, 110, 120]
    assert pieces.length.tolist() == [10, 10, 5, 10, 10, 10, 10, 1]
    assert runs.split(31) is runs


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (
            CopyRuns(np.array([0, 95]), np.array([0, 0]), np.array([5, 6])),
            "source pool: offset 95 with 6 bytes.* 100 b",
        ),
        (CopyRuns(np.array([0]), np.array([-1]), np.array([5])), "destination pool: offset -1"),
        (CopyRuns(np.array([0]), np.array([196]), np.array([5])), "destination pool: offset 196 .* 200 bytes"),
        (CopyRuns(np.array([0]), np.array([2**63 - 2]), np.array([5])), "destination pool"),
        (CopyRuns(np.array([3]), np.array([0]), np.array([-1])), "negative length"),
    ],
)
def test_copies_outside_a_pool_are_refused(runs: CopyRuns, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_bounds(runs, 100, 200)


def test_copies_up_to_the_last_byte_are_allowed() -> None:
    check_bounds(CopyRuns(np.array([95]), np.array([195]), np.array([5])), 100, 200)


def test_short_lists_and_other_planes_are_refused() -> None:
    kv = layout()
    with pytest.raises(PlanError, match=r"destination_pages has shape \(1,\), these tokens need 2 entries"):
        expand_runs(kv, kv, [0, 1], [0], 0, 17)
    with pytest.raises(PlanError, match=r"source_pages has shape \(1,\), these tokens need 2 entries"):
        expand_runs(kv, kv, [0], [0, 1], 31, 33)
    with pytest.raises(PlanError, match="destination_tokens"):
        expand_token_runs(kv, kv, [0, 1], [0] * 16, 0, 17)
    with pytest.raises(PlanError, match="planes differ"):
        expand_runs(kv, layout(planes=(8, 4)), [0], [0], 0, 1)
    with pytest.raises(PlanError, match=r"\[5, 4\)"):
        expand_runs(kv, kv, [0], [0], 5, 4)


def _timed(call: object) -> float:
    assert callable(call)
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
