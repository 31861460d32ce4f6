"""Free KV pages lent to hot buffers: what is lent, when it is reclaimed, and that requests wait for it no longer than
for the steps in flight.
"""

from collections.abc import Callable
from functools import partial

import pytest

from pdserve.memory.hisparse.shared_pool import PoolOverlay
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.memory.prefix_cache import PrefixCache
from pdserve.scheduler.decode.memory import hisparse_memory
from pdserve.scheduler.decode.memory.hisparse_memory import HisparseMemory
from pdserve.scheduler.decode.memory.holds import Holds
from pdserve.scheduler.decode.memory.hot_buffers import HotBuffers, HotLimits
from pdserve.scheduler.messages.effects import Outbox
from pdserve.scheduler.messages.ranks import ResizeHot
from tests.scheduler.simulation.simulator import PAGE_SIZE, Simulator
from tests.scheduler.simulation.timed_simulator import decode_limits

KV_PAGES, OWN_PAGES, SLOTS = 40, 9, 3
OVERLAY = PoolOverlay.of(KV_PAGES, kv_page_bytes=2, hot_page_bytes=3)
"""A unit is three KV pages or two hot pages; hot buffers have three pages."""


class Pools:
    """A pool of KV pages and the hot buffers that borrow from it."""

    def __init__(self, own_pages: int = OWN_PAGES) -> None:
        self.allocator = PageAllocator[KvPage](KV_PAGES)
        self.holds = Holds(self.allocator)
        limits = HotLimits(own_pages, PAGE_SIZE, hot_rows=8, slots=SLOTS, overlay=OVERLAY)
        self.hot = HotBuffers(limits, self.allocator, self.holds)
        self.lending = self.hot.lending

    def check(self) -> None:
        self.allocator.check_integrity()
        self.hot.check_integrity(idle=False)


def test_first_pages_are_owned_and_further_pages_are_borrowed() -> None:
    """The first pages of all slots are all nine pages, so further pages are borrowed while KV pages are free."""
    pools = Pools()
    buffer, _ = pools.hot.open("a", 36)
    assert not buffer.evicting
    assert buffer.pages[:3] == [OVERLAY.covered, OVERLAY.covered + 1, OVERLAY.covered + 2]
    assert all(page < OVERLAY.count * OVERLAY.hot_pages for page in buffer.pages[3:])
    assert len(buffer.pages) == 9
    assert pools.hot.allocator.available == 6
    assert pools.allocator.lent == buffer.borrowed == 9
    assert pools.hot.gauges()["hot_pages_borrowed"] == 6
    assert pools.allocator.held == 0
    assert pools.allocator.available == KV_PAGES - 9
    pools.check()


def test_unit_is_used_up_before_another_is_borrowed() -> None:
    pools = Pools()
    buffer, _ = pools.hot.open("a", 13)  # one page beyond the first three
    assert (len(buffer.pages), len(buffer.spare), pools.allocator.lent) == (4, 1, 3)
    assert pools.hot.grow("a", 17) is buffer
    assert (len(buffer.pages), buffer.spare, pools.allocator.lent, buffer.capacity) == (5, [], 3, 20)
    assert pools.hot.grow("a", 21) is buffer
    assert (len(buffer.pages), len(buffer.spare), pools.allocator.lent) == (6, 1, 6)
    pools.check()


def test_unneeded_hot_pages_are_used_before_loans_and_needed_ones_after() -> None:
    pools = Pools(own_pages=11)
    buffer, _ = pools.hot.open("a", 20)
    assert (len(buffer.grant.pages), buffer.borrowed) == (5, 0)  # the slots need 9 of 11
    assert pools.hot.grow("a", 21) is buffer
    assert (len(buffer.grant.pages), buffer.borrowed) == (5, 3)
    taken = pools.allocator.grant("prompts", pools.allocator.available)
    assert taken is not None
    other, shrunk = pools.hot.open("b", 20)
    assert not shrunk
    assert (len(other.grant.pages), other.borrowed) == (5, 0)  # two of the three pages that the last slot would need
    pools.check()


