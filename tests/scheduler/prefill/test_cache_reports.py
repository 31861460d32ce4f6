"""Which decode servers get reports of the prefix cache."""

from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.messages.effects import SendToPeer
from pdserve.scheduler.prefill.limits import PrefillLimits
from pdserve.scheduler.prefill.request import PageSpace
from pdserve.scheduler.prefill.scheduler import PrefillScheduler
from pdserve.transfer.control.events import LoadReported, PeerLost
from pdserve.transfer.protocol.messages import CachedPrefixes, InstanceId, Load

OLD, NEW = InstanceId("an older decode server"), InstanceId("a decode server")


def scheduler(*, prefix_cache: bool = True) -> PrefillScheduler:
    limits = PrefillLimits(
        page_size=4, chunk_size=64, max_queued_requests=8, context_length=256, vocab_size=100, prefix_cache=prefix_cache
    )
    started = PrefillScheduler(limits, PageAllocator[KvPage](16), dp_rank=2)
    for instance in (OLD, NEW):
        started.peer_up(instance, PageSpace(16, 4))
    return started


def reports(prefill: PrefillScheduler, now: float) -> list[tuple[InstanceId, CachedPrefixes]]:
    prefill.advance(now)
    effects = [effect for effect in prefill.take_effects() if isinstance(effect, SendToPeer)]
    return [(effect.instance, effect.message) for effect in effects if isinstance(effect.message, CachedPrefixes)]


def store(prefill: PrefillScheduler, tokens: list[int]) -> None:
    grant = prefill.allocator.grant("request", len(tokens) // 4)
    assert grant is not None
    prefill.cache.insert(tokens, grant.pages)
    prefill.allocator.release(grant)


def test_only_servers_that_ask_get_reports() -> None:
    prefill = scheduler()
    prefill.handle(LoadReported(OLD, Load(5)), 0.0)
    prefill.handle(LoadReported(NEW, Load(5, cache_reports=True)), 0.0)
    assert reports(prefill, 0.0) == [(NEW, CachedPrefixes(2, 4, 1, reset=True))]
    prefill.handle(LoadReported(NEW, Load(6, cache_reports=True)), 0.0)
    store(prefill, [1] * 8)
    ((instance, report),) = reports(prefill, 1.0)
    assert (instance, len(report.added), report.removed, report.reset) == (NEW, 16, b"", False)
    prefill.handle(LoadReported(NEW, Load(6)), 0.0)
    store(prefill, [2] * 8)
    assert reports(prefill, 2.0) == [], "it has no other prefill server any more"


def test_server_that_pairs_again_gets_everything_again() -> None:
    prefill = scheduler()
    prefill.handle(LoadReported(NEW, Load(cache_reports=True)), 0.0)
    store(prefill, [1] * 8)
    prefill.handle(PeerLost(NEW, "silent"), 0.0)
    store(prefill, [2] * 8)
    reports(prefill, 1.0)
    prefill.handle(LoadReported(NEW, Load(cache_reports=True)), 0.0)
    assert reports(prefill, 2.0) == [], "it is not paired"
    prefill.peer_up(NEW, PageSpace(16, 4))
    prefill.handle(LoadReported(NEW, Load(cache_reports=True)), 0.0)
    ((_, report),) = reports(prefill, 3.0)
    assert (len(report.added), report.reset) == (32, True)


def test_server_without_a_prefix_cache_reports_nothing() -> None:
    prefill = scheduler(prefix_cache=False)
    prefill.handle(LoadReported(NEW, Load(cache_reports=True)), 0.0)
    assert reports(prefill, 1.0) == []
