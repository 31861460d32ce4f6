"""Rows that prefill writes to hot buffers: the host copy is complete before a request gives up or shares memory."""

from collections.abc import Callable

import pytest

from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.decode.memory import prefix_inserts
from pdserve.scheduler.decode.memory.holds import Holds
from pdserve.scheduler.decode.memory.hot_buffers import HotBuffers, HotLimits
from pdserve.scheduler.decode.requests.request import Request
from pdserve.scheduler.messages.effects import SendToPeer
from pdserve.scheduler.messages.frontend import Cancel
from pdserve.scheduler.messages.lifecycle import State
from pdserve.scheduler.messages.ranks import OpenHot, WriteBackRows
from tests.scheduler.decode.memory.test_page_lending import Pools
from tests.scheduler.decode.test_hisparse_workloads import work
from tests.scheduler.simulation.simulator import NO_UNITS, PAGE_SIZE, Simulator

PROMPT = tuple(range(10, 20))


def receiving(**options: object) -> Simulator:
    """A server whose hot pool has room for some fully resident requests."""
    return Simulator(hot_pages=14, writes_both=True, **options)  # type: ignore[arg-type]  # each test passes its own


def run(simulator: Simulator, until: Callable[[], object], *, copies: bool = True) -> None:
    """Run all servers until this is true; without `copies`, the ranks make no background copies."""
    for _ in range(200):
        if until():
            return
        simulator.decode_turn()
        simulator.rank_turn(eos=False)
        if copies:
            simulator.copy_turn()
        for which in range(2):
            simulator.deliver(which, up=False)
            simulator.prefill_turn(which)
            simulator.end_write(which, ok=True, late=False)
            simulator.deliver(which, up=True)
        simulator.pass_time(0.01)
        simulator.check()
    raise AssertionError(f"not reached: {simulator.decode.state_counts()}")


def unsaved(simulator: Simulator, rid: str) -> bool:
    request = simulator.decode.requests.get(rid)
    return request is not None and simulator.decode.memory.unsaved(request)


def test_request_runs_before_its_rows_are_in_host_memory() -> None:
    simulator = receiving()
    rid = simulator.ask_for(PROMPT, 12)
    run(simulator, lambda: simulator.output[rid] >= 3, copies=False)
    assert unsaved(simulator, rid)
    assert simulator.decode.requests[rid].kv_path == "device"
    assert not [copy for copy in simulator.copies if isinstance(copy, OpenHot)], "nothing was copied to the hot buffer"
    assert simulator.host, "no row is in host memory yet"
    run(simulator, lambda: not unsaved(simulator, rid))
    assert not simulator.host
    simulator.finish()


def test_request_to_prefill_is_sent_before_the_ranks_open_the_hot_buffer() -> None:
    simulator = receiving()
    simulator.ask_for(PROMPT, 4)
    simulator.decode.advance(simulator.now)
    effects = simulator.decode.take_effects()
    assert [type(effect) for effect in effects if isinstance(effect, SendToPeer | OpenHot)] == [SendToPeer, OpenHot]
    for effect in effects:
        simulator._of_decode(effect)
    simulator.finish()


@pytest.mark.parametrize("ends", [False, True])
def test_rows_are_copied_once_after_the_ranks_have_the_next_step(ends: bool) -> None:
    """Also if the request ends before: its memory is free when the copy has ended."""
    simulator = receiving()
    rid = simulator.ask_for(PROMPT, 4)
    run(simulator, lambda: unsaved(simulator, rid))
    assert not simulator.copies
    if ends:
        simulator.decode.handle(Cancel(rid), simulator.now)
        simulator.act()
    else:
        step = simulator.decode.next_step(simulator.now)
        assert step is not None
        simulator.act()
        simulator.commands.append(step)
    assert not simulator.copies
    for _ in range(2):
        simulator.decode_turn()
        assert [type(copy) for copy in simulator.copies] == [WriteBackRows]
        assert not simulator.decode.idle
        assert simulator.decode.allocator.held > 0
        simulator.check()
    simulator.finish()


