"""What decode knows about the caches of prefill servers: after reports, it finds the same prefixes as the cache."""

import random

import pytest

from pdserve.common.sampling import SamplingParams
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.page_hashes import pack_short_hashes, page_hashes, short_hash
from pdserve.memory.pages import PageAllocator
from pdserve.memory.prefix_cache import PrefixCache
from pdserve.scheduler.decode.placement.peer_cache import SENT_S, PeerCache
from pdserve.scheduler.decode.placement.peers import PrefillPeer
from pdserve.scheduler.decode.scheduler import DecodeScheduler
from pdserve.scheduler.messages.effects import Outbox, SendToPeer
from pdserve.scheduler.messages.frontend import Submit
from pdserve.scheduler.prefill import cache_reports
from pdserve.scheduler.prefill.cache_reports import INTERVAL_S, CacheReports
from pdserve.transfer.control.events import MessageReceived
from pdserve.transfer.protocol.messages import CachedPrefixes, InstanceId
from tests.scheduler.outboxes import take_all
from tests.scheduler.simulation.timed_simulator import decode_limits

PAGE = 4
D1, D2 = InstanceId("d1"), InstanceId("d2")


def hashes_of(tokens: tuple[int, ...]) -> list[int]:
    return [short_hash(page) for page in page_hashes(tokens, PAGE)]


