"""Hot buffers: reservations, fully resident and evicting buffers, case by case and in random workloads."""

import dataclasses
import random

import pytest

from pdserve.memory.hisparse.shared_pool import PoolOverlay
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator, PageGrant
from pdserve.scheduler.decode.memory.holds import Holds
from pdserve.scheduler.decode.memory.hot_buffers import HotBuffer, HotBuffers, HotLimits
from tests.scheduler.simulation.simulator import NO_UNITS

PAGE = 4
LIMITS = HotLimits(num_pages=12, page_size=PAGE, hot_rows=8, slots=4, overlay=NO_UNITS)


def hot_buffers(limits: HotLimits) -> HotBuffers:
    """Buffers that can borrow nothing."""
    pages = PageAllocator[KvPage](1)
    return HotBuffers(limits, pages, Holds(pages))


def open_loaded(hot: HotBuffers, rid: str, tokens: int) -> HotBuffer:
    """Open a buffer for which no other has to shrink, and finish the copy of its rows."""
    buffer, shrunk = hot.open(rid, tokens)
    assert not shrunk
    buffer.loading = False
    return buffer


def test_short_sequence_reserves_all_first_pages_and_grows_into_them() -> None:
    hot = hot_buffers(LIMITS)
    buffer, shrunk = hot.open("a", 3)
    assert (len(buffer.pages), buffer.capacity, buffer.evicting, shrunk) == (1, 8, False, [])
    assert hot.allocator.available == 12 - LIMITS.buffer_pages
    assert hot.grow("a", 4) is None
    assert hot.grow("a", 5) is buffer
    assert (len(buffer.pages), buffer.capacity) == (2, 8)


def test_sequence_beyond_its_first_pages_stays_fully_resident_while_memory_is_free() -> None:
    hot = hot_buffers(LIMITS)
    buffer, _ = hot.open("a", 20)
    assert (len(buffer.pages), buffer.capacity, buffer.evicting) == (5, 20, False)
    assert hot.grow("a", 21) is buffer
    assert (len(buffer.pages), buffer.capacity) == (6, 24)


def test_largest_fully_resident_buffer_shrinks_for_a_new_buffer() -> None:
    hot = hot_buffers(LIMITS)
    large, small = open_loaded(hot, "large", 24), open_loaded(hot, "small", 16)
    assert hot.allocator.available == 2
    kept = large.pages[:3]
    newcomer, shrunk = hot.open("new", 30)
    assert shrunk == [large]
    assert (large.pages, large.capacity, large.evicting) == (kept, 8, True)
    assert (len(small.pages), small.evicting) == (4, False)
    assert (len(newcomer.pages), newcomer.capacity, newcomer.evicting) == (3, 8, True)
    assert hot.grow("large", 25) is None


def test_fully_resident_buffer_becomes_evicting_when_no_page_is_free() -> None:
    hot = hot_buffers(LIMITS)
    buffer = open_loaded(hot, "a", 48)
    assert hot.grow("a", 49) is buffer
    assert (len(buffer.pages), buffer.capacity, buffer.evicting) == (3, 8, True)
    assert hot.allocator.available == 9


def test_evicting_request_becomes_fully_resident_when_memory_is_free() -> None:
    """A step fetches 128 rows, so a copy of 300 costs as much as three steps."""
    hot = hot_buffers(dataclasses.replace(LIMITS, num_pages=82, slots=3))
    buffer = open_loaded(hot, "a", 300)
    assert not buffer.evicting
    hot.shrink(buffer)
    for tokens in (301, 302):
        assert hot.grow("a", tokens) is None
        assert not hot.worth_reopening("a", tokens + 1, hot.spare_pages(0)), "too early"
    hot.grow("a", 303)
    open_loaded(hot, "large", 24)
    assert not hot.worth_reopening("a", 304, hot.spare_pages(1)), "of 73 free pages three are another buffer's"
    assert hot.allocator.available == 73
    hot.close("large")
    assert hot.worth_reopening("a", 304, hot.spare_pages(2))
    hot.close("a")
    buffer = open_loaded(hot, "a", 304)
    assert (len(buffer.pages), buffer.capacity, buffer.evicting) == (76, 304, False)
    assert not hot.worth_reopening("a", 304, hot.spare_pages(0))
    for newcomer in ("b", "c"):
        assert hot.can_open()
        assert hot.open(newcomer, 3)[1] == [], "the first buffer would have to shrink again"
    hot.check_integrity(idle=False)