def test_prompt_is_shared_when_its_rows_are_in_host_memory() -> None:
    """The second request finds no prefix, and the third one finds it."""
    simulator = receiving()
    first = simulator.ask_for(PROMPT, 24)
    run(simulator, lambda: simulator.output[first] >= 3, copies=False)
    assert len(simulator.decode.cache) == 0
    run(simulator, lambda: not unsaved(simulator, first))
    run(simulator, lambda: len(simulator.decode.cache) == len(PROMPT) // PAGE_SIZE)
    simulator.ask_for(PROMPT, 4)
    run(simulator, lambda: simulator.decode.counters["prefix_tokens_reused"] == 8)
    simulator.finish()


def test_pages_of_a_request_that_ends_first_are_cached_after_the_copy() -> None:
    simulator = receiving()
    rid = simulator.ask_for(PROMPT, 3)
    run(simulator, lambda: simulator.terminal[rid], copies=False)
    assert len(simulator.decode.cache) == 0
    assert simulator.decode.allocator.held > 0
    run(simulator, lambda: not simulator.copies)
    assert len(simulator.decode.cache) == (len(PROMPT) + 2) // PAGE_SIZE
    simulator.finish()


def test_pages_of_a_long_request_that_ends_first_are_added_over_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_inserts, "PAGES_AT_ONCE", 1)
    simulator = receiving()
    rid = simulator.ask_for(PROMPT, 3)
    run(simulator, lambda: simulator.terminal[rid], copies=False)
    run(simulator, lambda: simulator.decode.memory.inserts.of_ended)
    assert len(simulator.decode.cache) < 3
    run(simulator, lambda: not simulator.decode.memory.inserts.of_ended)
    assert len(simulator.decode.cache) == 3
    simulator.finish()


def test_request_of_higher_priority_waits_for_the_copy_before_it_takes_the_hot_buffer() -> None:
    """Three slots, all of them unsaved. The fourth request parks one of them after its copy."""
    simulator = Simulator(hot_pages=14, writes_both=True, pages=24)
    low = [simulator.ask_for(tuple(range(start, start + 3)), 30) for start in (10, 30, 50)]
    run(simulator, lambda: all(unsaved(simulator, rid) for rid in low), copies=False)
    simulator.submit(3, 2, 4, 1, None, 1)
    (urgent,) = simulator.submitted - set(low)
    run(simulator, lambda: simulator.decode.requests[urgent].state is State.ARRIVED, copies=False)
    for _ in range(10):
        simulator.rank_turn(eos=False)
        simulator.decode_turn()
        simulator.check()
    assert simulator.decode.requests[urgent].state is State.ARRIVED
    assert simulator.decode.counters["retractions"] == 0
    run(simulator, lambda: simulator.terminal[urgent])
    assert simulator.decode.counters["retractions"] == 1
    simulator.finish()


def test_request_without_a_free_hot_page_waits_until_it_may_evict() -> None:
    """It has all pages of the hot pool: the next row has no place before the rows are in host memory."""
    simulator = Simulator(hot_pages=9, writes_both=True)
    rid = simulator.ask_for(tuple(range(10, 21)), 30)
    simulator.decode_turn()
    hot = simulator.decode.memory.hot
    assert hot is not None
    others = hot.allocator.grant("others", hot.allocator.available)
    assert others is not None
    produced = 2  # the first token, and that of the step which fills the last row
    run(simulator, lambda: simulator.output[rid] == produced, copies=False)
    for _ in range(10):
        simulator.decode_turn()
        simulator.rank_turn(eos=False)
        simulator.check()
    assert simulator.output[rid] == produced
    run(simulator, lambda: simulator.output[rid] > produced)
    assert hot.of(rid).evicting
    hot.allocator.release(others)
    simulator.finish()


def test_unsaved_buffer_returns_no_loans() -> None:
    hot = Pools().hot
    buffer, _ = hot.open("r", 36)
    buffer.loading, buffer.unsaved = False, True
    assert buffer.borrowed
    assert hot.largest_borrower() is None
    buffer.unsaved = False
    assert hot.largest_borrower() is buffer


