"""PoolOverlay: units of two overlapping pools."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.memory.hisparse.shared_pool import MAX_UNIT_PAGES, MIN_UNIT_USE, PoolOverlay
from pdserve.memory.index_spaces import HotPage, KvPage


@pytest.mark.parametrize(
    ("keys", "rows", "unit"),
    [
        (64 * 256, 64 * 1152, (9, 2)),  # DeepSeek-V3.2 in bfloat16
        (64 * 256, 64 * 656, (41, 16)),  # the same with packed rows
        (64 * 256 * 21, 64 * 1152 * 78, (117, 7)),  # GLM-5: 21 of 78 layers have an indexer
        (128, 256, (2, 1)),
        (256, 128, (1, 2)),
        (7, 7, (1, 1)),
    ],
)
@pytest.mark.parametrize("num_pages", [1, 40, 41, 123])
@pytest.mark.parametrize("layers", [1, 3])
def test_unit_is_whole_pages_of_both_pools(
    keys: int, rows: int, unit: tuple[int, int], num_pages: int, layers: int
) -> None:
    """The unit does not depend on the number of layers of a rank."""
    overlay = PoolOverlay.of(num_pages, kv_page_bytes=keys * layers, hot_page_bytes=rows * layers)
    assert (overlay.kv_pages, overlay.hot_pages) == unit
    assert overlay.kv_pages * keys == overlay.hot_pages * rows
    assert overlay.count * overlay.kv_pages <= num_pages < (overlay.count + 1) * overlay.kv_pages
    assert (overlay.covered - 1) * rows < num_pages * keys <= overlay.covered * rows
    for number in range(overlay.count):
        pages = [KvPage(page) for page in range(number * overlay.kv_pages, (number + 1) * overlay.kv_pages)]
        hot_pages = overlay.hot_pages_under(pages)
        assert hot_pages[0] * rows == pages[0] * keys
        assert (hot_pages[-1] + 1) * rows == (pages[-1] + 1) * keys
        assert hot_pages == list(range(hot_pages[0], hot_pages[-1] + 1))
        assert hot_pages[-1] < overlay.covered
    assert PoolOverlay.agreed([overlay, overlay]) == overlay
    everything = [HotPage(page) for page in range(overlay.covered + 9)]
    assert [int(page) for page in overlay.local_pages(everything, overlay)] == everything


@pytest.mark.parametrize(
    ("ranks", "unit"),
    [
        # GLM-5 in two stages: 11 of 38 layers, then 10 of 40 have an indexer
        ([(11 * 256, 38 * 1152), (10 * 256, 40 * 1152)], (126, 7)),
        ([(11 * 256, 38 * 656), (10 * 256, 40 * 656)], (82, 8)),
        (
            [(21 * 256, 78 * 656)],
            (86, 8),
        ),  # packed, in one stage: a unit of whole pages would be 533 pages, or 56 hot pages
        ([(1, 6), (1, 2)], (6, 1)),
        ([(256, 128), (256, 64)], (1, 2)),
    ],
)
def test_different_ranks_agree_on_short_units(ranks: list[tuple[int, int]], unit: tuple[int, int]) -> None:
    agreed = PoolOverlay.agreed([PoolOverlay.of(1000, kv_page_bytes=keys, hot_page_bytes=rows) for keys, rows in ranks])
    assert (agreed.kv_pages, agreed.hot_pages) == unit


@given(
    ranks=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 200)), min_size=1, max_size=4),
    num_pages=st.integers(1, 3000),
    own=st.integers(1, 20),
)
def test_unit_lies_within_its_pages_of_keys_on_every_rank(
    ranks: list[tuple[int, int]], num_pages: int, own: int
) -> None:
    """Hot pages do not overlap each other, those of a unit overlap only its own keys, and own hot pages no keys."""
    of_ranks = [PoolOverlay.of(num_pages, kv_page_bytes=keys, hot_page_bytes=rows) for keys, rows in ranks]
    agreed = PoolOverlay.agreed(of_ranks)
    largest_ratio = max(Fraction(rows, keys) for keys, rows in ranks)
    assert agreed.hot_pages * largest_ratio >= agreed.kv_pages * MIN_UNIT_USE
    assert agreed.kv_pages <= max(Fraction(MAX_UNIT_PAGES), 16 * largest_ratio + 1)
    assert agreed.count * agreed.hot_pages <= agreed.covered
    for (keys, rows), overlay in zip(ranks, of_ranks, strict=True):
        for number in range(agreed.count):
            pages = [KvPage(page) for page in range(number * agreed.kv_pages, (number + 1) * agreed.kv_pages)]
            places = overlay.local_pages(agreed.hot_pages_under(pages), agreed)
            assert list(places) == list(range(places[0], places[0] + agreed.hot_pages))
            assert pages[0] * keys <= places[0] * rows
            assert (places[-1] + 1) * rows <= (pages[-1] + 1) * keys
        behind = [HotPage(agreed.covered + page) for page in range(own)]
        assert list(overlay.local_pages(behind, agreed)) == list(range(overlay.covered, overlay.covered + own))
        assert num_pages * keys <= overlay.covered * rows


def test_partial_units_are_refused() -> None:
    overlay = PoolOverlay.of(30, kv_page_bytes=2, hot_page_bytes=3)
    with pytest.raises(AssertionError, match="4 pages are not whole units of 3"):
        overlay.hot_pages_under([KvPage(page) for page in (0, 1, 2, 3)])
    with pytest.raises(AssertionError, match="3 pages are not whole units of 3"):
        overlay.hot_pages_under([KvPage(page) for page in (1, 2, 4)])
