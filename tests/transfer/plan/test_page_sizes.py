"""The warning about different page sizes: when it is logged, and its numbers of writes."""

import msgspec
import pytest

from pdserve.transfer.plan.page_sizes import describe_page_sizes
from pdserve.transfer.protocol.layout import KvLayout
from pdserve.transfer.protocol.messages import Hello, Rank, StageRing, Welcome
from tests.transfer.plan.test_pairing import INDEXER, LATENT, LAYOUT, part, rank, sides


def pair(page_size: int, *layouts: KvLayout) -> tuple[Hello, Welcome]:
    """Prefill has these layouts, decode the same with another page size."""
    decode = [msgspec.structs.replace(layout, page_size=page_size) for layout in layouts]
    return sides((rank(0, *layouts, session=None),), (rank(0, *decode),))


def test_equal_page_sizes_give_no_warning() -> None:
    assert describe_page_sizes(*pair(16, LAYOUT), 512) is None


@pytest.mark.parametrize(("page_size", "stretch"), [(64, 16), (8, 8)])
def test_different_page_sizes_take_a_write_per_head_and_page(page_size: int, stretch: int) -> None:
    writes = 512 // stretch * 8 * 2 * 4  # of layers, planes and heads
    assert describe_page_sizes(*pair(page_size, LAYOUT), 512) == (
        f"page sizes differ: 16 on prefill, {page_size} on decode. A chunk of 512 tokens takes {writes} writes instead "
        "of at most 32: give both servers the same --page-size, or dense models --staging on"
    )


def test_writes_of_all_ranks_and_pools_are_counted() -> None:
    """Two latent planes, one head each; every decode rank holds all of them."""
    latent = KvLayout((LATENT,), 0, 8, 0, 1, 64, 100, "uint8")
    indexer = msgspec.structs.replace(latent, planes=(INDEXER,))
    decode = [msgspec.structs.replace(layout, page_size=32) for layout in (latent, indexer)]
    hello, welcome = sides((rank(0, latent, indexer, session=None),), (rank(0, *decode), rank(1, *decode)))
    reason = describe_page_sizes(hello, welcome, 256)
    assert reason is not None
    assert f"takes {256 // 32 * 8 * 2 * 2} writes instead of at most {4 * 2 * 2}" in reason


def test_staged_regions_are_not_counted() -> None:
    """Decode has half of the heads, so they are staged, which gathers pages of any size."""
    ring = StageRing(0, 1 << 24, 1)
    halves = [msgspec.structs.replace(part((0, 8), heads), page_size=64) for heads in ((0, 2), (2, 4))]
    ranks: list[Rank] = [
        msgspec.structs.replace(rank(number, half), ring=ring, staging="auto") for number, half in enumerate(halves)
    ]
    prefill = msgspec.structs.replace(rank(0, LAYOUT, session=None), staging="auto")
    assert describe_page_sizes(*sides((prefill,), tuple(ranks)), 512) is None
    direct = msgspec.structs.replace(prefill, staging="off")
    assert describe_page_sizes(*sides((direct,), tuple(ranks)), 512) is not None