def test_reserved_cached_and_margin_pages_are_not_lent() -> None:
    pools = Pools()
    overlay = OVERLAY.count
    pools.lending.margin = 1
    assert pools.lending.room == overlay * OVERLAY.hot_pages - 2  # one page is in no unit, another blocks its unit
    grant = pools.allocator.grant("a", 2, reserve=4)
    assert grant is not None
    assert pools.lending.room == (KV_PAGES - 2 - 4 - 2) // 3 * 2
    for page in grant.pages:
        pools.allocator.keep(page)
    pools.allocator.release(grant)
    assert len(pools.allocator._idle) == 2
    assert pools.lending.room == (KV_PAGES - 2 - 2) // 3 * 2
    pools.lending.allowed = False
    assert pools.lending.room == 0


def test_returned_pages_are_free_after_the_commands_that_access_them() -> None:
    pools = Pools()
    pools.hot.open("a", 36)
    assert pools.hot.largest_borrower() is None, "its rows are being copied"
    pools.hot.of("a").loading = False
    first = pools.holds.next_id()
    buffer = pools.hot.largest_borrower()
    assert buffer is not None
    pools.hot.shrink(buffer)
    assert (pools.allocator.lent, pools.lending.borrowed, pools.lending.returning) == (9, 0, 9)
    pools.holds.completed(first)
    assert (pools.allocator.lent, pools.allocator.available) == (0, KV_PAGES)
    assert pools.hot.largest_borrower() is None
    pools.hot.close("a")
    pools.hot.open("b", 36)
    buffer = pools.hot.of("b")
    pools.hot.allocator.hold(buffer.grant)  # as the copy of its rows does
    pools.hot.close("b")
    assert (pools.allocator.lent, pools.lending.borrowed) == (9, 9)
    pools.hot.copied(buffer)
    assert pools.allocator.lent == 0
    pools.allocator.check_integrity(idle=True)
    pools.hot.check_integrity(idle=True)


def turn(simulator: Simulator, *, ranks: bool = True) -> None:
    """A turn of all servers; the ranks run at most one step."""
    for which in range(2):
        simulator.deliver(which, up=False)
        simulator.prefill_turn(which)
        simulator.end_write(which, ok=True, late=False)
        simulator.deliver(which, up=True)
    simulator.decode_turn()
    simulator.check()
    steps = simulator.decode.counters["decode_steps"]
    while ranks and simulator.commands and simulator.decode.counters["decode_steps"] == steps:
        simulator.rank_turn(eos=False)
        simulator.check()
    while ranks and simulator.copies:
        simulator.copy_turn()
        simulator.check()
    simulator.pass_time(0.01)


def until(simulator: Simulator, seen: Callable[[], object], turns: int = 200) -> int:
    """Run until the condition holds; returns the number of turns."""
    for number in range(turns):
        if seen():
            return number
        turn(simulator)
    raise AssertionError(f"not within {turns} turns: {simulator.decode.state_counts()}")


def lending_simulator(stages: int = 1) -> Simulator:
    """Hot pages for three buffers and no more; 32 KV pages, which are 20 hot pages and two pages in no unit."""
    return Simulator(stages=stages, overlap=stages == 1, hot_pages=9, lends=True, prefix_cache=False)


def running(simulator: Simulator, count: int) -> Callable[[], bool]:
    return lambda: len(simulator.decode.rooms.batch.running) == count


@pytest.mark.parametrize("stages", [1, 2])
def test_all_requests_are_fully_resident_while_kv_pages_are_free(stages: int) -> None:
    simulator = lending_simulator(stages)
    for family in (0, 1):
        simulator.submit(20, family, 8, 1, None, 0)
    until(simulator, running(simulator, 2))
    assert simulator.decode.memory.hot is not None
    assert simulator.decode.memory.hot.fully_resident == 2
    until(simulator, lambda: not simulator.decode.requests)
    assert simulator.hot_seen["evicting step"] == 0
    assert simulator.hot_seen["lent"] > 0
    simulator.finish()


