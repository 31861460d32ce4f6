"""Requests whose KV is in host memory: aborted wherever they are, over in one token, and too many of them at once."""

from collections.abc import Callable
from functools import partial

import pytest

from pdserve.scheduler.decode.memory.background_copies import CopyKind
from pdserve.scheduler.decode.requests.request import Request
from pdserve.scheduler.messages.lifecycle import State
from tests.scheduler.simulation.simulator import PAGE_SIZE, PAGES, Simulator, is_parked


def busy_world(stages: int) -> Simulator:
    """Two hot buffers, and pages for about two requests when they are long; three want them from the start."""
    simulator = Simulator(stages=stages, overlap=stages == 1, hot_pages=7)
    for _ in range(3):
        simulator.submit(6, 0, 26, 1, None, 0)
        simulator.flush()  # nobody shares pages
    return simulator


def work(simulator: Simulator, seen: Callable[[Simulator], bool], urgent_at: int | None = None) -> bool:
    """Run a world until `seen` says so, looking after every move; whether it did. An urgent request may come."""
    for turn in range(400):
        if turn == urgent_at:
            simulator.submit(6, 1, 26, 1, None, 1)
            simulator.flush()
            if seen(simulator):
                return True
        moves: list[Callable[[], None]] = [
            partial(simulator.decode.advance, simulator.now),
            simulator.act,
            simulator.decode_turn,
        ]
        for which in range(2):
            moves += [
                partial(simulator.deliver, which, up=False),
                partial(simulator.prefill_turn, which),
                partial(simulator.end_write, which, ok=True, late=False),
                partial(simulator.deliver, which, up=True),
            ]
        moves += [partial(simulator.rank_turn, eos=False), simulator.copy_turn, partial(simulator.pass_time, 0.01)]
        for move in moves:
            move()
            simulator.check()
            if seen(simulator):
                return True
    return False


def being_written(simulator: Simulator, request: Request) -> bool:
    attempt = request.prompt.attempt
    writes = [write for server in simulator.servers.values() for write in server.writes]
    return attempt is not None and attempt.key in [write.chunk.key for write in writes]


def is_copied(simulator: Simulator, request: Request, kind: CopyKind) -> bool:
    copy = simulator.decode.memory.copies.of(request)
    return copy is not None and copy.kind == kind


PLACES: dict[str, Callable[[Simulator, Request], object]] = {
    "queued": lambda _, request: request.state is State.QUEUED and not request.output_ids,
    "computed anew": lambda _, request: request.state is State.QUEUED and request.output_ids,
    "being written": being_written,
    "waiting for a hot buffer": lambda simulator, request: (
        request in simulator.decode.run_queue.arrived and not is_parked(request)
    ),
    "ready": lambda _, request: request.state is State.READY,
    "in a step": lambda _, request: request.state is State.RUNNING and request.in_flight,
    "in no step": lambda _, request: request.state is State.RUNNING and not request.in_flight,
    "parked": lambda _, request: is_parked(request),
    "being saved": lambda simulator, request: is_copied(simulator, request, "save"),
    "saved": lambda simulator, request: (
        request.state is State.RETRACTED and simulator.decode.memory.copies.of(request) is None
    ),
    "being loaded": lambda simulator, request: is_copied(simulator, request, "load"),
    "getting its hot rows": lambda simulator, request: is_copied(simulator, request, "open"),
}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_an_abort_gives_everything_back_wherever_the_request_is(place: str, stages: int) -> None:
    """All pools are full in the end (`finish`), and after each move every page has exactly the holders it should."""
    simulator = busy_world(stages)
    found: list[str] = []

    def abort(simulator: Simulator) -> bool:
        found.extend(rid for rid, request in simulator.decode.requests.items() if PLACES[place](simulator, request))
        for rid in found:
            simulator.decode.cancel(rid, simulator.now)
        simulator.act()
        return bool(found)

    assert work(simulator, abort, urgent_at=12), f"no request was ever {place}"
    simulator.check()
    simulator.decode_turn()  # before anybody else has heard of it
    simulator.check()
    assert {simulator.failures[rid].code for rid in found} == {"aborted"}
    assert not set(found) & simulator.decode.requests.keys()
    simulator.finish()
    assert simulator.decode.counters["requests_finished"] == len(simulator.submitted) - len(found)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_request_of_one_token_needs_no_hot_buffer_and_leaves_nothing(stages: int) -> None:
    """What a health check sends: it is over when its KV arrives."""
    simulator = Simulator(stages=stages, hot_pages=3)
    simulator.submit(10, 0, 1, 1, None, 0)
    assert work(simulator, lambda simulator: not simulator.decode.requests)
    simulator.finish()
    assert simulator.decode.counters["requests_finished"] == 1
    assert sum(simulator.hot_seen.values()) == 0


def test_a_request_longer_than_the_hot_pool_is_served_and_one_longer_than_the_host_pool_refused() -> None:
    simulator = Simulator(hot_pages=3)
    most = PAGES * PAGE_SIZE
    simulator.submit(22, 0, most - 21, 1, None, 0)  # the last token is never fed back
    simulator.submit(22, 1, most - 20, 1, None, 0)
    (refused,) = simulator.failures.values()
    assert (refused.status, refused.code) == (413, "too_large")
    assert f"exceed the KV pool of {most} tokens" in refused.message
    assert work(simulator, lambda simulator: not simulator.decode.requests)
    simulator.finish()
    assert simulator.hot_seen["cycled"] == simulator.decode.counters["decode_steps"] == most - 22


@pytest.mark.parametrize("stages", [1, 2])
def test_everything_is_too_little_at_once(stages: int) -> None:
    """Pages, hot buffers, the queue and the length of a request: who can wait does, the others hear why not."""
    simulator = busy_world(stages)
    for number in range(12):
        simulator.submit(4 + number, number % 2, 20, 1, None, number % 2)
        simulator.submit(40, 0, 20, 1, None, 1)  # longer than the pool
        work(simulator, lambda _: True)
    assert work(simulator, lambda simulator: not simulator.decode.requests)
    simulator.finish()
    answers = {(failed.status, failed.code) for failed in simulator.failures.values()}
    assert answers == {(413, "too_large"), (429, "overloaded")}
    assert simulator.decode.counters["retractions"] > 0
    assert simulator.hot_seen["waited"] > 0
    assert simulator.decode.counters["requests_finished"] == len(simulator.submitted) - len(simulator.failures)


def test_an_urgent_request_gets_a_buffer_although_steps_are_always_under_way() -> None:
    """There is one buffer. Its owner is held back from the next step, and parked when it is in none."""
    simulator = Simulator(overlap=True, hot_pages=3)
    simulator.submit(6, 0, 26, 1, None, 0)
    assert work(simulator, lambda simulator: len(simulator.decode.run_queue.running) == 1)
    simulator.submit(6, 1, 4, 1, None, 1)
    assert work(simulator, lambda simulator: simulator.decode.counters["requests_finished"] == 1)
    (slow,) = simulator.decode.requests.values()
    assert slow.prompt.priority == 0
    assert simulator.hot_seen["parked"] > 0
    assert work(simulator, lambda simulator: not simulator.decode.requests)
    simulator.finish()
