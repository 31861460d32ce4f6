"""Lots: where the pages of two pools that lie over each other begin and end together."""

import pytest

from pdserve.memory.index_spaces import KvPage
from pdserve.memory.lots import Lots


@pytest.mark.parametrize(
    ("keys", "rows", "lot"),
    [
        (64 * 256, 64 * 1152, (9, 2)),  # DeepSeek-V3.2 in bfloat16
        (64 * 256, 64 * 656, (41, 16)),  # its rows packed
        (128, 256, (2, 1)),
        (256, 128, (1, 2)),
        (7, 7, (1, 1)),
    ],
)
@pytest.mark.parametrize("num_pages", [1, 40, 41, 123])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_lot_is_whole_pages_of_both(keys: int, rows: int, lot: tuple[int, int], num_pages: int, layers: int) -> None:
    """On a rank with any number of layers the same."""
    lots = Lots.of(num_pages, kv_page_bytes=keys * layers, hot_page_bytes=rows * layers)
    assert (lots.kv_pages, lots.hot_pages) == lot
    assert lots.kv_pages * keys == lots.hot_pages * rows
    assert lots.count * lots.kv_pages <= num_pages < (lots.count + 1) * lots.kv_pages
    assert (lots.covered - 1) * rows < num_pages * keys <= lots.covered * rows
    for number in range(lots.count):
        pages = [KvPage(page) for page in range(number * lots.kv_pages, (number + 1) * lots.kv_pages)]
        hot_pages = lots.hot_pages_under(pages)
        assert hot_pages[0] * rows == pages[0] * keys
        assert (hot_pages[-1] + 1) * rows == (pages[-1] + 1) * keys
        assert hot_pages == list(range(hot_pages[0], hot_pages[-1] + 1))
        assert hot_pages[-1] < lots.covered


def test_parts_of_a_lot_are_refused() -> None:
    lots = Lots.of(30, kv_page_bytes=2, hot_page_bytes=3)
    with pytest.raises(AssertionError, match="4 pages are no lots of 3"):
        lots.hot_pages_under([KvPage(page) for page in (0, 1, 2, 3)])
    with pytest.raises(AssertionError, match="3 pages are no lots of 3"):
        lots.hot_pages_under([KvPage(page) for page in (1, 2, 4)])