class Reporting:
    """A prefix cache and its reports, and what two decode servers know of it."""

    def __init__(self, pages: int = 40) -> None:
        self.allocator = PageAllocator[KvPage](pages)
        self.cache = PrefixCache(self.allocator, PAGE)
        self.outbox = Outbox()
        self.reports = CacheReports(self.cache, PAGE, pages, 0, self.outbox)
        self.known = {D1: PeerCache(), D2: PeerCache()}
        self.messages = 0
        self.now = 0.0

    def store(self, tokens: tuple[int, ...]) -> None:
        shared = self.cache.match(tokens, len(tokens))
        grant = self.allocator.grant("request", len(tokens) // PAGE - len(shared), shared=shared)
        assert grant is not None
        self.cache.insert(tokens, grant.pages)
        self.allocator.release(grant)

    def deliver(self) -> None:
        self.now += INTERVAL_S
        self.reports.due(self.now)
        for effect in take_all(self.outbox):
            assert isinstance(effect, SendToPeer)
            assert isinstance(effect.message, CachedPrefixes)
            self.messages += 1
            self.known[effect.instance].report(effect.message)


@pytest.mark.parametrize(("stride", "per_message"), [(1, 8192), (1, 3), (2, 8192), (3, 5)])
def test_reports_follow_the_cache(stride: int, per_message: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random sequences with shared prefixes, evictions and flushes; a second decode server pairs late."""
    monkeypatch.setattr(cache_reports, "HASHES_PER_MESSAGE", per_message)
    monkeypatch.setattr(cache_reports, "MOST_HASHES", -(-40 // stride))
    draw = random.Random(stride * per_message)
    reporting = Reporting()
    reporting.store((9,) * 8)
    reporting.reports.subscribe(D1)
    sequences: list[tuple[int, ...]] = [(9,) * 8]
    evicted = found = 0
    for turn in range(300):
        prefix = draw.choice(sequences)[: draw.randrange(40) // PAGE * PAGE]
        sequences.append(prefix + tuple(draw.randrange(3) for _ in range(draw.randrange(1, 10) * PAGE)))
        reporting.store(sequences[-1])
        if turn % 100 == 99:
            reporting.cache.flush()
        if turn == 150:
            reporting.reports.subscribe(D2)
        if draw.random() < 0.3:
            reporting.deliver()
            for known in [reporting.known[D1], *([reporting.known[D2]] if turn >= 150 else [])]:
                for tokens in sequences[-30:]:
                    cached = len(reporting.cache.match(tokens, len(tokens))) // stride * stride * PAGE
                    assert known.cached_tokens(hashes_of(tokens), len(tokens)) == cached
                    evicted += cached < len(tokens) // (stride * PAGE) * (stride * PAGE)
                    found += cached > 0
    assert evicted > 100
    assert found > 100


def test_nothing_is_hashed_before_a_subscription(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.memory.prefix_cache.page_hash", lambda *_: pytest.fail("hashed"))
    reporting = Reporting()
    reporting.store((1,) * 8)
    reporting.deliver()
    assert reporting.messages == 0


def test_unchanged_cache_is_not_reported() -> None:
    reporting = Reporting()
    reporting.reports.subscribe(D1)
    reporting.reports.subscribe(D1)
    for _ in range(3):
        reporting.deliver()
    assert reporting.messages == 1, "an empty cache is reported once"


def test_changes_are_collected_for_an_interval() -> None:
    reporting = Reporting()
    reporting.reports.subscribe(D1)
    reporting.store((1,) * 4)
    reporting.deliver()
    for number in range(2, 6):
        reporting.store((number,) * 4)
        reporting.reports.due(reporting.now + INTERVAL_S / 2)
    assert not reporting.outbox
    reporting.deliver()
    assert reporting.messages == 3
    assert reporting.known[D1].stored_tokens == 5 * 4


def test_unsubscribed_server_gets_no_reports() -> None:
    reporting = Reporting()
    reporting.reports.subscribe(D1)
    reporting.deliver()
    reporting.reports.unsubscribe(D1)
    reporting.store((1,) * 8)
    reporting.deliver()
    assert reporting.known[D1].stored_tokens == 0
    reporting.reports.subscribe(D1)
    reporting.deliver()
    assert reporting.known[D1].stored_tokens == 8


def test_prompt_that_was_sent_counts_as_cached_for_a_while() -> None:
    cache, tokens = PeerCache(), tuple(range(16))
    cache.report(CachedPrefixes(0, PAGE, 1))
    cache.sent(hashes_of(tokens), 0, now=0.0)
    assert cache.cached_tokens(hashes_of((*tokens[:8], *range(50, 58))), 16) == 8
    cache.sent(hashes_of((99,) * 8), 0, now=SENT_S)
    assert cache.cached_tokens(hashes_of(tokens), 16) == 0
    assert cache.cached_tokens(hashes_of((99,) * 8), 8) == 8


def test_last_token_is_never_cached() -> None:
    cache, tokens = PeerCache(), tuple(range(16))
    cache.report(CachedPrefixes(0, PAGE, 1))
    cache.sent(hashes_of(tokens), 0, now=0.0)
    assert cache.cached_tokens(hashes_of(tokens), len(tokens) - 1) == 12


def test_ranks_have_caches_of_their_own() -> None:
    cache, one, other = PeerCache(), Reporting(), Reporting()
    for rank, (reporting, tokens) in enumerate([(one, (1,) * 8), (other, (2,) * 12)]):
        reporting.reports = CacheReports(reporting.cache, PAGE, 40, rank, reporting.outbox)
        reporting.known[D1] = cache
        reporting.store(tokens)
        reporting.reports.subscribe(D1)
        reporting.deliver()
    assert [cache.cached_tokens(hashes_of((number,) * 12), 12) for number in (1, 2)] == [8, 12]
    one.cache.flush()
    one.deliver()
    assert [cache.cached_tokens(hashes_of((number,) * 12), 12) for number in (1, 2)] == [0, 12]


def test_adopted_prompt_is_looked_up_in_the_caches_that_its_new_scheduler_knows() -> None:
    """Data-parallel ranks get reports on connections of their own: equal versions may be of different content."""
    tokens = tuple(range(8 * PAGE + 1))
    packed = pack_short_hashes(page_hashes(tokens, PAGE))
    ranks: list[tuple[DecodeScheduler, PrefillPeer]] = []
    for known in (packed, b""):
        scheduler, peer = DecodeScheduler(decode_limits(), PageAllocator[KvPage](1000), []), PrefillPeer(D1, {"p:1"})
        scheduler.peer_up(peer)
        scheduler.handle(MessageReceived(peer.instance, CachedPrefixes(0, PAGE, 1, added=known, reset=True), ()), 0.0)
        ranks.append((scheduler, peer))
    (first, peer_of_first), (second, peer_of_second) = ranks
    first.handle(Submit("r", tokens, SamplingParams(), page_hashes={PAGE: packed}), 0.0)
    (prompt,) = first.rooms.queued
    assert peer_of_first.cached_tokens(prompt) == 8 * PAGE
    first.hand_over(prompt, second, 0.0)
    assert peer_of_second.cached_tokens(prompt) == 0