@pytest.mark.parametrize("stages", [1, 2])
def test_request_that_needs_lent_pages_starts_after_the_steps_in_flight(stages: int) -> None:
    """No request is retracted for it, and there is a step in every turn."""
    simulator = lending_simulator(stages)
    for family in (0, 1):
        simulator.submit(22, family, 13, 1, None, 0)
    until(simulator, running(simulator, 2))
    turn(simulator)
    pages = simulator.decode.allocator
    assert pages.available < 11 <= pages.available + pages.lent
    simulator.submit(22, 0, 5, 3, None, 0)  # three samples of six pages and one to grow, five of them shared
    before = simulator.decode.counters["decode_steps"]
    took = until(simulator, lambda: simulator.decode.state_counts()["prefilling"] == 3, turns=6)
    assert took <= 3
    assert simulator.decode.counters["decode_steps"] == before + took
    assert simulator.hot_seen["shrunk"] > 0
    until(simulator, lambda: not simulator.decode.requests)
    simulator.finish()
    assert simulator.decode.counters["retractions"] == 0


def test_request_that_needs_lent_pages_starts_at_once_when_nothing_is_in_flight() -> None:
    """Waiting requests are tried again when pages are reclaimed in the same turn: no event would follow."""
    simulator = Simulator(hot_pages=9, lends=True, prefix_cache=False)
    for family in (0, 1):
        simulator.submit(22, family, 13, 1, None, 0)
    until(simulator, running(simulator, 2))
    simulator.work_ranks()
    assert simulator.decode.allocator.available < 11
    simulator.submit(22, 0, 5, 3, None, 0)
    simulator.decode.advance(simulator.now)
    assert simulator.decode.state_counts()["prefilling"] == 3
    simulator.act()
    until(simulator, lambda: not simulator.decode.requests)
    simulator.finish()


@pytest.mark.parametrize("stages", [1, 2])
def test_request_that_returned_its_loan_becomes_fully_resident_when_others_end(stages: int) -> None:
    """Also with steps in flight: their rows are in host memory before the copy begins."""
    simulator = lending_simulator(stages)
    simulator.submit(22, 0, 30, 1, None, 0)
    until(simulator, running(simulator, 1))
    assert simulator.decode.memory.hot is not None
    (rid,) = simulator.decode.requests
    hot = simulator.decode.memory.hot
    assert hot.of(rid).borrowed > 0
    simulator.submit(22, 1, 3, 3, None, 0)
    simulator.submit(22, 1, 3, 3, None, 0)
    until(simulator, lambda: hot.of(rid).evicting)
    until(simulator, lambda: not hot.of(rid).evicting)
    assert simulator.hot_seen["reopened"] > 0
    assert hot.of(rid).borrowed > 0
    until(simulator, running(simulator, 1))
    until(simulator, lambda: not simulator.decode.requests)
    assert simulator.decode.counters["retractions"] == 0
    simulator.finish()


@pytest.mark.parametrize("stages", [1, 2])
def test_growing_request_never_waits_for_lent_pages(stages: int) -> None:
    """At the end the two requests need all pages: what one has borrowed is back before the other needs it."""
    simulator = lending_simulator(stages)
    simulator.submit(20, 0, 61, 1, None, 0)
    simulator.submit(22, 1, 27, 1, None, 0)
    starved = 0
    until(simulator, running(simulator, 2))
    assert simulator.decode.allocator.lent > 0
    while simulator.decode.requests:
        turn(simulator)
        starved += simulator.decode.transitions.starving
    assert starved == 0
    assert simulator.hot_seen["shrunk"] > 0
    simulator.finish()
    assert simulator.decode.counters["retractions"] == 0


