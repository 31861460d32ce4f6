"""StagingRing against a map of its bytes: it grants only free bytes, and requests in order, as soon as they fit."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.transfer.plan.ring import ALIGNMENT, Position, Region, StagingRing


class ByteMap(RuleBasedStateMachine):
    """Owners are numbers in order of their requests; the map has an entry per aligned unit of the buffer."""

    @initialize(units=st.integers(1, 12))
    def start(self, units: int) -> None:
        self.ring: StagingRing[int] = StagingRing(units * ALIGNMENT)
        self.map: list[int | None] = [None] * units
        self.sizes: dict[int, int] = {}  # of the queued requests
        self.regions: dict[int, Region] = {}
        self.freed: list[Position] = []
        self.requests = 0
        self.end = 0

    @rule(data=st.data())
    def request(self, data: st.DataObject) -> None:
        size = data.draw(st.integers(1, self.ring.capacity_bytes))
        self.ring.request(self.requests, size)
        self.sizes[self.requests] = size
        self.requests += 1
        self.grant()

    @rule(wrong=st.sampled_from([-1, 0, None]))
    def request_of_impossible_size(self, wrong: int | None) -> None:
        before = self.ring.waiting
        with pytest.raises(ValueError, match="1 to"):
            self.ring.request(-1, self.ring.capacity_bytes + 1 if wrong is None else wrong)
        assert self.ring.waiting == before

    @precondition(lambda self: self.regions)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.regions)))
        region = self.regions.pop(owner)
        assert self.ring.free(region.position)
        self.map = [None if entry == owner else entry for entry in self.map]
        self.freed.append(region.position)
        self.grant()

    @precondition(lambda self: self.freed)
    @rule(data=st.data())
    def free_again(self, data: st.DataObject) -> None:
        """Freeing a region twice has no effect, also if its bytes belong to another owner by then."""
        before = self.ring.granted_bytes
        assert not self.ring.free(data.draw(st.sampled_from(self.freed)))
        assert not self.ring.free(Position(self.end + ALIGNMENT))
        assert self.ring.granted_bytes == before

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.sizes)))
        assert self.ring.withdraw(owner)
        assert not self.ring.withdraw(owner)
        del self.sizes[owner]
        self.grant()

    def grant(self) -> None:
        for owner, region in self.ring.grant():
            assert owner == min(self.sizes), "granted out of order"
            assert region.size_bytes - ALIGNMENT < self.sizes.pop(owner) <= region.size_bytes
            assert region.position >= self.end
            assert region.offset == region.position % self.ring.capacity_bytes
            self.end = region.position + region.size_bytes
            units = slice(region.offset // ALIGNMENT, (region.offset + region.size_bytes) // ALIGNMENT)
            assert units.stop <= len(self.map), "region crosses the end of the buffer"
            assert self.map[units] == [None] * (units.stop - units.start), "granted bytes that are in use"
            self.map[units] = [owner] * (units.stop - units.start)
            self.regions[owner] = region

    @invariant()
    def first_request_waits_only_while_it_does_not_fit(self) -> None:
        if not hasattr(self, "ring"):
            return
        self.ring.check_integrity()
        assert (self.ring.waiting, self.ring.granted_bytes == 0) == (len(self.sizes), not self.regions)
        if self.sizes:
            longest = run = 0
            for entry in self.map:
                run = run + 1 if entry is None else 0
                longest = max(longest, run)
            assert longest * ALIGNMENT < self.sizes[min(self.sizes)], "the first request fits and was not granted"

    def teardown(self) -> None:
        """Once all regions are freed and all requests granted, a request of the whole buffer is granted."""
        if not hasattr(self, "ring"):
            return
        while self.regions:
            self.regions, regions = {}, self.regions
            for region in regions.values():
                assert self.ring.free(region.position)
            self.map = [None] * len(self.map)
            self.grant()
        assert (self.ring.waiting, self.ring.granted_bytes) == (0, 0)
        self.ring.request(-1, self.ring.capacity_bytes)
        ((_, region),) = self.ring.grant()
        assert (region.offset, region.size_bytes) == (0, self.ring.capacity_bytes)


ByteMap.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestByteMap = ByteMap.TestCase


def grant(ring: StagingRing[str], owner: str, units: int) -> Region | None:
    ring.request(owner, units * ALIGNMENT)
    return next((region for name, region in ring.grant() if name == owner), None)


def test_an_idle_ring_grants_a_large_request_after_a_small_one() -> None:
    """4 of 32 units, freed, then 29: SGLang's ring deadlocked here in 2026-08 (its issue 37166)."""
    ring: StagingRing[str] = StagingRing(32 * ALIGNMENT)
    small = grant(ring, "small", 4)
    assert small is not None
    ring.free(small.position)
    large = grant(ring, "large", 29)
    assert large is not None
    assert large.position == 32 * ALIGNMENT


def test_region_that_is_held_for_long_blocks_only_its_own_bytes() -> None:
    ring: StagingRing[str] = StagingRing(8 * ALIGNMENT)
    assert grant(ring, "before", 3) is not None
    held = grant(ring, "held", 1)
    assert held is not None
    ring.free(Position(0))
    for turn in range(100):
        region = grant(ring, f"turn {turn}", 4)
        assert region is not None, "the ring is stuck behind the region that is held"
        ring.free(region.position)
    ring.free(held.position)
    assert (ring.waiting, ring.granted_bytes) == (0, 0)


def test_small_requests_do_not_overtake_a_large_one() -> None:
    ring: StagingRing[str] = StagingRing(8 * ALIGNMENT)
    first = grant(ring, "first", 2)
    assert first is not None
    assert grant(ring, "large", 8) is None
    assert grant(ring, "small", 1) is None
    ring.free(first.position)
    assert [(owner, region.size_bytes) for owner, region in ring.grant()] == [("large", 8 * ALIGNMENT)]


@pytest.mark.parametrize("capacity", [0, -ALIGNMENT, ALIGNMENT + 1])
def test_invalid_capacity_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="multiple of 256"):
        StagingRing(capacity)


def test_owner_cannot_be_queued_twice() -> None:
    ring: StagingRing[str] = StagingRing(ALIGNMENT)
    ring.request("a", 1)
    with pytest.raises(ValueError, match="already waiting"):
        ring.request("a", 1)