def test_no_buffer_can_open_without_a_slot_or_pages() -> None:
    hot = hot_buffers(dataclasses.replace(LIMITS, num_pages=7, slots=3))
    open_loaded(hot, "a", 3)
    open_loaded(hot, "b", 3)
    assert not hot.can_open()  # 6 of 7 pages are reserved
    hot.close("a")
    assert hot.can_open()
    hot.close("nobody")
    hot.check_integrity(idle=False)


@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_random_workloads_always_have_their_rows_and_release_everything(seed: int, lends: bool) -> None:
    """Slots or pages are too few for four requests. With lending, prompts use the same memory and reclaim it."""
    draw, limits = random.Random(seed), dataclasses.replace(LIMITS, num_pages=11 if seed % 2 else 12)
    pages = PageAllocator[KvPage](30)
    commands = Holds(pages)
    prompts: list[PageGrant[KvPage]] = []
    if lends:
        limits = dataclasses.replace(limits, overlay=PoolOverlay.of(30, kv_page_bytes=2, hot_page_bytes=3))
    hot = HotBuffers(limits, pages, commands)
    tokens: dict[str, int] = {}
    opening: str | None = None
    detached: HotBuffer | None = None
    for step in range(300):
        if draw.random() < 0.3:
            commands.completed(commands.next_id())
        if draw.random() < 0.2:
            wanted = draw.randint(1, 20)
            while pages.available < wanted and (buffer := hot.largest_borrower()) is not None:
                hot.shrink(buffer)
            prompt = pages.grant("prompt", wanted)
            prompts += [prompt] if prompt is not None else []
        if prompts and draw.random() < 0.2:
            pages.release(prompts.pop())
        if draw.random() < 0.5:
            commands.next_id()
        if draw.random() < 0.2 and opening is None and hot.can_open():
            tokens[f"r{step}"] = draw.randint(1, 40)
            hot.open(f"r{step}", tokens[f"r{step}"])
            opening = f"r{step}"
        if opening is not None and draw.random() < 0.5:
            hot.of(opening).loading = False
            opening = None
        if detached is not None and draw.random() < 0.5:
            hot.copied(detached)
            detached = None
        if tokens and detached is None and draw.random() < 0.15:
            gone = tokens.popitem()[0]
            if gone == opening:
                detached, opening = hot.of(gone), None
                hot.allocator.hold(detached.grant)
            hot.close(gone)
        for rid in tokens:
            if rid == opening:
                continue
            if draw.random() < 0.1 and opening is None:
                room = hot.spare_pages(draw.randint(0, 2))
                if hot.worth_reopening(rid, tokens[rid] + 1, room):
                    hot.close(rid)
                    buffer, shrunk = hot.open(rid, tokens[rid] + 1)
                    buffer.loading = False
                    assert not buffer.evicting, "pages were to spare"
                    assert shrunk == []
            tokens[rid] += 1
            hot.grow(rid, tokens[rid])
        for rid, length in tokens.items():
            buffer = hot.of(rid)
            needed = length if length <= buffer.capacity else LIMITS.hot_rows + 1
            assert len(buffer.pages) * PAGE >= needed
            assert buffer.capacity >= LIMITS.hot_rows
            assert buffer.evicting == (length > buffer.capacity)
        used = [page for rid in tokens for page in hot.of(rid).pages]
        assert len(used) == len(set(used))
        hot.check_integrity(idle=False)
        pages.check_integrity()
    if detached is not None:
        hot.copied(detached)
    for rid in tokens:
        hot.of(rid).loading = False
        hot.close(rid)
    hot.check_integrity(idle=True)
    commands.completed(commands.next_id())
    assert pages.available == 30 - sum(len(prompt.pages) for prompt in prompts)