@pytest.mark.parametrize(("stages", "overlap"), [(1, False), (1, True), (2, False)])
def test_no_request_is_retracted_while_pages_are_lent(
    stages: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a request finds no free page: here the margin is 0."""
    monkeypatch.setattr(hisparse_memory, "MARGIN_PAGES", 0)
    simulator = Simulator(stages=stages, overlap=overlap, hot_pages=9, lends=True, prefix_cache=False)
    simulator.submit(20, 0, 61, 1, None, 0)
    simulator.submit(22, 1, 27, 1, None, 0)
    until(simulator, running(simulator, 2))
    assert simulator.decode.allocator.lent > 0
    until(simulator, lambda: not simulator.decode.requests, turns=400)
    simulator.finish()
    assert simulator.decode.counters["retractions"] == 0


def test_nothing_is_lent_while_a_request_waits_for_pages() -> None:
    outbox = Outbox()
    pages = PageAllocator[KvPage](KV_PAGES)
    limits = HotLimits(OWN_PAGES, PAGE_SIZE, hot_rows=8, slots=SLOTS, overlay=OVERLAY)
    cache = PrefixCache(pages, PAGE_SIZE)
    memory = HisparseMemory(decode_limits(page_size=PAGE_SIZE), pages, cache, None, outbox, limits)
    assert pages.grant("running", 10) is not None
    assert pages.grant("waiting", KV_PAGES) is None
    assert not memory.reclaim_lent([])  # nothing is lent
    evicting, _ = memory.hot.open("a", 48)
    assert evicting.evicting
    assert not memory.reclaim_lent([])  # no request has failed to get pages since the last call
    resident, _ = memory.hot.open("b", 48)
    assert not resident.evicting
    resident.loading = False
    assert pages.grant("another", 25) is None
    assert memory.reclaim_lent([])
    assert outbox == [ResizeHot(resident.slot, tuple(resident.pages), 8)]
    assert pages.grant("another", 25) is not None


@pytest.mark.parametrize("wanted", [False, True])
def test_request_that_ends_before_its_first_step_returns_its_loan(wanted: bool) -> None:
    """Its rows are being copied: its memory is released when the copy has ended."""
    simulator = lending_simulator()
    simulator.submit(22, 0, 13, 1, None, 0)
    while not simulator.decode.memory.copies.in_flight:
        simulator.decode_turn()
        for move in (partial(simulator.deliver, up=False), simulator.prefill_turn, partial(simulator.deliver, up=True)):
            for which in range(2):
                move(which)
                simulator.end_write(which, ok=True, late=False)
    assert simulator.decode.allocator.lent > 0
    assert simulator.decode.memory.holds.issued == simulator.decode.memory.holds._completed
    simulator.cancel(0, stopped=False)
    simulator.check()
    assert simulator.decode.allocator.lent > 0, "the ranks are not done"
    assert not simulator.decode.idle
    if wanted:  # eleven pages each, of 32
        simulator.submit(22, 1, 5, 3, None, 0)
        simulator.submit(22, 1, 5, 3, None, 0)
    simulator.decode_turn()
    assert simulator.decode.state_counts()["queued"] == (3 if wanted else 0)
    while simulator.commands or simulator.copies:
        simulator.rank_turn(eos=False)
        simulator.check()
        simulator.copy_turn()
        simulator.check()
    assert simulator.decode.allocator.lent == 0
    if wanted:
        simulator.decode_turn()
        assert simulator.decode.state_counts()["queued"] == 0
        until(simulator, lambda: not simulator.decode.requests)
    assert simulator.decode.idle
    simulator.finish()


def test_request_becomes_fully_resident_again_when_the_prefix_cache_fills_the_pool() -> None:
    """No page can be lent. The pages of the hot pool are enough, and no waiting request needs them."""
    simulator = Simulator(hot_pages=9, lends=True)
    for first in range(8):
        simulator.ask_for((first, *range(60, 69)), new=7)
        until(simulator, lambda: not simulator.decode.requests)
    assert len(simulator.decode.allocator._idle) >= 28
    simulator.submit(10, 0, 24, 1, None, 0)
    until(simulator, running(simulator, 1))
    (request,) = simulator.decode.requests.values()
    hot = simulator.decode.memory.hot
    assert hot is not None
    others = [simulator.ask_for((90 + number,), new=3) for number in range(2)]
    until(simulator, lambda: not any(rid in simulator.decode.requests for rid in others))
    assert hot.of(request.rid).evicting, "it gave up pages for them"
    assert (hot.allocator.available, simulator.decode.allocator.lendable(0)) == (6, 0)
    until(simulator, lambda: not hot.of(request.rid).evicting, turns=20)
    simulator.finish()