def test_unsaved_and_receiving_buffers_are_not_shrunk() -> None:
    pages = PageAllocator[KvPage](4)
    limits = HotLimits(num_pages=12, page_size=4, hot_rows=8, slots=3, overlay=NO_UNITS)
    hot = HotBuffers(limits, pages, Holds(pages))
    buffer, _ = hot.open_for_prompt(1, 4 * 6)
    assert not hot.can_compute(4 * 7, shrink=True)
    hot.pass_on(1, "r")
    buffer.unsaved = True
    assert not hot.can_compute(4 * 7, shrink=True)
    with pytest.raises(AssertionError, match="not in host memory"):
        hot.shrink(buffer)
    buffer.unsaved = False
    assert hot.can_compute(4 * 7, shrink=True)
    buffer.unsaved = True
    with pytest.raises(AssertionError, match="not in host memory"):
        hot.close("r")


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "gives-up-pages"])
def test_prefill_gets_no_hot_page_that_a_step_in_flight_may_write(ends: bool) -> None:
    """A request ends, or becomes evicting, while its step is in flight. Until the step has ended, prompts take the path
    to host memory (`settled`, see test_kv_path.py).
    """
    pages = PageAllocator[KvPage](4)
    commands = Holds(pages)
    hot = HotBuffers(HotLimits(num_pages=6, page_size=4, hot_rows=8, slots=2, overlay=NO_UNITS), pages, commands)
    buffer, _ = hot.open("a", 4 * 5)
    buffer.loading = False
    step = commands.next_id()
    assert hot.settled
    free = hot.allocator.available
    if ends:
        hot.close("a")
    else:
        hot.shrink(buffer)
    assert hot.allocator.available > free
    assert not hot.settled
    commands.completed(step)
    assert hot.settled


def test_pages_of_a_transfer_that_was_given_up_stay_while_its_prefix_is_copied() -> None:
    simulator = receiving()
    first = simulator.ask_for(PROMPT, 2)
    run(simulator, lambda: simulator.terminal[first] and len(simulator.decode.cache) == 2)
    rid = simulator.ask_for(PROMPT, 8)
    run(simulator, lambda: any(isinstance(copy, OpenHot) for copy in simulator.copies), copies=False)
    hot = simulator.decode.memory.hot
    assert hot is not None
    held = hot.limits.num_pages - hot.allocator.available
    simulator.decode.handle(Cancel(rid), simulator.now)
    simulator.act()
    for _ in range(30):
        simulator.rank_turn(eos=False)
        simulator.decode_turn()
        for which in range(2):
            simulator.deliver(which, up=False)
            simulator.deliver(which, up=True)
        simulator.pass_time(1.0)
        simulator.check()
    assert hot.free_slots == hot.limits.slots
    assert hot.limits.num_pages - hot.allocator.available == held, "the copy writes to these pages"
    assert simulator.decode.gauges()["quarantined_hot_pages"] == 0, "the writer has stopped"
    simulator.copy_turn()
    simulator.decode_turn()
    assert hot.allocator.available == hot.limits.num_pages
    simulator.finish()


SITUATIONS: dict[str, Callable[[Simulator, Request], object]] = {
    "receiving": lambda _, request: (
        request.state in (State.PREFILLING, State.VERIFYING)
        and request.prompt.attempt is not None
        and request.prompt.attempt.hot_pages
    ),
    "waiting for its prefix": lambda _, request: request.state is State.LOADING,
    "unsaved": lambda simulator, request: simulator.decode.memory.unsaved(request),
    "unsaved in a step": lambda simulator, request: simulator.decode.memory.unsaved(request) and request.in_flight,
}


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_abort_releases_all_memory(situation: str, stopped: bool) -> None:
    simulator = Simulator(overlap=True, hot_pages=14, writes_both=True)
    simulator.submit(12, 0, 6, 1, None, 0)
    found: list[str] = []

    def abort(simulator: Simulator) -> bool:
        if not simulator.decode.requests:
            simulator.submit(14, 0, 6, 1, None, 0)
        requests = simulator.decode.requests.items()
        found.extend(rid for rid, request in requests if SITUATIONS[situation](simulator, request))
        for rid in found:
            simulator.decode.handle(Cancel(rid, stopped), simulator.now)
        simulator.act()
        return bool(found)

    assert work(simulator, abort), f"no request was ever {situation}"
    simulator.check()
    simulator.decode_turn()
    simulator.check()
    simulator.finish()
