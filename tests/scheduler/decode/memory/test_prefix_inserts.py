"""Pages of ended requests that are added to the prefix cache over several turns."""

import pytest

from pdserve.common.sampling import SamplingParams, TokenLogprob
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.decode.memory import prefix_inserts
from pdserve.scheduler.decode.placement.peers import PrefillPeer
from pdserve.scheduler.decode.requests.limits import DecodeLimits
from pdserve.scheduler.decode.scheduler import DecodeScheduler
from pdserve.scheduler.messages.effects import SendToFrontend, SendToPeer
from pdserve.scheduler.messages.frontend import Finished, Submit
from pdserve.scheduler.messages.step import StepResult
from pdserve.transfer.control.events import MessageReceived
from pdserve.transfer.protocol.messages import ChunkArrived, InstanceId, KvDestination, PrefillDone
from tests.scheduler.decode.test_scheduler_traces import MODES
from tests.scheduler.simulation.random_workloads import ACTIONS, run_workload

PEER = InstanceId("peer")
PAGE_SIZE = 4


@pytest.fixture(autouse=True)
def few_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_inserts, "PAGES_AT_ONCE", 3)
    monkeypatch.setattr(prefix_inserts, "PAGES_INSERTED", 2)


def server(pages: int, prefix_cache: bool = True) -> DecodeScheduler:
    limits = DecodeLimits(
        page_size=PAGE_SIZE,
        max_running_requests=4,
        max_queued_requests=8,
        growth_tokens=0,
        retract_pages=0,
        queue_timeout_s=60,
        prefill_wait_s=30,
        prefill_timeout_s=60,
        request_timeout_s=600,
        quarantine_s=6,
        prefix_cache=prefix_cache,
    )
    scheduler = DecodeScheduler(limits, PageAllocator[KvPage](pages), [])
    scheduler.peer_up(PrefillPeer(PEER, {"here:1"}))
    return scheduler


def run(scheduler: DecodeScheduler, rid: str, tokens: int, new_tokens: int, samples: int = 1) -> list[str]:
    """Submit a prompt and deliver its KV and first tokens. Returns the requests that have finished."""
    more = tuple(f"{rid}.{at}" for at in range(1, samples))
    prompt = tuple(range(tokens))
    scheduler.handle(Submit(rid, prompt, SamplingParams(max_new_tokens=new_tokens), more_rids=more), 0.0)
    scheduler.advance(0.0)
    effects = scheduler.take_effects()
    (key,) = (
        effect.message.key
        for effect in effects
        if isinstance(effect, SendToPeer) and isinstance(effect.message, KvDestination)
    )
    scheduler.handle(MessageReceived(PEER, ChunkArrived(key, 0, tokens, ()), ()), 0.0)
    firsts = (TokenLogprob(5, None),) * samples
    scheduler.handle(MessageReceived(PEER, PrefillDone(key, firsts, tokens, 1, 1, 8, 0, 0, 0), ()), 0.0)
    return finished(scheduler)


def finished(scheduler: DecodeScheduler) -> list[str]:
    sent = [effect.message for effect in scheduler.take_effects() if isinstance(effect, SendToFrontend)]
    return [message.rid for message in sent if isinstance(message, Finished)]


def idle_turns(scheduler: DecodeScheduler) -> int:
    """Turns until the scheduler is idle."""
    for turns in range(100):
        scheduler.check_integrity()
        if scheduler.idle:
            return turns
        scheduler.advance(0.0)
        assert scheduler.next_step(0.0) is None
    raise AssertionError("never idle")


def test_pages_of_a_short_sequence_are_added_at_its_end() -> None:
    scheduler = server(100)
    assert run(scheduler, "short", 12, 1) == ["short"]
    assert (scheduler.idle, len(scheduler.cache)) == (True, 3)


@pytest.mark.parametrize("samples", [1, 3])
def test_pages_of_a_long_sequence_are_added_over_several_turns(samples: int) -> None:
    scheduler = server(100)
    assert len(run(scheduler, "long", 40, 1, samples)) == samples
    assert (scheduler.idle, len(scheduler.cache)) == (False, 0)
    scheduler.advance(0.0)
    scheduler.next_step(0.0)
    assert len(scheduler.cache) == 3
    assert idle_turns(scheduler) >= 3
    assert len(scheduler.cache) == 10
    assert scheduler.memory.allocator.available == 100


def test_only_a_few_pages_are_added_beside_running_requests() -> None:
    scheduler = server(100)
    run(scheduler, "runs", 4, 10)
    scheduler.advance(0.0)
    assert scheduler.next_step(0.0) is not None
    before = len(scheduler.cache)
    assert run(scheduler, "long", 40, 1) == ["long"]
    assert scheduler.next_step(0.0) is None
    assert scheduler.next_step(0.0) is None
    assert len(scheduler.cache) - before <= 2 * prefix_inserts.PAGES_INSERTED


def test_running_request_takes_pages_that_are_held_to_be_added() -> None:
    scheduler = server(13)
    run(scheduler, "runs", 8, 10)
    scheduler.advance(0.0)
    assert run(scheduler, "long", 40, 1) == ["long"]
    assert scheduler.memory.allocator.available == 1
    for _ in range(6):
        step = scheduler.next_step(0.0)
        assert step is not None
        assert len(step.rows) == 1
        scheduler.step_done(step.command_id, [StepResult((TokenLogprob(7, None),), ())], 0.0)
        scheduler.advance(0.0)
    assert scheduler.counters["retractions"] == 0
    assert not scheduler.memory.inserts.of_ended
    scheduler.check_integrity()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_pages_are_free_and_not_added_after_the_cache_was_flushed(prefix_cache: bool) -> None:
    scheduler = server(100, prefix_cache)
    run(scheduler, "long", 40, 1)
    scheduler.advance(0.0)
    scheduler.next_step(0.0)
    assert bool(len(scheduler.cache)) == prefix_cache
    scheduler.flush_cache()
    idle_turns(scheduler)
    assert len(scheduler.cache) == 0
    assert scheduler.memory.allocator.available == 100


@pytest.mark.parametrize("samples", [1, 3])
def test_pages_of_a_long_answer_are_added_and_released(samples: int) -> None:
    """Its prompt is short, and the samples share only the pages of that."""
    scheduler = server(100)
    run(scheduler, "long", 8, 40, samples)
    while scheduler.requests:
        scheduler.advance(0.0)
        step = scheduler.next_step(0.0)
        assert step is not None
        results = [StepResult((TokenLogprob(10 + row.request.sample, None),), ()) for row in step.rows]
        scheduler.step_done(step.command_id, results, 0.0)
    assert not scheduler.idle
    assert idle_turns(scheduler) >= 3 * samples
    assert len(scheduler.cache) == 2 + 9 * samples
    assert scheduler.memory.allocator.available == 100


@pytest.mark.parametrize("seed", range(8))
def test_no_page_is_held_for_good_in_random_workloads(seed: int) -> None:
    """The usual ones never have so many pages that these are added over several turns."""
    run_workload(MODES[seed % len(MODES)].simulator(), ACTIONS, seed, 250)
